"""Seconds of a FedAvg round of many small clients: rayfed on two Ray hosts against a bare loop of two processes.

500 clients of 100 images, an MLP 784-200-200-10, batches of 10, one local epoch, everyone in every round.
"""

import argparse
import os
from collections.abc import Sequence

import numpy as np
from _rounds import add_arguments, compare, results_folder, show

from rayfed.data.population import Client, Examples
from rayfed.data.sets.mnist import Mnist
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan

LAYOUTS = {"bare loop": False}
TARGETS = {"bare loop": ("≤", 1.3)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--clients", type=int, default=500, help="how many there are")
    parser.add_argument("--images", type=int, default=100, help="training images of each")
    args = parser.parse_args(argv)
    clients = make_clients(args.clients, args.images)
    with results_folder() as folder:
        config = Config.read(
            {
                "model.name": "mlp",
                "local": {"batch_size": 10, "epochs": 1, "lr": 0.005},
                "rounds": args.rounds + 1,
                "evaluate.every": args.rounds + 1,
                "placement.hosts": 2,
                "results": folder,
            }
        )
        plan = make_plan(config, clients=clients, num_classes=10)
        seconds = compare(plan, LAYOUTS, args.rounds, args.order)
    size = f"{args.clients} clients of {args.images} images, {args.images // config.local.batch_size} steps each"
    show(f"{size}; {args.rounds} rounds each", seconds, TARGETS)


def make_clients(count: int, images: int) -> list[Client]:
    """MNIST dealt out at random where RAYFED_DATA has it, else noise: the work is the same. Nobody has test images."""
    rng = np.random.default_rng(0)
    wanted = count * images
    if root := os.environ.get("RAYFED_DATA"):
        pool, labels, _, _ = Mnist(root=root).pool()
        rows = rng.permutation(len(labels))[np.arange(wanted) % len(labels)]
        x, y = pool[rows], labels[rows]
    else:
        print("RAYFED_DATA is not set: random images in place of MNIST")
        x, y = rng.integers(0, 256, (wanted, 1, 28, 28), dtype=np.uint8), rng.integers(0, 10, wanted)
    nothing = Examples(x[:0], y[:0])
    parts = [slice(i * images, (i + 1) * images) for i in range(count)]
    return [Client(i, "all", Examples(x[part], y[part]), nothing, nothing) for i, part in enumerate(parts)]


if __name__ == "__main__":
    main()
