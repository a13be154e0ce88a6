"""Time a FedAvg round: rayfed on two Ray hosts against bare loops in two processes, on the published MNIST split.

20 clients (Dirichlet 0.1), the four-layer CNN, batches of 10, one local epoch, full participation.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from _rounds import add_arguments, compare, data_folder, results_folder, shortened, show

from rayfed.data.loading import load
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan

LAYOUTS = {"bare loop, channels last": True, "bare loop, NCHW": False}
TARGETS = {"bare loop, channels last": ("≤", 1.05), "bare loop, NCHW": ("<", 1.0)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--share", type=float, default=1.0, help="share of each client's examples to keep")
    args = parser.parse_args(argv)
    if not (root := data_folder()):
        return
    file = Path(root) / "partitions" / "mnist_dir0.1_20clients.parquet"
    with results_folder() as folder:
        config = Config.read(
            {
                "data": {"name": "mnist", "root": root},
                "partition": {"name": "file", "file": str(file), "validation": 0},
                "model.name": "cnn",
                "local": {"batch_size": 10, "epochs": 1, "lr": 0.005},
                "rounds": args.rounds + 1,
                "evaluate.every": args.rounds + 1,
                "placement.hosts": 2,
                "results": folder,
            }
        )
        population = load("mnist", config.data.options, "file", config.partition.options)
        plan = make_plan(config, population=shortened(population, args.share, config.local.batch_size))
        seconds = compare(plan, LAYOUTS, args.rounds, args.order)
    sizes = [len(client.train) for client in plan.population.clients]
    steps = sum(size // config.local.batch_size for size in sizes)
    show(f"MNIST, {len(sizes)} clients, {steps} steps per round; {args.rounds} rounds each", seconds, TARGETS)


if __name__ == "__main__":
    main()
