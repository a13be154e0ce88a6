"""A planned trial, run to its end in any process, which reports to a recorder."""

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import rayfed
from rayfed.algorithm import State
from rayfed.core import errors
from rayfed.core.errors import Diverged, HostLost, StorageError, UsageError, breaks_device, error_line
from rayfed.core.ids import ClientIndex
from rayfed.core.machine import memory_bytes
from rayfed.core.rng import global_state_kept
from rayfed.core.round_record import Event, Record
from rayfed.engine.checkpoint import Checkpointer, newest_content, newest_round
from rayfed.engine.device import device_for
from rayfed.engine.fleet import Fleet
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.experiments.capacity import servers_gpus
from rayfed.experiments.config import Config
from rayfed.experiments.plan import Plan
from rayfed.experiments.plan_channel import client_rows
from rayfed.records.checkpoint_store import Saved
from rayfed.records.recorder import Recorder, traceback_file
from rayfed.records.round_report import RoundReport
from rayfed.records.storage import open_storage, storage_errors
from rayfed.records.trials import readable_trials

_SAVING_SHARE = 0.01  # of the time, that checkpoints by the clock may take


def resume_message(config: Config, saved: Saved) -> str:
    """Return in a few words what `resume=true` does with the `usable` checkpoints `saved`."""
    if not saved:
        return "nothing saved: starts at round 1"
    done = newest_round(saved)
    if done is None:
        return "the checkpoint cannot be read"
    if _has_ended(config, saved):
        return "already finished: nothing to do"
    return f"continues after round {done}"


def _has_ended(config: Config, saved: Saved) -> bool:
    """Return whether a trial with `config.rounds` rounds has ended at the newest of the checkpoints `saved`."""
    content = newest_content(saved) or {}
    progress = content.get("progress", {})
    if not progress.get("finished"):
        return False
    if progress["rounds"] >= config.rounds:
        return True
    return progress["early_stopping"]["reason"] is not None


def usable(config: Config, saved: Saved) -> Saved:
    """Return the checkpoints that a run with `config.rounds` rounds would also have reached, and unreadable ones."""
    return [one for one in saved if "content" not in one or _is_reached(config, one["content"])]


def _is_reached(config: Config, content: Mapping[str, Any]) -> bool:
    """Return whether a run with `config.rounds` rounds reaches the state of a checkpoint."""
    progress = content["progress"]
    round: int = content["round"]
    rounds = progress["rounds"]
    if rounds >= config.rounds:
        return True
    if round > rounds:
        return False  # it is the state after the final stage
    has_unseen_clients = config.unseen_clients or config.unseen_share
    if progress["finished"] and has_unseen_clients and config.algorithm.setup_exchanges:
        return False  # unseen clients have joined
    if config.early_stopping.patience is None or round != rounds:
        return True
    return round % config.evaluate.every == 0  # else, a longer run does not score this round


def check_rounds(configs: Mapping[str, Config]) -> list[dict[str, Any]]:
    """Return the rows in the results of an experiment, after checking that no trial would lose rounds.

    Args:
        configs: The configurations of trials of the experiment by their names.

    Raises:
        UsageError: A trial has more rounds than its configuration gives it.
        StorageError: The results, or the row of one of these trials, cannot be read.
    """
    first = next(iter(configs.values()))
    home = open_storage(first.results).child(first.experiment, "trials")
    with storage_errors(home.location):
        rows, faults = readable_trials(home)
    for trial in configs.keys() & faults:
        raise StorageError(faults[trial])
    for row in rows:
        config = configs.get(row["trial"])
        if config is None:
            continue
        done = row["rounds_done"] or 0
        if done > config.rounds:
            raise UsageError(
                f"rounds={config.rounds}: {row['trial']} has {done} rounds in {config.results}/{config.experiment}, "
                f"and the number of rounds makes no other trial; give another experiment, or rounds={done}"
            )
    return rows


class Simulation:
    """A trial under way: iterate over it once; each item is a finished round, which is recorded.

    This is the only loop over rounds: commands, Ray Tune's trainable, and the loop of a user go through it. It uses the
    process's random generators and kernels, which are the caller's to keep; see `global_settings`.

    Args:
        plan, sink: The trial, and the recorder.
        make_fleet: Makes the hosts. It is called once.
        device: The device of the server.
        saved: The checkpoints to continue from, as the recorder returns them; empty: start anew.
        replaceable: Whether the trial starts again elsewhere if it loses a process or a GPU. Such a loss is then not
            recorded as its end.
        change: What happens to the trial when it goes on from a checkpoint with other hyperparameters.

    Attributes:
        plan: The trial.
        report: What was recorded of the last round; None before.
        begun: Whether the recorder knows the trial.
        done: Whether the trial has ended and is recorded as done.
        outcome: The hash of the final state, once it is done.
    """

    def __init__(
        self,
        plan: Plan,
        sink: Recorder,
        make_fleet: Callable[[], Fleet],
        device: str | torch.device,
        *,
        saved: Saved = (),
        replaceable: bool = False,
        change: Event | None = None,
    ):
        self.plan = plan
        self.report: RoundReport | None = None
        self._change = change
        self._sink = sink
        self._device = torch.device(device)
        self._replaceable = replaceable
        self._saved = usable(plan.config, saved)
        self._make_fleet = make_fleet
        self._server: Server | None = None
        self._checkpointer: Checkpointer | None = None
        self._interval = 60 * plan.config.checkpoint.minutes
        self._saved_at = time.monotonic()
        self.begun = False
        self.done = False
        self.outcome = ""

    def __iter__(self) -> Generator[Record, None, None]:
        """Run the trial from its start or its checkpoint.

        The trial is recorded as done before the record of its last round is given out, since a scheduler may end the
        trial whenever a round is reported. An error that is thrown into the iterator ends the trial as its own would.

        Raises:
            Diverged: A value became infinite or NaN. This is recorded first, as is any other error.
            KeyboardInterrupt: Ctrl-C ended the trial; the message says how to continue.
        """
        try:
            server = self._started()
            for record in server.run():
                self._recorded(server, record)
                if server.finished:
                    self._finish(server)
                yield record
            if not self.done:
                self._finish(server)
        except GeneratorExit:
            raise
        except BaseException as error:
            self.failed(error)
            raise

    @contextlib.contextmanager
    def global_settings(self) -> Iterator[None]:
        """Restore what the simulation changes in its process after this block, and make its GPU the current one."""
        with global_state_kept(), self.current_device():
            yield

    def current_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which users' code means the server's GPU by "cuda"."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.device(self._device)

    def leave(self) -> None:
        """Note that the loop was left before its end: keep the state of the last round, from which it can go on."""
        if self._server is None or self.done:
            return
        if self._server.round:
            self.save()
        self._sink.end(self.plan.trial, {"status": "interrupted"})

    def save(self) -> int | None:
        """Save the present state, unless that is done, and return the number of the checkpoint.

        Returns:
            None if no round has been run yet.
        """
        if self._server is None or self._checkpointer is None:
            return None
        if not self._is_saved(self._server):
            self._save()
        return self._checkpointer.number

    @property
    def round(self) -> int:
        """The last finished round."""
        if self._server is None:
            return 0
        return self._server.round

    @property
    def best(self) -> float | None:
        """The best validation score so far, as a gain; None before the first one."""
        if self._server is None:
            return None
        return self._server.best.score

    @property
    def server_state(self) -> State:
        """The server's present state; empty before the first round."""
        if self._server is None:
            return {}
        return self._server.state

    @property
    def client_states(self) -> Mapping[ClientIndex, State]:
        """The present states of the clients that have one; empty before the first round."""
        if self._server is None:
            return {}
        return self._server.fleet.states

    def _started(self) -> Server:
        """Make the server, in its saved state or its first one, and begin the trial at the recorder."""
        plan = self.plan
        fleet = self._make_fleet()
        server = Server(plan.blueprint, plan.population, fleet, plan.evaluation, self._device)
        server.evaluator.tell = partial(self._sink.doing, plan.trial)
        self._checkpointer = Checkpointer(
            server, self._sink, plan.trial, plan.configuration_hash, rayfed.__version__, keep_best=plan.keep_best
        )
        damaged: list[str] = []
        keep_through_round = None
        if self._saved:
            damaged = self._checkpointer.restore(self._saved)
            keep_through_round = server.round
        for line in damaged:
            print(f"rayfed: {line}", file=sys.stderr, flush=True)
        values = plan.values()
        if fleet.vmap_clients is not None:
            values["vmap_clients"] = fleet.vmap_clients
        self._sink.begin(plan.trial, values, plan.config.rounds, keep_through_round, plan.holdings())
        rows = client_rows(plan.blueprint.algorithm, plan.population)
        if rows:
            self._sink.clients(plan.trial, rows)
        for line in damaged:
            self._sink.event(plan.trial, Event(event="checkpoint damaged", detail=line, round=server.round))
        if self._change is not None:
            self._sink.event(plan.trial, replace(self._change, round=server.round))
        self._note_added_rounds(server)
        self.begun = True
        self._server = server
        return server

    def _note_added_rounds(self, server: Server) -> None:
        """Record that the trial goes on with more rounds than it had when it was saved."""
        content = newest_content(self._saved)
        if not content:
            return
        rounds = self.plan.config.rounds
        before = content["progress"]["rounds"]
        if before < rounds:
            detail = f"goes on with rounds={rounds}, after rounds={before}"
            self._sink.event(self.plan.trial, Event(event="rounds added", detail=detail, round=server.round))

    def _recorded(self, server: Server, record: Record) -> None:
        self.report = self._sink.record(self.plan.trial, record)
        every = self.plan.config.checkpoint.every
        round = server.round
        is_last = round >= self.plan.config.rounds or server.finished
        is_due = every and round and (round % every == 0 or is_last)
        is_late = 0 < self._interval < time.monotonic() - self._saved_at and not is_last
        is_best = self.plan.keep_best and server.best.round == record.round
        if is_due or is_late or is_best:
            self._save()

    def _finish(self, server: Server) -> None:
        if self.plan.keep_state and not self._is_saved(server):
            self._save()
        self.outcome = server.state_hash()
        values = {"status": "done", "weights_hash": self.outcome, "stop_reason": server.stop_reason}
        self._sink.end(self.plan.trial, values)
        self.done = True
        if not (self.plan.keep_state or self.plan.keep_best or self.plan.config.checkpoint.every):
            self._sink.delete_checkpoints(self.plan.trial)

    def _is_saved(self, server: Server) -> bool:
        """Return whether the present round of `server` has a checkpoint."""
        return self._checkpointer is None or self._checkpointer.round == server.round

    def _save(self) -> None:
        assert self._checkpointer is not None, "a server has one"
        began = time.monotonic()
        self._checkpointer.save()
        self._saved_at = time.monotonic()
        if self._interval:
            self._interval = max(self._interval, (self._saved_at - began) / _SAVING_SHARE)

    def may_go_on_after(self, error: BaseException) -> bool:
        """Return whether the trial may start again elsewhere after `error`, which is then not recorded as its end."""
        return self._replaceable and (isinstance(error, HostLost) or breaks_device(error))

    def failed(self, error: BaseException) -> None:
        """Record the end of a trial that `error` ended. A trial that never began keeps its earlier row."""
        plan = self.plan
        if isinstance(error, (UsageError, KeyboardInterrupt)) and not self.begun:
            return
        if self.may_go_on_after(error):
            return
        if isinstance(error, KeyboardInterrupt):
            if not self.done:
                self._sink.end(plan.trial, {"status": "interrupted"})
            raise interrupted(self.round, newest_round(self._sink.saved(plan.trial))) from None
        with contextlib.suppress(StorageError):  # on a full disk, the first error is raised
            self._sink.end(plan.trial, {**plan.values(), **failure(error)})
        if type(error).__module__ != errors.__name__:
            file = traceback_file(plan.config.results, plan.config.experiment, plan.trial)
            error.add_note(f"the full traceback is in {file}")


def run_trial(
    plan: Plan,
    sink: Recorder,
    make_fleet: Callable[[], Fleet] | None = None,
    device: str | torch.device | None = None,
    *,
    saved: Saved = (),
    replaceable: bool = False,
) -> str:
    """Run `plan` from the start or from a checkpoint, and return a hash of the final state.

    The state after the last round is kept if checkpoint.every is above 0 or `plan.keep_state` is true.

    Args:
        plan, sink, saved, replaceable: See `Simulation`.
        make_fleet: Makes the hosts; None: the clients train in this process.
        device: The device of the server; None: the device that the configuration reserves.

    Raises:
        Diverged: A value became infinite or NaN. This is recorded first, as is any other error.
    """
    if make_fleet is None:
        simulation = simulation_here(plan, sink, saved)
    else:
        simulation = Simulation(plan, sink, make_fleet, device or "cpu", saved=saved, replaceable=replaceable)
    with simulation.global_settings():
        try:
            for _ in simulation:
                pass
        except KeyboardInterrupt as error:
            if not error.args and not simulation.done:  # it came between two rounds
                simulation.failed(error)
            raise
    return simulation.outcome


def simulation_here(plan: Plan, sink: Recorder, saved: Saved = ()) -> Simulation:
    """Return the simulation of `plan` with its server and all clients in this process."""
    gpus = servers_gpus(plan.config)
    device = device_for(gpus, plan.blueprint.model)
    return Simulation(plan, sink, lambda: local_fleet(plan, device, gpus), device, saved=saved)


def local_fleet(plan: Plan, device: torch.device, gpus: float, *, share: float = 1.0) -> LocalFleet:
    """Return a fleet that trains the clients of `plan` in this process, which has reserved `gpus`.

    Args:
        share: The share of the machine's memory for this trial, beside others that run at the same time.
    """
    memory = plan.config.state.memory
    state_memory = share * memory_bytes() / 4
    if memory is not None:
        state_memory = memory * 2**30
    return LocalFleet(plan.blueprint, plan.population, device, gpus=gpus, share=share, state_memory=state_memory)


def interrupted(round: int, saved: int | None) -> KeyboardInterrupt:
    """Return the exception to raise when Ctrl-C ended a trial after `round`; its message says how to continue.

    `saved` is the round of the last checkpoint; None without any.
    """
    if saved is None:
        how = "starts again, since no checkpoint was due yet; checkpoint.every=1 saves every round"
    elif saved == round:
        how = "with resume=true continues"
    else:
        how = f"with resume=true continues after round {saved}, the last one saved"
    return KeyboardInterrupt(f"interrupted after round {round}; the same command {how}")


def failure(error: BaseException) -> dict[str, Any]:
    """Return the columns `status`, `error` and `traceback` of a trial that `error` ended."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, Diverged):
        return {"status": "diverged", "error": str(error).strip().splitlines()[0], "traceback": trace}
    text = error_line(error)
    if type(error).__module__ == errors.__name__:  # its message says what is wrong and where
        text = f"{type(error).__name__}: {error}"
    return {"status": "failed", "error": text, "traceback": trace}
