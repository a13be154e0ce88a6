"""Checkpoints: the round, the server's state, and the state of every client that has one.

Random states are not saved, because random streams are keyed by round. A checkpoint writes only the states of clients
that changed since the one before, and one client's state at a time is in memory. Bytes go to the recorder in blocks,
because it may be on another machine; `rayfed.records.checkpoints` describes the files.
"""

import contextlib
import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from rayfed.algorithm import State
from rayfed.core.errors import StorageError, UsageError
from rayfed.core.ids import ClientIndex
from rayfed.core.records import Event
from rayfed.core.trees import tree_map
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.cohorts import sampled_cohort
from rayfed.engine.serialization import serialised
from rayfed.engine.server import Server, responding
from rayfed.records.checkpoints import BLOCK_BYTES, NoCheckpoint, Part, checksum
from rayfed.records.storage import one_line

GAP_BYTES = 2**20
"""Unused bytes between two parts that are read along, because a request costs more."""

Saved = Sequence[Mapping[str, Any]]
"""The checkpoints of a trial, newest first, as `CheckpointFiles.saved` returns them; empty without any."""


class CheckpointFiles(Protocol):
    """The part of a `Recorder` that writes and reads checkpoints; see there."""

    def begin_checkpoint(self, trial: str, base: int | None) -> int: ...
    def append_to_checkpoint(self, trial: str, block: bytes) -> None: ...
    def commit_checkpoint(
        self, trial: str, header: Mapping[str, Any], server: Part, clients: Mapping[str, Part], size: int
    ) -> None: ...
    def discard_checkpoint(self, trial: str) -> None: ...
    def saved(self, trial: str) -> Saved: ...
    def saved_bytes(self, trial: str, segment: int, offset: int, length: int) -> bytes: ...


class _Unusable(Exception):
    """A checkpoint cannot be used; the message goes on from "checkpoint 7 of trial"."""


class Checkpointer:
    """Saves the state of a server and its clients, and restores it.

    Args:
        files: The recorder.
        trial: The name of the trial.
        configuration: A hash of everything that determines the outcome; a checkpoint of another one is refused.
        version: The version of rayfed.
        keep_best: Whether the checkpoint of the best round is kept until another round is better.

    Attributes:
        round: The round of the last checkpoint that was saved or restored, or None.
    """

    def __init__(
        self,
        server: Server,
        files: CheckpointFiles,
        trial: str,
        configuration: str,
        version: str,
        *,
        keep_best: bool = False,
    ):
        self._server, self._files = server, files
        self._trial, self._configuration, self._version = trial, configuration, version
        self._keep_best = keep_best
        self._base: int | None = None
        self._versions: dict[ClientIndex, int] = {}
        self.round: int | None = None

    def save(self) -> None:
        """Save the state after the last finished round.

        Raises:
            StorageError: The disk or the object store failed. Earlier checkpoints are still there.
        """
        while not self._saved():
            pass

    def _saved(self) -> bool:
        """Save once; return False if the recorder was started again in between, of which there are only so many."""
        states = self._server.fleet.states
        versions = {client: states.version(client) for client in states}
        number = self._files.begin_checkpoint(self._trial, self._base)
        try:
            blocks = _Blocks(number, lambda block: self._files.append_to_checkpoint(self._trial, block))
            server = blocks.add(self._server.state)
            changed = (client for client, version in versions.items() if self._versions.get(client) != version)
            clients = {str(client): blocks.add(states[client]) for client in changed}
            blocks.flush()
            header = {
                "trial": self._trial,
                "configuration": self._configuration,
                "rayfed": self._version,
                "round": self._server.round,
                "progress": self._server.progress(),
                "is_best": self._keep_best and self._server.best.round == self._server.round,
            }
            self._files.commit_checkpoint(self._trial, header, server, clients, blocks.size)
        except NoCheckpoint:
            return False
        except BaseException:
            with contextlib.suppress(Exception):  # such as those of a recorder that is gone
                self._files.discard_checkpoint(self._trial)
            raise
        self._base, self._versions, self.round = number, versions, self._server.round
        return True

    def restore(self, saved: Saved) -> list[str]:
        """Restore the newest checkpoint that is whole; the next round is the one after it.

        Returns:
            A line on each newer checkpoint that cannot be used. They are events of the next record, too.

        Raises:
            UsageError: No checkpoint can be used.
        """
        server, faults = self._server, []
        device = server.ctx.task.device
        for checkpoint in saved:
            try:
                content = _checked(checkpoint, self._trial, self._configuration, server.blueprint, server.population)
                read = _parts_reader(self._files, self._trial)
                ((_, state),) = _states(read({"server": Part(*content["server"])}), device)
                if not state.keys() >= server.state.keys():  # a setup may have added some
                    raise _Unusable("belongs to another algorithm")
                clients = {client: Part(*part) for client, part in content["clients"].items()}
                server.fleet.load((ClientIndex(int(name)), state) for name, state in _states(read(clients), device))
            except (_Unusable, StorageError) as error:
                faults.append(f"checkpoint {checkpoint['number']} of {self._trial} {error}")
                continue
            server.state, server.round = server.ctx.task.to_memory_format(state), content["round"]
            server.restore_progress(content.get("progress", {}))
            states = server.fleet.states
            self._base, self.round = checkpoint["number"], server.round
            self._versions = {client: states.version(client) for client in states}
            notes = _fallback_notes(faults, checkpoint["number"], server.round)
            server.fleet.events += [Event(event="checkpoint damaged", detail=note) for note in notes]
            return notes
        raise _refusal(faults)


def verified(
    saved: Saved,
    files: CheckpointFiles,
    trial: str,
    configuration: str,
    blueprint: Blueprint,
    population: Population,
) -> tuple[Saved, list[str]]:
    """Return the newest checkpoint that is whole, and a line on each newer one that cannot be used.

    Everything is read and compared with its checksum, and nothing is kept, so that damage is reported before a start.

    Raises:
        UsageError: No checkpoint can be used.
    """
    faults: list[str] = []
    for position, checkpoint in enumerate(saved):
        try:
            content = _checked(checkpoint, trial, configuration, blueprint, population)
            parts = {"server": content["server"], **content["clients"]}
            for _ in _parts_reader(files, trial)({name: Part(*part) for name, part in parts.items()}):
                pass
        except (_Unusable, StorageError) as error:
            faults.append(f"checkpoint {checkpoint['number']} of {trial} {error}")
            continue
        return saved[position:], _fallback_notes(faults, checkpoint["number"], content["round"])
    raise _refusal(faults)


def newest_round(saved: Saved) -> int | None:
    """Return the round of the newest checkpoint whose manifest is readable, or None."""
    content = newest_content(saved)
    return None if content is None else content["round"]


def newest_content(saved: Saved) -> Mapping[str, Any] | None:
    """Return the content of the newest checkpoint whose manifest is readable, or None."""
    return next((checkpoint["content"] for checkpoint in saved if "content" in checkpoint), None)


class SavedState:
    """The state in one checkpoint, read when asked for.

    Args:
        files: The recorder, or another that reads the same folder.
        content: The content of the checkpoint's manifest.
        indices: The position in the population by the client's id.

    Attributes:
        round: The round after which it was the state.
        clients: The states of clients by their id.
    """

    def __init__(
        self, files: CheckpointFiles, trial: str, content: Mapping[str, Any], indices: Mapping[int, ClientIndex]
    ):
        self._read = _parts_reader(files, trial)
        self._trial, self._content = trial, content
        self.round: int = content["round"]
        self.clients: Mapping[int, State] = _SavedClients(self._state, content["clients"], indices)

    def server(self) -> State:
        """Return the server's state.

        Raises:
            UsageError: The results folder is gone, or its files have changed.
        """
        return self._state("server", self._content["server"])

    def _state(self, name: str, part: Sequence[Any]) -> State:
        try:
            ((_, state),) = _states(self._read({name: Part(*part)}), torch.device("cpu"))
        except (_Unusable, StorageError) as error:
            raise UsageError(
                f"the state of {self._trial} after round {self.round} cannot be read any more, because its checkpoint "
                f"was deleted, replaced or damaged ({error})"
            ) from error
        return state


class _SavedClients(Mapping[int, State]):
    """The states of clients by their id; each access reads one from the checkpoint."""

    def __init__(
        self,
        read: Callable[[str, Sequence[Any]], State],
        parts: Mapping[str, Sequence[Any]],
        indices: Mapping[int, ClientIndex],
    ):
        self._read, self._parts = read, parts
        self._indices = {id: index for id, index in sorted(indices.items()) if str(index) in parts}

    def __getitem__(self, client: int) -> State:
        name = str(self._indices[client])
        return self._read(name, self._parts[name])

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, client: object) -> bool:
        return client in self._indices

    def __repr__(self) -> str:
        return f"<states of {len(self)} clients, read from the checkpoint when asked for>"


class _Blocks:
    """Collects serialised states and sends them in blocks of at most `BLOCK_BYTES`."""

    def __init__(self, segment: int, send: Callable[[bytes], None]):
        self._segment, self._send = segment, send
        self._pending: list[memoryview] = []
        self._bytes = self.size = 0

    def add(self, state: State) -> Part:
        content = serialised(state)
        offset, self.size = self.size, self.size + len(content)
        if self._bytes + len(content) > BLOCK_BYTES:
            self.flush()
        rest = len(content) // BLOCK_BYTES * BLOCK_BYTES
        for start in range(0, rest, BLOCK_BYTES):
            self._send(bytes(content[start : start + BLOCK_BYTES]))
        if len(content) > rest:
            self._pending.append(content[rest:])
            self._bytes += len(content) - rest
        return Part(self._segment, offset, len(content), checksum(content))

    def flush(self) -> None:
        if self._pending:
            self._send(b"".join(self._pending))
            self._pending, self._bytes = [], 0


Read = Callable[[Mapping[str, Part]], Iterator[tuple[str, bytes]]]


def _parts_reader(files: CheckpointFiles, trial: str) -> Read:
    """Return a function that yields the bytes of parts, in the order of the files, and checks them."""

    def read(parts: Mapping[str, Part]) -> Iterator[tuple[str, bytes]]:
        for run in _runs(sorted(parts.items(), key=lambda item: item[1][:3])):
            segment, first = run[0][1][:2]
            length = max(part.offset + part.length for _, part in run) - first
            starts = range(first, first + length, BLOCK_BYTES)
            block = b"".join(
                files.saved_bytes(trial, segment, start, min(BLOCK_BYTES, first + length - start)) for start in starts
            )
            for name, part in run:
                start = part.offset - first
                content = block[start : start + part.length]
                if len(content) != part.length or checksum(content) != part.checksum:
                    what = "the server's state" if name == "server" else f"the state of client {name}"
                    raise _Unusable(f"is damaged: {what} in segment {segment} does not match its checksum")
                yield name, content

    return read


def _runs(parts: Iterable[tuple[str, Part]]) -> Iterator[list[tuple[str, Part]]]:
    """Yield neighbouring parts that are read together: at most `BLOCK_BYTES`, or a single part."""
    run: list[tuple[str, Part]] = []
    for name, part in parts:
        if run:
            first, last = run[0][1], run[-1][1]
            is_near = part.segment == first.segment and part.offset - (last.offset + last.length) <= GAP_BYTES
            if not is_near or part.offset + part.length - first.offset > BLOCK_BYTES:
                yield run
                run = []
        run.append((name, part))
    if run:
        yield run


def _states(parts: Iterable[tuple[str, bytes]], device: torch.device) -> Iterator[tuple[str, State]]:
    for name, content in parts:
        try:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise _Unusable(f"is damaged: part {name} cannot be read ({one_line(error)})") from error
        if not isinstance(state, dict):
            raise _Unusable(f"is damaged: part {name} is not a state but {type(state).__name__}")
        yield name, tree_map(lambda tensor: tensor.to(device), state)


def _checked(
    checkpoint: Mapping[str, Any],
    trial: str,
    configuration: str,
    blueprint: Blueprint,
    population: Population,
) -> Mapping[str, Any]:
    """Return the content of a manifest after all checks that need no state."""
    if "fault" in checkpoint:
        raise _Unusable(checkpoint["fault"])
    content: Mapping[str, Any] = checkpoint["content"]
    if content["trial"] != trial:
        raise _Unusable(f"belongs to trial {content['trial']}")
    if content["configuration"] != configuration:
        raise _Unusable("belongs to another configuration, other code or other data")
    last = blueprint.rounds + bool(blueprint.algorithm.final_exchanges)
    if not 0 <= content["round"] <= last:
        raise _Unusable(f"is damaged: its round is {content['round']}, expected 0 to {last}")
    found = {ClientIndex(int(name)) for name in content["clients"]}
    is_finished = content.get("progress", {}).get("finished", content["round"] == last)
    expected = _with_state(blueprint, population, content["round"], is_finished=is_finished)
    sampling = content.get("progress", {}).get("sampling")
    if sampling is not None and not blueprint.algorithm.setup_exchanges and content["round"] <= blueprint.rounds:
        expected = {ClientIndex(i) for i in sampling["participated"]}
    if missing := sorted(expected - found):
        raise _Unusable(f"is damaged: the states of {len(missing)} clients are missing, such as client {missing[0]}")
    if extra := sorted(found - expected):
        raise _Unusable(f"is damaged: it has states of {len(extra)} clients too many, such as client {extra[0]}")
    return content


def _with_state(blueprint: Blueprint, population: Population, round: int, *, is_finished: bool) -> set[ClientIndex]:
    """Return the clients that have a state after `round`: those that took part in an exchange.

    Unseen clients go through the setup exchanges when everything else is finished.
    """
    everybody = tuple(map(ClientIndex, range(len(population.clients))))
    participants = everybody[: len(population.participants)]
    if blueprint.algorithm.setup_exchanges:
        return set(everybody if is_finished else participants)
    if round > blueprint.rounds:
        return set(participants)
    clients: set[ClientIndex] = set()
    loses_clients = blueprint.availability.loses_clients
    ctx = blueprint.context(population, "cpu") if loses_clients else None
    examples = blueprint.training_examples(population) if loses_clients else []
    for number in range(1, round + 1):
        sampled = sampled_cohort(blueprint, participants, number)
        clients.update(responding(blueprint, ctx, sampled, examples, number).clients if ctx else sampled)
        if len(clients) == len(participants):
            break
    return clients


def _fallback_notes(faults: Sequence[str], number: int, round: int) -> list[str]:
    return [f"{fault}; continues from checkpoint {number}, after round {round}" for fault in faults]


def _refusal(faults: Sequence[str]) -> UsageError:
    return UsageError(f"{'; '.join(faults) or 'there is no checkpoint'}; start anew with resume=false")


def configuration_hash(*values: str) -> str:
    """Return the hash by which a checkpoint is known to belong to a configuration."""
    return hashlib.blake2b("\n".join(values).encode(), digest_size=16).hexdigest()
