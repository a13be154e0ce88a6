"""Print the test accuracy of FedAvg and DBE by round, on the Fashion-MNIST split that DBE's authors publish.

19 clients (Dirichlet 0.1; client 12's training part is missing from the file), the four-layer CNN, batches of 10, one
local epoch, SGD with learning rate 0.005, full participation; DBE with kappa=50 and mu=1. Each algorithm is scored at
the point that its paper uses. The weighted mean weights clients by their test examples; the other is unweighted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from _rounds import data_folder, results_folder

import rayfed

ALGORITHMS: dict[str, dict] = {"fedavg": {"name": "fedavg"}, "dbe": {"name": "dbe", "kappa": 50.0, "mu": 1.0}}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="communication rounds")
    parser.add_argument("--share", type=float, default=1.0, help="share of each client's examples to keep")
    parser.add_argument("--hosts", type=int, default=2, help="Ray hosts; 0 runs without Ray")
    args = parser.parse_args(argv)
    if not (root := data_folder()):
        return
    with results_folder() as folder:
        file = Path(root) / "fashion_mnist_dir0.1_20clients.npz"
        if args.share < 1:
            file = shortened(file, args.share, Path(folder) / "shortened.npz")
        curves = {}
        for label, algorithm in ALGORITHMS.items():
            result = rayfed.run(
                {
                    "algorithm": algorithm,
                    "data": {"name": "npz", "file": str(file), "drop_clients": [12]},
                    "partition": {"name": "natural", "validation": 0},
                    "model.name": "cnn",
                    "local": {"batch_size": 10, "epochs": 1, "lr": 0.005},
                    "evaluate.splits": ["test"],
                    "placement.hosts": args.hosts,
                    "rounds": args.rounds,
                    "results": folder,
                }
            )
            curves[label] = curve(result.metrics, result.trials.default_eval_point[0])
            print(f"{label}: {result.trials.seconds[0]:.0f} s", file=sys.stderr, flush=True)
    print(pd.concat(curves, axis=1).to_string(float_format="{:.4f}".format))


def curve(metrics: pd.DataFrame, point: str) -> pd.DataFrame:
    """Return the test accuracy at `point` by round: the mean weighted by test examples, and the unweighted mean."""
    rows = metrics[(metrics.split == "test") & (metrics.metric == "accuracy") & (metrics.point == point)]
    by_round = rows.assign(correct=rows.value * rows.n).groupby("round")
    weighted = by_round.correct.sum() / by_round.n.sum()
    return pd.DataFrame({"weighted": weighted, "unweighted": by_round.value.mean()})


def shortened(file: Path, share: float, target: Path) -> Path:
    """Write a copy of the .npz with the first `share` of each client's examples, at least ten per split."""
    with np.load(file) as stored:
        arrays = {name: stored[name] for name in stored.files}
    parts = arrays["client"].astype(int) * 2 + arrays["is_test"]
    rows = [np.flatnonzero(parts == part) for part in np.unique(parts)]
    kept = np.sort(np.concatenate([part[: max(10, int(len(part) * share))] for part in rows]))
    np.savez(target, **{name: array[kept] for name, array in arrays.items()})
    return target


if __name__ == "__main__":
    main()
