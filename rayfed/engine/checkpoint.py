"""Checkpoints: the round, the server's state, the state of every client that has one, and versions that are in use.

Random states are not saved, because random streams are keyed by round. A checkpoint writes only the states of clients
that changed since the checkpoint before, and few clients' states at a time are in memory. The recorder writes the
bytes, because it may be on another machine; `rayfed.records.checkpoint_store` describes the files.
"""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from rayfed.algorithm import State
from rayfed.core.errors import StorageError, UsageError, one_line
from rayfed.core.ids import ClientIndex
from rayfed.core.trees import serialised, tree_map
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.rounds import Version
from rayfed.engine.server import Server
from rayfed.records.checkpoint_store import BLOCK_BYTES, Saved, SavedPart, checksum

_Item = TypeVar("_Item")


class CheckpointFiles(Protocol):
    """The part of a `Recorder` that writes and reads checkpoints; see there."""

    def begin_checkpoint(self, trial: str) -> int: ...
    def write_states(self, trial: str, number: int, states: Mapping[str, bytes]) -> None: ...
    def commit_checkpoint(
        self, trial: str, number: int, base: int | None, header: Mapping[str, Any], parts: Mapping[str, SavedPart]
    ) -> None: ...
    def saved(self, trial: str) -> Saved: ...
    def saved_states(self, trial: str, parts: Mapping[str, SavedPart]) -> Mapping[str, bytes]: ...


class _Unusable(Exception):
    """A checkpoint cannot be used; the message goes on from "checkpoint 7 of trial"."""


class Checkpointer:
    """Saves the state of a server and its clients, and restores it.

    Args:
        configuration: A hash of everything that determines the outcome; a checkpoint with another hash is refused.
        keep_best: Whether the checkpoint of the best round is kept until another round is better.

    Attributes:
        round: The round of the last checkpoint that was saved or restored, or None.
        number: The number of that checkpoint, or None.
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
        self._server = server
        self._files = files
        self._trial = trial
        self._configuration = configuration
        self._version = version
        self._keep_best = keep_best
        self._base: int | None = None
        self._versions: dict[ClientIndex, int] = {}
        self._ring: dict[str, SavedPart] = {}
        self.round: int | None = None

    @property
    def number(self) -> int | None:
        return self._base

    def save(self) -> None:
        """Save the state after the last finished round.

        Earlier checkpoints are still there if the disk or the object store fails.
        """
        versions = dict(self._server.fleet.states.versions)
        ring = {f"version_{start}": version for start, version in self._server.rounds.ring.items()}
        number = self._files.begin_checkpoint(self._trial)
        parts: dict[str, SavedPart] = {}
        for batch in _batched(self._unsaved(ring, versions), len):
            for name, content in batch.items():
                parts[name] = SavedPart(number, len(content), checksum(content))
            self._files.write_states(self._trial, number, batch)
        kept = {}
        for name in ring:
            if name in parts:
                kept[name] = parts.pop(name)
            else:
                kept[name] = self._ring[name]
        is_best = self._keep_best and self._server.best.round == self._server.round
        header = {
            "trial": self._trial,
            "configuration": self._configuration,
            "rayfed": self._version,
            "round": self._server.round,
            "progress": self._server.progress(),
            "ring": {name: list(part) for name, part in kept.items()},
            "is_best": is_best,
        }
        self._files.commit_checkpoint(self._trial, number, self._base, header, parts)
        self._base = number
        self._versions = versions
        self._ring = kept
        self.round = self._server.round

    def _unsaved(self, ring: Mapping[str, Version], versions: Mapping[ClientIndex, int]) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the bytes of each state that the checkpoint before does not have."""
        yield "server", bytes(serialised(self._server.state))
        for name, version in ring.items():
            if name not in self._ring:
                yield name, bytes(serialised(version._asdict()))
        states = self._server.fleet.states
        for client, number in versions.items():
            if self._versions.get(client) != number:
                yield str(client), bytes(serialised(states[client]))

    def restore(self, saved: Saved) -> list[str]:
        """Restore the newest checkpoint that is whole, so that its next round can be run.

        Returns:
            A line on each newer checkpoint, which cannot be used.
        """
        server = self._server
        position, notes = _newest_usable(saved, self._trial, self._configuration, server.blueprint, self._load)
        content = saved[position]["content"]
        self._base = saved[position]["number"]
        self.round = server.round
        self._ring = {name: SavedPart(*part) for name, part in content["ring"].items()}
        self._versions = dict(server.fleet.states.versions)
        return notes

    def _load(self, content: Mapping[str, Any]) -> None:
        """Load the states of a checkpoint into the server and its fleet."""
        server = self._server
        ((_, state),) = self._read({"server": content["server"]})
        if not state.keys() >= server.state.keys():  # a setup may have added fields
            raise _Unusable("belongs to another algorithm")
        of_clients = self._read(content["clients"])
        server.fleet.load((ClientIndex(int(name)), state) for name, state in of_clients)
        server.state = server.ctx.task.to_memory_format(state)
        server.round = content["round"]
        versions = self._read(content["ring"])
        try:
            ring = {}
            for name, version in versions:
                _, _, start = name.partition("_")
                ring[int(start)] = Version(**version)
            server.rounds.ring = ring
            server.restore_progress(content["progress"])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise _Unusable(f"is damaged: its progress cannot be used ({one_line(error)})") from error

    def _read(self, parts: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, State]]:
        """Yield the states in the parts of a manifest, on the server's device."""
        return _states(_contents(self._files, self._trial, parts), self._server.ctx.task.device)


def verified(
    saved: Saved, files: CheckpointFiles, trial: str, configuration: str, blueprint: Blueprint
) -> tuple[Saved, list[str]]:
    """Return the newest checkpoint that is whole with those before it, and a line on each newer checkpoint.

    All states are read and compared with their checksums, so that damage is reported before a start.
    """

    def read(content: Mapping[str, Any]) -> None:
        parts = {"server": content["server"], **content["clients"], **content["ring"]}
        for _ in _contents(files, trial, parts):
            pass

    position, notes = _newest_usable(saved, trial, configuration, blueprint, read)
    return saved[position:], notes


def _newest_usable(
    saved: Saved, trial: str, configuration: str, blueprint: Blueprint, use: Callable[[Mapping[str, Any]], None]
) -> tuple[int, list[str]]:
    """Return the position of the newest checkpoint that `use` can read, and a line on each newer checkpoint.

    Raises:
        UsageError: No checkpoint can be used.
    """
    faults: list[str] = []
    for position, checkpoint in enumerate(saved):
        try:
            content = _checked(checkpoint, trial, configuration, blueprint)
            use(content)
        except (_Unusable, StorageError) as error:
            name = f"checkpoint {checkpoint['number']} of {trial}"
            faults.append(f"{name} {error}")
            continue
        start = f"continues from checkpoint {checkpoint['number']}, after round {content['round']}"
        return position, [f"{fault}; {start}" for fault in faults]
    raise UsageError(f"{'; '.join(faults) or 'there is no checkpoint'}; start anew with resume=false")


def newest_round(saved: Saved) -> int | None:
    """Return the round of the newest checkpoint whose manifest is readable, or None."""
    content = newest_content(saved)
    if content is None:
        return None
    return int(content["round"])


def newest_content(saved: Saved) -> Mapping[str, Any] | None:
    """Return the content of the newest checkpoint whose manifest is readable, or None."""
    return next((checkpoint["content"] for checkpoint in saved if "content" in checkpoint), None)


class SavedState:
    """The state in a checkpoint, read when asked for; `content` is that of its manifest.

    Attributes:
        round: The round after which it was saved.
        clients: The states of clients by their id.
    """

    def __init__(self, files: CheckpointFiles, trial: str, content: Mapping[str, Any], ids: np.ndarray):
        self._files = files
        self._trial = trial
        self._content = content
        self.round: int = content["round"]
        self.clients: Mapping[int, State] = _SavedClients(self._state, content["clients"], ids)

    def server(self) -> State:
        """Return the server's state."""
        return self._state("server", self._content["server"])

    def _state(self, name: str, part: Sequence[Any]) -> State:
        try:
            contents = _contents(self._files, self._trial, {name: part})
            ((_, state),) = _states(contents, torch.device("cpu"))
        except (_Unusable, StorageError) as error:
            raise UsageError(
                f"the state of {self._trial} after round {self.round} cannot be read any more, because its checkpoint "
                f"was deleted, replaced or damaged ({error})"
            ) from error
        return state


class _SavedClients(Mapping[int, State]):
    """The states of clients by their id; each access reads a state from the checkpoint."""

    def __init__(
        self, read: Callable[[str, Sequence[Any]], State], parts: Mapping[str, Sequence[Any]], ids: np.ndarray
    ):
        self._read = read
        for name in parts:
            if int(name) >= len(ids):
                raise UsageError(f"the checkpoint has a state of client {name}, and the data have {len(ids)} clients")
        by_id = {int(ids[int(name)]): (name, part) for name, part in parts.items()}
        self._parts = dict(sorted(by_id.items()))

    def __getitem__(self, client: int) -> State:
        return self._read(*self._parts[client])

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, client: object) -> bool:
        return client in self._parts


def _contents(files: CheckpointFiles, trial: str, parts: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of the parts of a manifest, and check them."""
    saved = ((name, SavedPart(*part)) for name, part in parts.items())
    for batch in _batched(saved, lambda part: part.length):
        contents = dict(files.saved_states(trial, batch))
        for name, part in batch.items():
            content = contents.pop(name)
            if checksum(content) != part.checksum:
                what = "the server's state"
                if name != "server":
                    what = f"the state of client {name}"
                raise _Unusable(f"is damaged: {what} does not match its checksum")
            yield name, content


def _batched(items: Iterable[tuple[str, _Item]], size: Callable[[_Item], int]) -> Iterator[dict[str, _Item]]:
    """Yield items in batches of at most `BLOCK_BYTES`; a larger item is a batch by itself."""
    batch: dict[str, _Item] = {}
    total = 0
    for name, item in items:
        if batch and total + size(item) > BLOCK_BYTES:
            yield batch
            batch = {}
            total = 0
        batch[name] = item
        total += size(item)
    if batch:
        yield batch


def _states(parts: Iterable[tuple[str, bytes]], device: torch.device) -> Iterator[tuple[str, State]]:
    for name, content in parts:
        try:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            if not isinstance(state, dict):
                raise TypeError("it has no fields")
            state = tree_map(lambda tensor: tensor.to(device), state)
        except Exception as error:  # torch raises many kinds for damaged bytes
            reason = one_line(error)[:200]
            raise _Unusable(f"is damaged: state {name} cannot be read ({reason})") from error
        yield name, state


def _checked(checkpoint: Mapping[str, Any], trial: str, configuration: str, blueprint: Blueprint) -> Mapping[str, Any]:
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
    return content


def configuration_hash(*values: str) -> str:
    """Return the hash by which a checkpoint is known to belong to a configuration."""
    return hashlib.blake2b("\n".join(values).encode(), digest_size=16).hexdigest()
