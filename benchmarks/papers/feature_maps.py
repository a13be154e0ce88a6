"""Store FedDebias's figures 12 to 14 on MNIST: features of a global and of a local model in one projection.

    python benchmarks/papers/feature_maps.py     # writes measured/feddebias_features.csv, which figures.py draws

A global model is trained on all ten digits and copied to a client that has the digits 0 to 4 (X1), where it trains for
ten epochs. Both models see test images of 0 to 4 and of 5 to 9 (X2). The server keeps the global model, by a learning
rate of nearly 0, so that it is in the same projection.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from _stored import FOLDER

import rayfed

FILE = "feddebias_features.csv"
COMMON: dict[str, Any] = {
    "data": {"name": "mnist_views", "views": ["plain"], "size": 14},
    "model": {"name": "mlp", "hidden": [128, 64]},
    "local": {"batch_size": 32, "lr": 0.1},
    "rounds": 1,
    "evaluate.splits": ["test"],
}
GLOBAL: dict[str, Any] = {"partition": {"name": "iid", "clients": 1, "per_client": 4000}, "local.epochs": 3}
LOCAL: dict[str, Any] = {
    "partition": {
        "name": "pathological",
        "clients": 2,
        "classes_per_client": 5,
        "per_client": 2000,
        "common_test": True,
    },
    "algorithm": {"name": "fedavgm", "momentum": 0, "server_lr": 1e-9},
    "local.epochs": 10,
    "evaluate.points": ["global", "trained"],
    "metrics.tsne": {"joint": True, "examples": 2000},
}


def main() -> None:
    """Run the command."""
    with TemporaryDirectory() as folder:
        weights = rayfed.run({**COMMON, **GLOBAL, "results": folder, "experiment": "global"}).save(
            Path(folder) / "model"
        )
        local = {**COMMON, **LOCAL, "model": {**COMMON["model"], "weights": str(weights)}}
        rayfed.run({**local, "results": folder, "experiment": "local"})
        (file,) = (Path(folder) / "local" / "maps").glob("*-joint-*.parquet")
        points = pd.read_parquet(file)
    model = points["point"].map({"global": "Fg", "trained": "F1"})
    data = points["label"].lt(5).map({True: "X1", False: "X2"})
    points = points.assign(panel=model + "(" + data + ")")[points["client"] == 0].sort_values("panel", ascending=False)
    points[["panel", "label", "x", "y"]].round(2).to_csv(FOLDER / FILE, index=False, lineterminator="\n")
    print(nearest(points).to_string())


def nearest(points: pd.DataFrame) -> pd.DataFrame:
    """Return the share of each panel's points (rows) whose nearest neighbour in the map is in each panel (columns)."""
    places = points[["x", "y"]].to_numpy()
    distances = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1))
    np.fill_diagonal(distances, np.inf)
    panels = points["panel"].to_numpy()
    return pd.crosstab(panels, panels[distances.argmin(1)], normalize="index").round(3)


if __name__ == "__main__":
    main()
