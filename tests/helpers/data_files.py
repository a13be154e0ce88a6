"""Small files for every dataset that reads files, in folders of a working directory."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from helpers import image_sets
from helpers.mnist_files import write_mnist
from helpers.text_and_sensors import write_har, write_news

ROOT = "sets"
"""The folder of the published datasets, for RAYFED_DATA."""


def write_idx(name: str) -> None:
    """Write MNIST or Fashion-MNIST."""
    images = (np.random.default_rng(count).integers(0, 256, (count, 28, 28)) for count in (120, 60))
    write_mnist(Path(ROOT), *images, name)


def write_npz() -> None:
    """Write own.npz, with three clients and four classes."""
    images, numbers = np.random.default_rng(0).integers(0, 256, (120, 8, 8), dtype=np.uint8), np.arange(120)
    np.savez("own.npz", images=images, labels=numbers % 4, client=numbers % 3, is_test=numbers % 5 == 0)


def write_all() -> dict[str, dict[str, Any]]:
    """Write the files into the working directory and return the options of each dataset, all paths relative."""
    root, random = Path(ROOT), np.random.default_rng(0)
    hub_and_idx = (image_sets.emnist, image_sets.femnist)
    for write in dict.fromkeys([*image_sets.WRITERS.values(), *hub_and_idx]):
        write(root)
    write_idx("MNIST")
    write_idx("FashionMNIST")
    write_news(root, {"train": [(k % 4 + 1, f"w{k}", f"w{k % 9} said") for k in range(60)], "test": [(1, "w", "w")]})
    write_har(root)
    write_npz()
    columns = {"a": random.normal(size=120), "b": random.normal(size=120)}
    table = pd.DataFrame(columns | {"label": np.arange(120) % 4, "who": np.arange(120) % 3})
    Path("hub").mkdir()
    for file in ("own.parquet", "hub/train-00000.parquet"):
        table.to_parquet(file)
    table.to_csv("own.csv", index=False)
    roles = {"features": ["a", "b"], "client": "who"}
    return {name: {} for name in image_sets.WRITERS} | {
        "imagefolder": {"folder": f"{ROOT}/own", "size": 16},
        "mini_digits": {"domains": ["plain", "font"], "per_domain": 60},
        "synthetic": {"clients": 3, "dimensions": 6, "classes": 3, "most_examples": 60},
        "npz": {"file": "own.npz"},
        "parquet": {"file": "own.parquet", **roles},
        "csv": {"file": "own.csv", **roles},
        "huggingface": {"folder": "hub", **roles},
    }
