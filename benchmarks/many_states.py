"""Memory with many clients that keep a state: the processes of one run, watched over its rounds.

SCAFFOLD with 10,000 clients of 16 images, an MLP of 199,210 parameters and a cohort of 100; each client that has
trained keeps 0.8 MB. Without --final-state, what the clients keep at the end is not written to disk.

Two figures are given for each process: what it holds for itself (anonymous memory), and all that is resident, which
includes pages of the object store that it has touched and that all processes of the machine share.
"""

import argparse
import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import psutil
from _memory import role, sizes, watching
from _rounds import results_folder

import rayfed
from rayfed.data.population import Client, Examples


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--algorithm", default="scaffold")
    parser.add_argument("--hidden", type=int, nargs="+", default=[200, 200], help="widths of the model's hidden layers")
    parser.add_argument("--final-state", action="store_true", help="keep the final state for Result.clients")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (4000, 1, 28, 28), dtype=np.uint8), rng.integers(0, 10, 4000)
    empty = Examples(x[:0], y[:0])
    starts = rng.integers(0, len(x) - 16, args.clients)
    parts = [slice(start, start + 16) for start in starts]
    clients = [Client(i, "all", Examples(x[part], y[part]), empty, empty) for i, part in enumerate(parts)]
    samples = Samples()
    with results_folder() as folder, watching(samples.take):
        result = rayfed.run(
            {
                "algorithm.name": args.algorithm,
                "model": {"name": "mlp", "hidden": args.hidden},
                "local": {"batch_size": 8, "epochs": 1, "lr": 0.005},
                "rounds": args.rounds,
                "cohort": args.cohort,
                "evaluate.every": args.rounds,
                "placement.hosts": args.hosts,
                "results": folder,
            },
            clients=clients,
            num_classes=10,
            keep_state=args.final_state,
        )
        rounds = result.rounds["seconds_total"]
        print(f"{args.algorithm}, {args.cohort} of {args.clients} clients, {len(rounds)} rounds, {args.hosts} hosts")
        print(f"median round {rounds.median():.3f} s, hash {result.weights_hash}")
        if args.final_state:
            some = list(result.clients)[:: max(1, len(result.clients) // 10)]
            print(f"final state of {len(result.clients)} clients; read {len([result.clients[i] for i in some])}")
    samples.show()


class Samples:
    """Samples of the memory of this process and of the actors below it, by name."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def take(self, processes: Sequence[psutil.Process]) -> None:
        self._add("driver", processes[0])
        for process in processes[1:]:
            if (name := role(process)) is not None:
                self._add(f"{name} {process.pid}" if name == "host" else name, process)

    def _add(self, name: str, process: psutil.Process) -> None:
        if found := sizes(process):
            self._samples[name].append((found["RssAnon"], found["VmRSS"]))

    def show(self) -> None:
        """Print the memory over ten equal parts of each process's time, as the median of each part."""
        print(f"\n{'MB of its own, over time':<16}{'':>52}{'most':>8}{'resident, most':>16}")
        for name, samples in sorted(self._samples.items()):
            own, resident = ([size / 1e6 for size in column] for column in zip(*samples, strict=True))
            cuts = [len(own) * k // 10 for k in range(11)]
            parts = [statistics.median(own[a:b] or own) for a, b in itertools.pairwise(cuts)]
            cells = "".join(f"{part:6.0f}" for part in parts)
            print(f"{name:<16}{cells}{max(own):8.0f}{max(resident):16.0f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
