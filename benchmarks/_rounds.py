"""Rounds of rayfed on two Ray hosts and rounds of bare loops, taken in turn in one run, and their table."""

import argparse
import contextlib
import dataclasses
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from _bare import BareLoop, largest_difference
from ray.util.placement_group import placement_group, remove_placement_group

from rayfed.data.population import Client, Examples, Population
from rayfed.distributed import cluster
from rayfed.distributed.placement import bundles, run_reserved
from rayfed.engine.server import Record
from rayfed.experiments.plan import Plan
from rayfed.results.read import read

TRAINING = ("broadcast", "train", "upload", "aggregate")  # a round without its evaluation
RAYFED = "rayfed, 2 hosts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count; one more goes first to warm up")
    parser.add_argument(
        "--order",
        choices=("interleaved", "blocks"),
        default="interleaved",
        help="interleaved: a round of each in turn, so that a slow minute of the machine hits all of them; "
        "blocks: all rounds of one, then all of the next",
    )


def compare(plan: Plan, layouts: Mapping[str, bool], rounds: int, order: str) -> dict[str, list[float]]:
    """Seconds of every round of rayfed and of one bare loop per entry of `layouts` (name -> channels_last).

    `plan` has one round more than `rounds`. Raises AssertionError if rayfed and a bare loop end with other weights.
    """
    if plan.config.rounds != rounds + 1:
        raise ValueError(f"the plan has {plan.config.rounds} rounds; expected {rounds} and one to warm up")
    with contextlib.ExitStack() as stack:
        loops = {
            name: stack.enter_context(BareLoop(plan.blueprint, plan.population, channels_last=layout))
            for name, layout in layouts.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in (RAYFED, *loops)}

        def turn() -> None:
            for name, loop in loops.items():
                seconds[name].append(loop.round())

        interleaved = order == "interleaved"
        seconds[RAYFED], weights = _on_ray(plan, turn if interleaved else lambda: None)
        for _ in range(0 if interleaved else rounds + 1):
            turn()
        # Sums of many float32 products differ in their last bits, and training magnifies that; other batches, or a
        # wrong weight of a client, would differ by the size of a step.
        for name, loop in loops.items():
            difference = largest_difference(weights, loop.state)
            assert difference < 1e-3, f"{name}: weights differ from rayfed's by {difference:.2g}: not the same work"
            print(f"largest difference of a weight after {rounds + 1} rounds, rayfed against {name}: {difference:.1g}")
    return {name: values[1:] for name, values in seconds.items()}


def _on_ray(plan: Plan, after_round: Callable[[], None]) -> tuple[list[float], dict[str, Any]]:
    """Runs `plan` as a Tune trial would; returns the training seconds in its `rounds` table, and its final weights."""

    def report(record: Record) -> None:
        if record.stage == "round":
            after_round()

    cluster.connect(plan.config.placement, dashboard=False)
    group = placement_group([bundle for bundle in bundles(plan.config.placement) if bundle], strategy="PACK")
    try:
        ray.get(group.ready())
        recorder = cluster.remote_recorder(plan.config.results, plan.config.experiment)
        _, state = run_reserved(plan, recorder, group, None, report)
    finally:
        remove_placement_group(group)
    rows = read(plan.config.results, plan.config.experiment).rounds
    rows = rows[rows.stage == "round"].sort_values("round")
    return rows[[f"seconds_{part}" for part in TRAINING]].sum(axis=1).tolist(), state["server"]["weights"]


def show(title: str, seconds: Mapping[str, Sequence[float]], targets: Mapping[str, tuple[str, float]]) -> None:
    """Prints the table: the first row of `seconds` is held against each of the others.

    `targets` says for a row how the ratio should be: ("≤", 1.05) or ("<", 1).
    """
    first, *others = seconds
    width = max(len(name) for name in [*seconds, *(f"{first} / {name}" for name in others)])
    print(f"\n{title}\n{'seconds of training in a round':<{width}}  {'min':>8}  {'median':>8}  {'max':>8}")
    for name, values in seconds.items():
        cells = (min(values), statistics.median(values), max(values))
        print(f"{name:<{width}}  " + "  ".join(f"{cell:8.3f}" for cell in cells))
    print(f"{'ratio of medians (and of rounds taken in turn)':<{width}}")
    for name in others:
        ratio = statistics.median(seconds[first]) / statistics.median(seconds[name])
        turns = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
        sign, bound = targets[name]
        met = "met" if (ratio <= bound if sign == "≤" else ratio < bound) else "missed"
        spread = f"({min(turns):.3f} to {max(turns):.3f})"
        print(f"{f'{first} / {name}':<{width}}  {ratio:8.3f}  {spread}  target {sign} {bound:g}: {met}")


def shortened(population: Population, share: float, least: int) -> Population:
    """The same clients with the first `share` of each one's training, validation and test examples."""

    def part(examples: Examples) -> Examples:
        kept = max(min(least, len(examples)), int(len(examples) * share))
        return Examples(examples.x[:kept], examples.y[:kept])

    def client(whole: Client) -> Client:
        return dataclasses.replace(whole, train=part(whole.train), val=part(whole.val), test=part(whole.test))

    return dataclasses.replace(population, clients=tuple(map(client, population.clients)))


def data_folder() -> str | None:
    """The folder with MNIST/raw, the .npz file and partitions/; where there is none, says so."""
    root = os.environ.get("RAYFED_DATA")
    if not root:
        print("skipped: set the environment variable RAYFED_DATA to the folder of data sets")
    return root


@contextlib.contextmanager
def results_folder():
    """A folder for tables that nobody keeps."""
    with tempfile.TemporaryDirectory(prefix="rayfed-bench-") as folder:
        yield folder
