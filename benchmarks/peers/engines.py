"""The engines, and how to run a job on one in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _memory import shared_fairly, watching

from peers.environments import Unavailable, environment, last_error
from peers.job import PROCESSES, Outcome

BENCHMARKS = Path(__file__).parents[1]
ONE_PROCESS, TWO_PROCESSES = (f"--nproc-per-node={number}" for number in (1, PROCESSES))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", TWO_PROCESSES)


@dataclass(frozen=True)
class Engine:
    """One way of running a job: `python <launcher> -m peers.<name>_engine JOB OUTCOME`.

    Attributes:
        name: The name of the engine.
        title: What tables call it.
        installed: Whether it runs in an environment of its own; otherwise it runs in the present one.
        launcher: Arguments of Python before the module.
    """

    name: str
    title: str
    installed: bool
    launcher: Sequence[str] = ()

    def python(self, cache: Path) -> Path:
        """Return the Python to run the engine with, and install its environment if need be.

        Raises:
            Unavailable: The environment cannot be installed.
        """
        return environment(self.name, cache) if self.installed else Path(sys.executable)

    def run(
        self, python: Path, job: Path, folder: Path, timeout: float, *, watched: bool = False, gpu: bool = False
    ) -> Outcome:
        """Run `job` in a new process, whose output goes to a log in `folder`, and wait for it.

        With `watched`, its memory and that of its children is sampled.

        Raises:
            Unavailable: The process failed, or took longer than `timeout` seconds.
        """
        outcome, log = folder / f"{job.stem}-{self.name}.npz", folder / f"{job.stem}-{self.name}.log"
        outcome.unlink(missing_ok=True)
        module = f"peers.{self.name}_engine"
        launcher = [ONE_PROCESS if gpu and argument == TWO_PROCESSES else argument for argument in self.launcher]
        command = [str(python), *launcher, "-m", module, str(job), str(outcome)]
        samples: list[tuple[float, list[int]]] = []
        with log.open("w") as file, _sampling(samples) if watched else contextlib.nullcontext():
            began = time.perf_counter()
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=variables(gpu=gpu),
                cwd=folder,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise Unavailable(f"{self.name}: took longer than {timeout:g} s on {job.stem} (see {log})") from None
            finally:
                if process.poll() is None:  # the time is over, or Ctrl-C
                    _end(process)
        if status or not outcome.exists():
            raise Unavailable(f"{self.name}: failed on {job.stem}: {last_error(log)} (see {log})")
        done = Outcome.load(outcome)
        return replace(done, began=began, memory=_highest(samples, done.stamps[-1]))


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("bare", "bare loop", installed=False),
        Engine("rayfed", "rayfed", installed=False),
        Engine("pfl", "pfl-research", installed=True, launcher=TORCHRUN),
        Engine("flower", "Flower", installed=True),
    )
}


def _sampling(samples: list[tuple[float, list[int]]]) -> contextlib.AbstractContextManager[None]:
    """Append to `samples` the time and the memory of each process below this one, again and again."""
    return watching(
        lambda processes: samples.append((time.perf_counter(), [shared_fairly(process) for process in processes[1:]]))
    )


def _highest(samples: Sequence[tuple[float, list[int]]], end: float) -> tuple[int, int]:
    """Return the largest sum of a sample and the largest process in any, until the time `end`."""
    kept = [sizes for at, sizes in samples if at <= end]
    return max(map(sum, kept), default=0), max((size for sizes in kept for size in sizes), default=0)


def _end(process: "subprocess.Popen[Any]") -> None:
    """End a process that leads a session, and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(20)
            return
        except subprocess.TimeoutExpired:
            continue


def variables(*, gpu: bool = False) -> dict[str, str]:
    """Return the environment variables of an engine: one thread per process, a GPU if so, no telemetry, no cluster."""
    dropped = {"PYTHONHOME", "RAY_ADDRESS", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return (
        kept
        | threads
        | hidden
        | {
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{BENCHMARKS.parent}",
        }
    )
