"""Runs one planned trial to its end, wherever it is placed, and tells a recorder all along."""

import io
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rayfed.core.errors import Diverged, UsageError
from rayfed.core.records import Record
from rayfed.core.rng import torch_state_kept
from rayfed.engine import checkpoint
from rayfed.engine.fleet import Fleet
from rayfed.engine.serialization import state_hash
from rayfed.engine.server import Server
from rayfed.experiments.plan import Plan


class Sink(Protocol):
    """What a trial needs of a recorder, be it called directly or in another process."""

    def begin(self, trial: str, values: Any, rounds: int, keep_through_round: int | None) -> None: ...
    def record(self, trial: str, record: Record) -> None: ...
    def checkpoint(self, trial: str, content: bytes) -> None: ...
    def end(self, trial: str, values: Any) -> None: ...


def resumed(plan: Plan, saved: bytes | None) -> str:
    """What `resume` does, in a few words, with the checkpoint `saved`."""
    if saved is None:
        return "nothing saved: starts at round 1"
    try:
        done = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)["round"]
    except Exception:  # whatever is wrong with it, `checkpoint.load` tells it in a line
        return "the checkpoint cannot be read"
    last = plan.config.rounds + bool(plan.blueprint.algorithm.final_exchanges)
    return "already finished: nothing to do" if done >= last else f"goes on after round {done}"


def run_trial(
    plan: Plan,
    sink: Sink,
    make_fleet: Callable[[], Fleet],
    device: str | torch.device,
    *,
    saved: bytes | None = None,
    report: Callable[[Record], None] = lambda record: None,
) -> tuple[str, dict[str, Any]]:
    """Runs `plan` from the start, or from the checkpoint `saved`; returns (hash of all final state, final state).

    The final state has `server` and `clients`, both on the CPU.

    Raises:
        Diverged: after it was recorded, as is anything else that goes wrong.
    """
    every, fleet = plan.config.checkpoint.every, None
    late: list[Record] = []  # reported when the trial is recorded as done: a scheduler may end it at any report
    begun = done = False
    try:
        with torch_state_kept():
            fleet = make_fleet()
            server = Server(plan.blueprint, plan.population, fleet, plan.evaluation, device)
            if saved is not None:
                checkpoint.load(server, io.BytesIO(saved), f"checkpoint of {plan.trial}")
            sink.begin(plan.trial, plan.values(), plan.config.rounds, server.round if saved is not None else None)
            begun = True
            for record in server.run():
                sink.record(plan.trial, record)
                if every and server.round and (server.round % every == 0 or server.round >= plan.config.rounds):
                    sink.checkpoint(plan.trial, checkpoint.dump(server))
                if server.round < plan.config.rounds:
                    report(record)
                else:
                    late.append(record)
            state = checkpoint.state(server)
            digest = state_hash(state)
            sink.end(plan.trial, {"status": "done", "weights_hash": digest})
            done = True
            for record in late:
                report(record)
    except SystemExit:  # so Ray Tune ends a trial that its scheduler has stopped
        if not done:
            sink.end(plan.trial, {"status": "stopped"})
        raise
    except BaseException as error:
        if isinstance(error, (UsageError, KeyboardInterrupt)) and not begun:
            raise  # nothing was started, so an earlier attempt's row stays as it is
        if isinstance(error, KeyboardInterrupt):
            if not done:
                sink.end(plan.trial, {"status": "interrupted"})
            raise interrupted(plan, server.round) from None
        status = "diverged" if isinstance(error, Diverged) else "failed"
        text = str(error).strip().splitlines() or [type(error).__name__]
        shown = text[0] if isinstance(error, Diverged) else f"{type(error).__name__}: {text[-1]}"
        trace = "".join(traceback.format_exception(error))
        sink.end(plan.trial, {**plan.values(), "status": status, "error": shown, "traceback": trace})
        raise
    finally:
        if fleet is not None:
            fleet.close()
    return digest, state


def interrupted(plan: Plan, round: int) -> KeyboardInterrupt:
    """What to raise when Ctrl-C ended a trial after `round`: it says how to go on."""
    every = plan.config.checkpoint.every
    saved = round // every * every if every else 0
    way = "goes on" if saved == round else f"goes on after round {saved}, the last one saved"
    anew = "starts anew, since nothing was saved; checkpoint.every=1 saves every round"
    return KeyboardInterrupt(
        f"interrupted after round {round}; the same command {f'with resume=true {way}' if saved else anew}"
    )
