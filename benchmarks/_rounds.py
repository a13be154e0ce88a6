"""Time rounds of rayfed on two Ray hosts against rounds of bare loops in one run, and print the comparison."""

import argparse
import contextlib
import dataclasses
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from _bare import BareLoop, largest_difference

from rayfed.data.population import Client, ClientTable, Examples, Population
from rayfed.distributed import cluster
from rayfed.distributed.loop import hosts
from rayfed.distributed.recorder_actor import RemoteRecorder, start_recorder
from rayfed.experiments.plan import Plan
from rayfed.reports.read import read

TRAINING = ("broadcast", "train", "upload", "aggregate")  # a round without its evaluation
RAYFED = "rayfed, 2 hosts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one warm-up round")
    parser.add_argument(
        "--order",
        choices=("interleaved", "blocks"),
        default="interleaved",
        help="interleaved: alternate between the variants, so that a slow minute of the machine affects all of them; "
        "blocks: run all rounds of one variant, then all of the next",
    )


def compare(plan: Plan, layouts: Mapping[str, bool], rounds: int, order: str) -> dict[str, list[float]]:
    """Return the seconds of every timed round, for rayfed and for one bare loop per entry of `layouts`.

    Args:
        plan: The simulation, with one round more than `rounds` for warming up.
        layouts: The bare loops, as name -> channels_last.
        rounds: The number of timed rounds.
        order: "interleaved" or "blocks", see `add_arguments`.

    Raises:
        AssertionError: if rayfed and a bare loop end with different weights.
    """
    if plan.config.rounds != rounds + 1:
        raise ValueError(f"the plan has {plan.config.rounds} rounds; expected {rounds} and one warm-up round")
    with contextlib.ExitStack() as stack:
        loops = {
            name: stack.enter_context(BareLoop(plan.blueprint, plan.population, channels_last=layout))
            for name, layout in layouts.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in (RAYFED, *loops)}

        def run_loops() -> None:
            for name, loop in loops.items():
                seconds[name].append(loop.round())

        interleaved = order == "interleaved"
        seconds[RAYFED], weights = _on_ray(plan, run_loops if interleaved else lambda: None)
        for _ in range(0 if interleaved else rounds + 1):
            run_loops()
        # Sums of many float32 products differ by rounding, which training magnifies. Different batches or a wrong
        # client weight would show up as a difference of the size of what training changes.
        initial = dict(plan.blueprint.model.state_dict())
        for name, loop in loops.items():
            difference, moved = largest_difference(weights, loop.state), largest_difference(initial, loop.state)
            words = f"weights differ from rayfed's by {difference:.1g}, where training moved one by {moved:.1g}"
            assert difference < 0.05 * moved, f"{name}: {words}, so the work differs"
            print(f"{name}: after {rounds + 1} rounds, {words}")
    return {name: values[1:] for name, values in seconds.items()}


def _on_ray(plan: Plan, after_round: Callable[[], None]) -> tuple[list[float], dict[str, Any]]:
    """Run `plan` as a Tune trial would, and return the training seconds of its `rounds` table and its final weights."""
    cluster.connect(plan.config.placement, dashboard=False)  # which the recorder needs, too
    recorder = RemoteRecorder(start_recorder(plan.config.results, plan.config.experiment, in_sweep=False))
    with hosts(plan, recorder) as begin:
        simulation = begin(())
        with simulation.global_settings():
            for record in simulation:
                if record.stage == "round":
                    after_round()
        state = simulation.server_state
    rows = read(plan.config.results, plan.config.experiment).rounds
    rows = rows[rows.stage == "round"].sort_values("round")
    return rows[[f"seconds_{part}" for part in TRAINING]].sum(axis=1).tolist(), state["weights"]


def show(title: str, seconds: Mapping[str, Sequence[float]], targets: Mapping[str, tuple[str, float]]) -> None:
    """Print the seconds, and the ratio of the first variant to each of the others with its target.

    Args:
        title: The heading of the table.
        seconds: Seconds of every timed round by variant; the first variant is compared with the others.
        targets: The bound of each ratio, such as ("≤", 1.05) or ("<", 1).
    """
    first, *others = seconds
    width = max(len(name) for name in [*seconds, *(f"{first} / {name}" for name in others)])
    print(f"\n{title}\n{'training seconds per round':<{width}}  {'min':>8}  {'median':>8}  {'max':>8}")
    for name, values in seconds.items():
        cells = (min(values), statistics.median(values), max(values))
        print(f"{name:<{width}}  " + "  ".join(f"{cell:8.3f}" for cell in cells))
    print(f"{'ratio of medians (and range over paired rounds)':<{width}}")
    for name in others:
        ratio = statistics.median(seconds[first]) / statistics.median(seconds[name])
        ratios = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
        sign, bound = targets[name]
        met = "met" if (ratio <= bound if sign == "≤" else ratio < bound) else "missed"
        spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{f'{first} / {name}':<{width}}  {ratio:8.3f}  {spread}  target {sign} {bound:g}: {met}")


def shortened(population: Population, share: float, least: int) -> Population:
    """Return the clients with the first `share` of each one's examples, at least `least` per split."""

    def part(examples: Examples) -> Examples:
        kept = max(min(least, len(examples)), int(len(examples) * share))
        return Examples(examples.x[:kept], examples.y[:kept])

    def cut(client: Client) -> Client:
        return dataclasses.replace(client, train=part(client.train), val=part(client.val), test=part(client.test))

    return dataclasses.replace(population, clients=ClientTable.of(list(map(cut, population.clients))))


def data_folder() -> str | None:
    """Return the folder with MNIST/raw, the .npz file and partitions/, or None after saying that it is not set."""
    root = os.environ.get("RAYFED_DATA")
    if not root:
        print("skipped: set the environment variable RAYFED_DATA to the folder with the datasets")
    return root


@contextlib.contextmanager
def results_folder() -> Iterator[str]:
    """Provide a temporary folder for result tables."""
    with tempfile.TemporaryDirectory(prefix="rayfed-bench-") as folder:
        yield folder
