"""Checks that all engines did the same work, and prints what they took."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from peers.engines import ENGINES
from peers.job import Job, Outcome
from peers.jobs import MANY_CLIENTS, MNIST_CNN

Runs = Mapping[str, Sequence[Outcome]]
"""The outcomes of every engine, by its name, in the order of the repetitions."""

SAME_WEIGHTS = 1e-3
"""The largest difference between weights of two engines.

Engines add up float32 numbers in different orders, and training magnifies the rounding. Other batches, another learning
rate or another weight of a client show as a difference of the size of a step, which is larger.
"""
SAME_ACCURACY = 0.005


class Goal(NamedTuple):
    """A bound on the median ratio of the seconds of `engine` to those of `other`: at most, or at least, `bound`."""

    engine: str
    other: str
    sign: str
    bound: float

    def met(self, ratio: float) -> bool:
        return ratio <= self.bound if self.sign == "≤" else ratio >= self.bound


GOALS = {
    MNIST_CNN: [Goal("rayfed", "bare", "≤", 1.02)],
    MANY_CLIENTS: [Goal("rayfed", "bare", "≤", 1.05), Goal("pfl", "rayfed", "≥", 1.3)],
}


class Spread(NamedTuple):
    """The median of some values, the smallest and the largest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.least:{spec}} to {self.most:{spec}})"


def seconds(runs: Runs, engine: str) -> Spread:
    """Return the spread of the seconds of all rounds of an engine."""
    return Spread.of([value for run in runs[engine] for value in run.seconds])


def ratio(runs: Runs, engine: str, other: str) -> Spread:
    """Return the spread over repetitions of the ratio of the median round of `engine` to that of `other`."""
    pairs = zip(runs[engine], runs[other], strict=True)
    return Spread.of([statistics.median(a.seconds) / statistics.median(b.seconds) for a, b in pairs])


def difference(outcome: Outcome, reference: Outcome) -> float:
    """Return the largest absolute difference between the final weights of two runs."""
    pairs = zip(outcome.parameters, reference.parameters, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def differences(job: Job, runs: Runs, accuracies: Mapping[str, float]) -> list[str]:
    """Return one line for each way in which an engine did not do the work of `job`, or not that of the first engine.

    Args:
        job: The job of all runs.
        runs: The outcomes of the engines.
        accuracies: The test accuracy of each engine's first run.
    """
    first, expected = next(iter(runs)), job.steps * job.rounds
    lines = []
    for name, outcomes in runs.items():
        if steps := {run.steps for run in outcomes} - {expected}:
            lines.append(f"{name}: {', '.join(map(str, sorted(steps)))} steps instead of {expected}")
        if job.cohort:  # every engine draws other clients
            continue
        most = max(difference(run, runs[first][0]) for run in outcomes)
        if not most <= SAME_WEIGHTS:  # also where it is NaN
            lines.append(f"{name}: weights differ from those of {first} by {most:.2g}")
        if (apart := abs(accuracies[name] - accuracies[first])) > SAME_ACCURACY:
            lines.append(f"{name}: test accuracy differs from that of {first} by {apart:.4f}")
    return lines


def _start_up_and_memory(outcomes: Sequence[Outcome], unit: float) -> list[str]:
    """Return the medians of the seconds until the first round is over, and of both memories in `unit` bytes."""
    memories = (statistics.median(sizes) / unit for sizes in zip(*(run.memory for run in outcomes), strict=True))
    return [f"{statistics.median(run.start_up for run in outcomes):.1f} s", *(f"{memory:.3g}" for memory in memories)]


def show(job: Job, runs: Runs) -> bool:
    """Print the comparison of the engines in `runs`, and return whether all did the same work."""
    first, repeats = next(iter(runs)), len(next(iter(runs.values())))
    accuracies = {name: job.accuracy(outcomes[0].parameters) for name, outcomes in runs.items()}
    cycle = job.evaluate_every or 1
    rounds = f"{repeats} × {job.rounds - cycle} timed rounds, each time after {cycle} that warm up"
    print(f"\n{job.name}: {len(job.sizes):,} clients, {job.steps:,} steps per round; {rounds}")
    head = ["engine", "seconds per round (range)", f"ratio to {ENGINES[first].title} (range)", "steps", "accuracy", "Δ"]
    model = sum(value.nbytes for value in job.initial)
    unit, size = ("GB", 1e9) if job.cohort else ("models", model)
    if job.watched:
        head += ["first round over after", f"memory, {unit}", "largest process"]
    rows = [head]
    for name, outcomes in runs.items():
        rows.append(
            [
                f"{ENGINES[name].title} ({outcomes[0].version})",
                f"{seconds(runs, name):.3f}",
                "1" if name == first else f"{ratio(runs, name, first):.3f}",
                f"{outcomes[0].steps:,}",
                f"{accuracies[name]:.4f}",
                f"{max(difference(run, runs[first][0]) for run in outcomes):.0e}",
                *(_start_up_and_memory(outcomes, size) if job.watched else []),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"Δ: largest difference of a final weight from {ENGINES[first].title}'s")
    if job.watched:
        print(f"memory: of all processes at its highest, shared pages counted once; a model is {model / 1e6:.3g} MB")
    problems = differences(job, runs, accuracies)
    same = "as many steps, each on clients that it drew" if job.cohort else "the same work"
    print(f"all engines did {same}" if not problems else "THE WORK DIFFERS: " + "; ".join(problems))
    for goal in GOALS.get(job.name, []):
        if goal.engine in runs and goal.other in runs:
            value = ratio(runs, goal.engine, goal.other)
            outcome = "met" if goal.met(value.median) else "missed"
            titles = f"{ENGINES[goal.engine].title} / {ENGINES[goal.other].title}"
            print(f"{titles}: {value:.3f}, goal {goal.sign} {goal.bound:g}: {outcome}")
    return not problems
