"""Compare the bytes that the engine counts in ADCOL's rounds with the formula of Li, He and Song 2023, section 4.2.

In each round a party uploads 4·d bytes per representation and downloads a discriminator of S_D bytes. With
representation sampling a party of n_i examples sends ⌈r·n_i⌉ of them, so N parties transfer 4·d·Σ⌈r·n_i⌉ + N·S_D bytes.
FedAvg sends its model of S_L bytes both ways: 2·N·S_L. The exit code is 1 if a round differs from its formula.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from rayfed.core.trees import nbytes
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.experiments.config import Config
from rayfed.experiments.plan import Plan, make_plan


class Row(NamedTuple):
    """The bytes of one round, measured and by the formula, and the n at which ADCOL sends as much as FedAvg."""

    method: str
    round: int
    measured: int
    formula: int
    crossing: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="communication rounds")
    parser.add_argument("--images", type=int, default=125, help="images per domain, of which there are five")
    parser.add_argument("--sampling", nargs="+", type=float, default=[0.2, 0.4, 0.6, 0.8, 1], help="sampling shares r")
    parser.add_argument("--hidden", nargs="+", type=int, default=[64, 64], help="hidden layers of the discriminator")
    args = parser.parse_args(argv)
    rows = fedavg(args) + [row for share in args.sampling for row in adcol(args, share)]
    print(table(rows))
    print(worked_example())
    return int(any(row.measured != row.formula for row in rows))


def fedavg(args: argparse.Namespace) -> list[Row]:
    plan = planned(args, {"name": "fedavg"})
    formula = 2 * len(plan.population.clients) * model_bytes(plan)
    return [Row("FedAvg, 2·N·S_L", number, counted, formula) for number, counted in enumerate(measured(plan), 1)]


def adcol(args: argparse.Namespace, share: float) -> list[Row]:
    plan = planned(args, {"name": "adcol", "sampling": share, "hidden": args.hidden})
    sizes = [len(client.train) for client in plan.population.clients]
    width = math.prod(plan.blueprint.context(plan.population, "cpu").task.feature_shape)
    down = len(sizes) * mlp_bytes([width, *args.hidden, len(sizes)])
    formula = 4 * width * sum(math.ceil(Fraction(str(share)) * n) for n in sizes) + down
    spare = 2 * len(sizes) * model_bytes(plan) - down
    crossing = f"{spare / (4 * width * share):,.0f}" if spare > 0 else "none"
    name = f"ADCOL, r = {share:g}, n = {sum(sizes)}"
    return [Row(name, number, counted, formula, crossing) for number, counted in enumerate(measured(plan), 1)]


def planned(args: argparse.Namespace, algorithm: dict[str, Any]) -> Plan:
    """Plan a simulation with five parties, one per domain."""
    tree = {
        "algorithm": algorithm,
        "data": {"name": "mini_digits", "per_domain": args.images},
        "model": {"name": "digits_cnn", "width": 0.125},
        "local": {"steps": 1, "batch_size": 8},
        "evaluate": {"every": args.rounds},
        "rounds": args.rounds,
    }
    return make_plan(Config.read(tree))


def measured(plan: Plan) -> list[int]:
    """Return the bytes of every round, download and upload, as the engine counts them."""
    server = Server(plan.blueprint, plan.population, LocalFleet(plan.blueprint, plan.population), plan.evaluation)
    return [sum(record.bytes_down.values()) + sum(record.bytes_up.values()) for record in server.run()]


def model_bytes(plan: Plan) -> int:
    """Return S_L, the buffers of batch norm included."""
    return nbytes(plan.blueprint.model.state_dict())


def mlp_bytes(widths: Sequence[int]) -> int:
    """Return the bytes of a float32 perceptron: weights and biases between consecutive `widths`."""
    return sum(4 * (inputs + 1) * outputs for inputs, outputs in pairwise(widths))


def table(rows: Sequence[Row]) -> str:
    head = f"{'bytes per round, up and down':<32}{'round':>6}{'measured':>12}{'formula':>12}{'difference':>12}"
    lines = [f"{head}  n at which FedAvg is equal"]
    for row in rows:
        cells = f"{row.round:>6}{row.measured:>12,}{row.formula:>12,}{row.measured - row.formula:>12,}"
        lines.append(f"{row.method:<32}{cells}  {row.crossing}".rstrip())
    return "\n".join(lines)


def worked_example() -> str:
    """Evaluate the paper's example: 60,000 images, N = 100, d = 128, discriminator 128-128-N, MLP 784-200-200-10."""
    model, up = mlp_bytes([784, 200, 200, 10]), 4 * 60_000 * 128
    lines = [f"the paper's example: FedAvg {200 * model / 1e6:.3f} MB"]
    for outputs, label in ((5, "as printed: a discriminator with 5 outputs"), (100, "with one output per party")):
        size = mlp_bytes([128, 128, outputs])
        lines.append(f"  ADCOL {(up + 100 * size) / 1e6:.3f} MB, S_D = {size:,} bytes, {label}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
