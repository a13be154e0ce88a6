"""`rayfed run --profile`: traces of some rounds, and where the time of a round went."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rayfed.core.records import Record
from rayfed.engine.fleet import Fleet
from rayfed.engine.tracing import Tracer
from rayfed.records.storage import Storage

TRACED_ROUNDS = 2
"""Rounds in a trace. The first round of a run is left out if there are others, since it also warms up."""
SECONDS_FILE = "recording.json"

_PARTS: Mapping[str, str] = {
    "training": "local training on the busiest host, less the waiting",
    "evaluation": "scores and metrics",
    "waiting": "hosts without work until the busiest has finished, on average",
    "exchange": "broadcast, upload, packing and dealing",
    "server": "aggregation, and whatever is in no other part",
    "recording": "tables, checkpoints and trackers",
}


class Profile:
    """Traces the first rounds of a trial, and measures what recording takes.

    Args:
        fleet: The hosts, which are traced as well.
        save: Called with the name and the content of each file.
        rounds: The rounds that are going to run.
        device: The device of this process.
    """

    def __init__(self, fleet: Fleet, save: Callable[[str, bytes], None], rounds: int, device: torch.device | str):
        self._fleet, self._save, self._left_out = fleet, save, int(rounds > 1)
        self._tracer = Tracer(device)
        self._finished = self._traced = 0
        self._is_tracing = False
        self._recording: list[dict[str, Any]] = []

    def before_round(self) -> None:
        """Begin to trace if it is time."""
        if self._finished == self._left_out and not self._is_tracing and not self._traced:
            self._fleet.start_traces()
            self._tracer.start()
            self._is_tracing = True

    @contextmanager
    def recorded(self, record: Record) -> Iterator[None]:
        """Measure how long it takes to record a round, and end the trace if it is time."""
        if record.stage == "round":
            self._finished += 1
            self._traced += self._is_tracing
        if self._traced == TRACED_ROUNDS:
            self._end_traces()
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._recording.append({"round": record.round, "seconds": seconds})

    def finish(self) -> None:
        """Save what is not saved yet."""
        self._end_traces()
        self._save(SECONDS_FILE, json.dumps(self._recording).encode())

    def _end_traces(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            traces = {"server": self._tracer.stop(), **self._fleet.stop_traces()}
            for name, trace in traces.items():
                self._save(f"{name}.json.gz", trace)


def profile_text(home: Storage, trial: str, rounds: Sequence[Mapping[str, Any]]) -> str:
    """Return where the time of a round went, and where the traces are.

    Args:
        home: The folder of the experiment.
        trial: The trial that was profiled.
        rounds: Its rows in the table `rounds`.
    """
    folder = home.child("profile", trial)
    try:
        recorded = json.loads(folder.read(SECONDS_FILE))
    except FileNotFoundError:
        return "no profile: no round was run"
    recording = {entry["round"]: entry["seconds"] for entry in recorded}
    rows = [row for row in rounds if row["stage"] == "round" and row["round"] in recording]
    if not rows:
        return "no profile: no round was run"
    parts = [round_parts(row, recording[row["round"]]) for row in rows]
    means = {name: sum(part[name] for part in parts) / len(parts) for name in _PARTS}
    total = sum(means.values()) or 1.0
    title = f"a round took {total:.3g} s (mean of {len(rows)} round{'s' * (len(rows) > 1)}):"
    lines = [f"  {name:<11} {means[name]:9.4f} s {means[name] / total:6.1%}  {_PARTS[name]}" for name in _PARTS]
    traces = sorted(name for name in folder.files() if name.endswith(".json.gz"))
    shown = f"traces: {folder.location}: {', '.join(traces)}; open them in chrome://tracing or ui.perfetto.dev"
    return "\n".join([title, *lines, shown])


def round_parts(row: Mapping[str, Any], recording: float) -> dict[str, float]:
    """Return the seconds of a round by part; they add up to its wall-clock time and that of recording it.

    Args:
        row: A row of the table `rounds`.
        recording: The seconds that recording the round took, which are in no column.
    """
    train, balance = row["seconds_train"], row.get("balance")
    waiting = train * (1 - balance) if balance is not None and balance == balance else 0.0  # NaN: no work
    exchange, evaluation = row["seconds_broadcast"] + row["seconds_upload"], row["seconds_evaluate"]
    return {
        "training": train - waiting,
        "evaluation": evaluation,
        "waiting": waiting,
        "exchange": exchange,
        "server": max(0.0, row["seconds_total"] - train - evaluation - exchange),
        "recording": recording,
    }
