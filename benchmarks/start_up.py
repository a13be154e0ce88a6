"""Time what comes before the first round: the loading of a dataset, and a whole run of one round on two hosts.

MNIST by Dirichlet(0.1) over 20 clients is loaded at the first start on a machine and at later starts. Each start is a
new process; the cache is empty before the first. The run is `rayfed run` with embedded data.

Beside each run, a script without rayfed starts Ray and two actors that import torch: what any run on Ray must wait for.
The ratio of the two is the figure to watch. Seconds depend on the machine and on its other work, and hardly do the
seconds of CPU of all processes, Ray's included.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import psutil
from _memory import watching
from _rounds import data_folder

from rayfed.data.loading import load
from rayfed.data.population import population_hash

TARGET = 2.0  # seconds of a later start
RATIO_TARGET = 1.6  # the seconds until a run has printed its scores, in those of Ray and two actors alone
RUN = ("data.name=mini_digits", "rounds=1", "placement.hosts=2", "placement.cpus=0.5")
RAY_ALONE = """
import ray

class Host:
    def ready(self):
        import torch
        return torch.__version__

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
hosts = [ray.remote(Host).options(num_cpus=0.5).remote() for _ in range(2)]
print(*ray.get([host.ready.remote() for host in hosts]))
"""
RAYFED = ("-m", "rayfed", "run", *RUN)
ALONE = ("-c", RAY_ALONE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="later starts and runs to time, after the first")
    args = parser.parse_args(argv)
    missed = False
    if data_folder():
        with tempfile.TemporaryDirectory() as folder:
            (seconds, first), *later = [started(folder) for _ in range(1 + args.rounds)]
        assert all(digest == first for _, digest in later), "a later start gives different images"
        again = statistics.median(spent for spent, _ in later)
        print(
            f"data: first start {seconds:.2f} s, later starts {again:.2f} s (median of {args.rounds}), the same images"
        )
        missed |= said_missed(again, TARGET)
    pairs = [(run(RAYFED), run(ALONE)) for _ in range(args.rounds)]
    with_rayfed, alone = zip(*pairs, strict=True)
    print(f"rayfed run, to its scores: {best_of(with_rayfed)}")
    print(f"Ray and two actors alone:  {best_of(alone)}")
    ratio = statistics.median(ours.printed / ray.printed for ours, ray in pairs)
    print(f"ratio of the seconds until the first line: {ratio:.2f} (median of {args.rounds})")
    return int(said_missed(ratio, RATIO_TARGET) or missed)


def said_missed(measured: float, target: float) -> bool:
    verdict = "met" if measured <= target else "missed"
    print(f"target ≤ {target:g}: {verdict}")
    return measured > target


class Spent(NamedTuple):
    """Seconds of a command."""

    printed: float  # until its first line
    ended: float  # until its end
    cpu: float  # of CPU, of all its processes


def best_of(runs: Sequence[Spent]) -> str:
    printed, ended, cpu = (min(seconds) for seconds in zip(*runs, strict=True))
    return f"first line {printed:.1f} s, end {ended:.1f} s, {cpu:.1f} s of CPU (minima of {len(runs)})"


def run(arguments: Sequence[str]) -> Spent:
    """Run Python with `arguments`, in an empty folder, and say what it took."""
    spent: dict[int, float] = {}

    def sample(processes: Sequence[psutil.Process]) -> None:
        for process in processes[1:]:  # without this one
            with contextlib.suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                spent[process.pid] = times.user + times.system

    with tempfile.TemporaryDirectory() as folder, watching(sample, every=0.25):
        began = time.perf_counter()
        command = [sys.executable, "-u", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder) as process:
            assert process.stdout is not None
            process.stdout.readline()
            printed = time.perf_counter() - began
            process.stdout.read()
        assert process.returncode == 0, f"{command[2:5]} ended with {process.returncode}"
        ended = time.perf_counter() - began
    return Spent(printed, ended, sum(spent.values()))


def started(cache: str) -> tuple[float, str]:
    """Return the seconds of one start in a new process, and a hash of the data."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(measure, cache).result()


def measure(cache: str) -> tuple[float, str]:
    os.environ["RAYFED_CACHE"] = cache
    began = time.perf_counter()
    population = load("mnist", {}, "dirichlet", {"clients": 20, "alpha": 0.1, "test": 0.25}).read()
    return time.perf_counter() - began, population_hash(population)


if __name__ == "__main__":
    raise SystemExit(main())
