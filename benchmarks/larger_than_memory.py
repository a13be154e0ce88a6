"""Measure the memory of a simulation whose images do not fit into memory: FedAvg on random 64 x 64 colour images.

The file is written first and then read once for each number of hosts, each time in a new process and with none of the
file in the page cache. `private` is memory that cannot be reclaimed (anonymous and shared memory); `resident` also
counts mapped files, mostly libraries. Both are peaks, of the largest process and of all processes together.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from _memory import sizes, watching
from torch import nn

import rayfed
from rayfed.core.options import option
from rayfed.data import on_disk
from rayfed.data.dataset import Dataset
from rayfed.experiments.config import Config
from rayfed.experiments.sources import merged

SHAPE, CLASSES, CHUNK = (3, 64, 64), 10, 4096


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Random images with cyclic labels."""

    images: int = option(low=1, help="number of images")

    def load(self) -> Dataset:
        labels = np.arange(self.images) % CLASSES
        images = on_disk.memory_mapped("noise", {"version": 1}, (self.images, *SHAPE), "uint8", fill)
        return Dataset.of("noise", images, labels, num_classes=CLASSES, mean=(0.5,) * 3, std=(0.5,) * 3)


def fill(images: np.ndarray) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (CHUNK, *SHAPE), dtype=np.uint8)
    for start in range(0, len(images), CHUNK):
        part = images[start : start + CHUNK]
        np.bitwise_xor(noise[: len(part)], start // CHUNK % 256, out=part, dtype=np.uint8, casting="unsafe")


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return 4 x 4 average pooling and a linear layer: little computation, so that reading dominates."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(int(np.prod(shape)) // 16, classes))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20.0, help="size of the file; it is deleted at the end")
    parser.add_argument("--rounds", type=int, default=1, help="rounds per run, each of which reads all images")
    parser.add_argument("--hosts", type=int, nargs="+", default=[0, 2], help="placement.hosts of each run")
    parser.add_argument("--limit", type=float, default=4.0, help="target for the largest process, in gigabytes")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder for the file")
    args = parser.parse_args(argv)
    free = shutil.disk_usage(args.folder).free / 1e9
    if free < 1.1 * args.gigabytes + 1:
        print(f"skipped: {args.folder} has {free:.0f} GB free, fewer than {1.1 * args.gigabytes + 1:.0f}")
        return 0
    images = max(6000, int(args.gigabytes * 1e9 / np.prod(SHAPE)))
    peaks = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        seconds = apart(make, folder, images)
        print(f"{images:,} images, {images * np.prod(SHAPE) / 1e9:.1f} GB, written in {seconds:.0f} s", flush=True)
        hashes = set()
        for hosts in args.hosts:
            digest, seconds, peaks[hosts] = apart(train, folder, images, hosts, args.rounds)
            hashes.add(digest)
            numbers = ", ".join(f"{name} {size:.2f} GB" for name, size in peaks[hosts].items())
            print(f"hosts={hosts}: {seconds:.0f} s, {numbers}", flush=True)
    print(f"final weights: {'equal' if len(hashes) == 1 else 'DIFFERENT'}")
    met = all(peak["resident, largest process"] <= args.limit for peak in peaks.values())
    print(f"target ≤ {args.limit:g} GB in any process: {'met' if met else 'missed'}")
    return int(not met or len(hashes) > 1)


def apart(work: Callable[..., Any], folder: str, *rest: int) -> Any:
    """Run `work` in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(work, folder, *rest).result()


def make(folder: str, images: int) -> float:
    began = time.perf_counter()
    os.environ["RAYFED_CACHE"] = folder
    Noise(images=images).load()
    return time.perf_counter() - began


def train(folder: str, images: int, hosts: int, rounds: int) -> tuple[str, float, dict[str, float]]:
    """Run one simulation and return the hash of its final weights, its seconds and its peaks in GB."""
    os.environ["RAYFED_CACHE"] = folder
    for path in Path(folder).glob("noise-*/*.npy"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    config = {
        "data": {"name": f"{Path(__file__).stem}:Noise", "images": images},
        "partition": {"name": "iid", "clients": 20, "test": 0.01, "validation": 0.0},
        "model": {"name": f"{Path(__file__).stem}:linear"},
        "local": {"batch_size": 256, "epochs": 1},
        "placement": {"hosts": hosts, "data_on_device": False},
        "rounds": rounds,
        "evaluate.every": rounds,
        "results": f"{folder}/results-{hosts}",
    }
    began = time.perf_counter()
    peaks = Peaks()
    with watching(peaks.take, every=0.1):
        result = rayfed.run(Config.read(merged(config)))
    return result.weights_hash, time.perf_counter() - began, dict(peaks)


class Peaks(dict[str, float]):
    """Peak memory of some processes in GB, by name."""

    def take(self, processes: Sequence[psutil.Process]) -> None:
        private, resident = zip(*map(memory, processes), strict=True)
        names = ("resident, largest process", "resident, all", "private, largest process", "private, all")
        for name, size in zip(names, (max(resident), sum(resident), max(private), sum(private)), strict=True):
            self[name] = max(self.get(name, 0.0), size)


def memory(process: psutil.Process) -> tuple[float, float]:
    """Return (private, resident) GB of a process, zeros once it has ended."""
    found = sizes(process)
    private = found.get("RssAnon", 0) + found.get("RssShmem", 0)
    return private / 1e9, found.get("VmRSS", 0) / 1e9


if __name__ == "__main__":
    raise SystemExit(main())
