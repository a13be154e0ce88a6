"""Measure the share of evaluation in a round when every round is scored, with FedAvg on the published MNIST split.

20 clients (Dirichlet 0.1), the four-layer CNN, batches of 10, one local epoch; the global model is scored on the
validation and test examples of all clients after every round.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from _rounds import data_folder, results_folder

import rayfed

TARGET = 0.10


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one warm-up round")
    parser.add_argument("--hosts", type=int, default=2, help="Ray hosts; 0 runs without Ray")
    args = parser.parse_args(argv)
    if not (root := data_folder()):
        return
    with results_folder() as folder:
        result = rayfed.run(
            {
                "data": {"name": "mnist", "root": root},
                "partition": {"name": "file", "file": str(Path(root) / "partitions/mnist_dir0.1_20clients.parquet")},
                "model.name": "cnn",
                "local": {"batch_size": 10, "epochs": 1, "lr": 0.005},
                "rounds": args.rounds + 1,
                "placement.hosts": args.hosts,
                "results": folder,
            }
        )
    scored = result.metrics[(result.metrics["round"] == 1) & (result.metrics["metric"] == "accuracy")]
    rounds = result.rounds.sort_values("round").iloc[1:]
    shares = (rounds["seconds_evaluate"] / rounds["seconds_total"]).tolist()
    print(f"examples scored per round: {scored['n'].sum():,}")
    print(f"evaluation seconds per round: {', '.join(f'{s:.2f}' for s in rounds['seconds_evaluate'])}")
    print(f"total seconds per round:      {', '.join(f'{s:.2f}' for s in rounds['seconds_total'])}")
    share = statistics.median(shares)
    verdict = "met" if share < TARGET else "missed"
    print(
        f"share of evaluation: {share:.1%} ({min(shares):.1%} to {max(shares):.1%})  target < {TARGET:.0%}: {verdict}"
    )


if __name__ == "__main__":
    main()
