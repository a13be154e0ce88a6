"""Time a FedAvg round of many small clients: rayfed on two Ray hosts against a bare loop in two processes.

500 clients of 100 images, an MLP 784-200-200-10, batches of 10, one local epoch, full participation.
"""

import argparse
import os
from collections.abc import Sequence

import numpy as np
from _rounds import add_arguments, compare, results_folder, show

from rayfed.data.population import Client, Examples
from rayfed.data.sets.mnist import Mnist
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan

LAYOUTS = {"bare loop": False}
TARGETS = {"bare loop": ("≤", 1.3)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--clients", type=int, default=500, help="number of clients")
    parser.add_argument("--images", type=int, default=100, help="training images per client")
    parser.add_argument("--vmap-clients", type=int, default=1, help="clients that a host trains at once")
    args = parser.parse_args(argv)
    clients = make_clients(args.clients, args.images)
    with results_folder() as folder:
        config = Config.read(
            {
                "model.name": "mlp",
                "local": {"batch_size": 10, "epochs": 1, "lr": 0.005},
                "rounds": args.rounds + 1,
                "evaluate.every": args.rounds + 1,
                "placement": {"hosts": 2, "vmap_clients": args.vmap_clients},
                "results": folder,
            }
        )
        plan = make_plan(config, Given(clients=clients, num_classes=10))
        seconds = compare(plan, LAYOUTS, args.rounds, args.order)
    size = f"{args.clients} clients of {args.images} images, {args.images // config.local.batch_size} steps each"
    show(f"{size}; {args.rounds} rounds each", seconds, TARGETS)


def make_clients(count: int, images: int) -> list[Client]:
    """Split MNIST at random, or noise where RAYFED_DATA is not set (the work is the same); without test images."""
    x, y = draw_images(count * images)
    empty = Examples(x[:0], y[:0])
    parts = [slice(i * images, (i + 1) * images) for i in range(count)]
    return [Client(i, "all", Examples(x[part], y[part]), empty, empty) for i, part in enumerate(parts)]


def draw_images(total: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `total` images of MNIST at random, none twice up to 70,000, or noise where RAYFED_DATA is not set.

    Images are uint8 [total, 1, 28, 28], labels int64 [total]. The first images of MNIST are the same for any `total`.
    """
    rng = np.random.default_rng(0)
    if root := os.environ.get("RAYFED_DATA"):
        pool, labels, _, _ = Mnist(root=root).pool()
        rows = rng.permutation(len(labels))[np.arange(total) % len(labels)]
        return pool[rows], labels[rows]
    print("RAYFED_DATA is not set: using random images in place of MNIST")
    return rng.integers(0, 256, (total, 1, 28, 28), dtype=np.uint8), rng.integers(0, 10, total)


if __name__ == "__main__":
    main()
