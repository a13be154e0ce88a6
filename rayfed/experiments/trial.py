"""Runs one planned trial to its end, wherever it is placed, and reports to a recorder."""

import contextlib
import importlib.metadata
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from rayfed.core.errors import Diverged, StorageError, UsageError
from rayfed.core.records import Record
from rayfed.core.rng import torch_state_kept
from rayfed.engine.checkpoint import Checkpointer, CheckpointFiles, Saved, newest_round
from rayfed.engine.fleet import Fleet
from rayfed.engine.server import Server
from rayfed.experiments.plan import Plan


class Sink(CheckpointFiles, Protocol):
    """The part of a `Recorder` that a trial uses; the recorder may be in another process."""

    def begin(self, trial: str, values: Mapping[str, Any], rounds: int, keep_through_round: int | None) -> None: ...
    def record(self, trial: str, record: Record) -> None: ...
    def end(self, trial: str, values: Mapping[str, Any]) -> None: ...


def resume_message(plan: Plan, saved: Saved) -> str:
    """Return in a few words what `resume=true` does with the checkpoints `saved`."""
    if not saved:
        return "nothing saved: starts at round 1"
    if (done := newest_round(saved)) is None:
        return "the checkpoint cannot be read"
    last = plan.config.rounds + bool(plan.blueprint.algorithm.final_exchanges)
    return "already finished: nothing to do" if done >= last else f"continues after round {done}"


def run_trial(
    plan: Plan,
    sink: Sink,
    make_fleet: Callable[[], Fleet],
    device: str | torch.device,
    *,
    saved: Saved = (),
    report: Callable[[Record], None] = lambda record: None,
) -> str:
    """Run `plan` from the start or from a checkpoint, and return a hash of the final state.

    The last round is saved if checkpoint.every is above 0 or `plan.keep_state` is true.

    Args:
        plan: The trial.
        sink: The recorder.
        make_fleet: Makes the hosts. It is called once, and the fleet is closed at the end.
        device: The device of the server.
        saved: The checkpoints to continue from, as the recorder returns them; empty: start anew.
        report: Called after each round. The last round is reported when the trial is recorded as done, since a
            scheduler may end the trial at any report.

    Raises:
        Diverged: A value became infinite or NaN. This is recorded first, as is any other error.
    """
    every, fleet = plan.config.checkpoint.every, None
    unreported: list[Record] = []
    begun = done = False
    try:
        with torch_state_kept():
            fleet = make_fleet()
            server = Server(plan.blueprint, plan.population, fleet, plan.evaluation, device)
            checkpointer = make_checkpointer(plan, server, sink)
            if saved:
                for note in checkpointer.restore(saved):
                    print(f"rayfed: {note}", file=sys.stderr, flush=True)
            sink.begin(plan.trial, plan.values(), plan.config.rounds, server.round if saved else None)
            begun = True
            for record in server.run():
                sink.record(plan.trial, record)
                if every and server.round and (server.round % every == 0 or server.round >= plan.config.rounds):
                    checkpointer.save()
                if server.round < plan.config.rounds:
                    report(record)
                else:
                    unreported.append(record)
            if plan.keep_state and checkpointer.round != server.round:
                checkpointer.save()
            digest = server.state_hash()
            sink.end(plan.trial, {"status": "done", "weights_hash": digest})
            done = True
            for record in unreported:
                report(record)
    except SystemExit:  # Ray Tune raises it in a trial that its scheduler stops
        if not done:
            sink.end(plan.trial, {"status": "stopped"})
        raise
    except BaseException as error:
        if isinstance(error, (UsageError, KeyboardInterrupt)) and not begun:
            raise  # nothing was started, so the row of an earlier attempt stays
        if isinstance(error, KeyboardInterrupt):
            if not done:
                sink.end(plan.trial, {"status": "interrupted"})
            raise interrupted(plan, server.round) from None
        status = "diverged" if isinstance(error, Diverged) else "failed"
        text = str(error).strip().splitlines() or [type(error).__name__]
        shown = text[0] if isinstance(error, Diverged) else f"{type(error).__name__}: {text[-1]}"
        trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(StorageError):  # on a full disk, what filled it is what is raised
            sink.end(plan.trial, {**plan.values(), "status": status, "error": shown, "traceback": trace})
        raise
    finally:
        if fleet is not None:
            fleet.close()
    return digest


def make_checkpointer(plan: Plan, server: Server, sink: Sink) -> Checkpointer:
    """Return the object that saves and restores the state of a trial."""
    version = importlib.metadata.version("rayfed-sim")
    return Checkpointer(server, sink, plan.trial, plan.configuration_hash, version)


def interrupted(plan: Plan, round: int) -> KeyboardInterrupt:
    """Return the exception to raise when Ctrl-C ended a trial after `round`; its message says how to continue."""
    every = plan.config.checkpoint.every
    saved = round // every * every if every else 0
    continues = "continues" if saved == round else f"continues after round {saved}, the last one saved"
    restarts = "starts again, since nothing was saved; checkpoint.every=1 saves every round"
    return KeyboardInterrupt(
        f"interrupted after round {round}; the same command {f'with resume=true {continues}' if saved else restarts}"
    )
