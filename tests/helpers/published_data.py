"""Paths of the real data sets and published splits below RAYFED_DATA, and the mark of tests that need them."""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("RAYFED_DATA", "unset"))
SPLIT = ROOT / "partitions" / "mnist_dir0.1_20clients.parquet"
FASHION = ROOT / "fashion_mnist_dir0.1_20clients.npz"


def needs(path):
    found = (ROOT / path).exists()
    return pytest.mark.skipif(not found, reason=f"needs {path} in the folder that RAYFED_DATA names")
