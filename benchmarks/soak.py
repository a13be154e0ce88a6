"""Hours of runs and sweeps: what each process holds as time goes on, and whether random faults ever lose anything.

The first half is one run of many short rounds on two hosts, left alone and interrupted at the end. The memory that each
of its processes holds for itself, its open files and the shared memory of the machine are sampled, and shown for every
eighth of the time, so that a leak is seen as a slope.

In the second half, runs and sweeps follow each other while hosts, servers, recorders and commands are killed (-9) at
random moments, several in one command; after a recorder or the command itself, the command is given again with
resume=true. Each must end with the hash of an undisturbed one and with complete tables. (The loss of a node needs a
cluster: see `faults.py`.)
"""

import argparse
import collections
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import psutil
from faults import ALGORITHMS, IN_RUNS, IN_SWEEPS, RESUMED, VICTIMS, Fault, descendants, find, hashes, incomplete, title
from faults import run_once as undisturbed_run
from faults import start as start_command

from rayfed.core.errors import UsageError
from rayfed.reports.read import read

ROLES = {"driver": "", **{name: VICTIMS[name] for name in ("server", "host", "recorder")}}
SLICES = 8
MOST = 3  # faults of a command, since a trial starts again that often, by faults.restarts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120, help="of both halves together")
    parser.add_argument("--between", type=float, default=20, help="mean seconds between faults")
    parser.add_argument("--rounds", type=int, default=150, help="of each command of the second half")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    args = parser.parse_args(argv)
    half = 30 * args.minutes
    undisturbed(half)
    return disturbed(half, args.rounds, args.between, random.Random(args.seed))


def undisturbed(seconds: float) -> None:
    """Run rounds for `seconds`, and print what the processes held."""
    with tempfile.TemporaryDirectory(prefix="rayfed-soak-") as folder:
        values = [
            *("algorithm.name=scaffold", "data.per_domain=60", "model.name=mlp", "rounds=1000000", "evaluate.every=20"),
            *("checkpoint.every=50", "placement.hosts=2", "placement.cpus=0.5", f"results={folder}", "experiment=soak"),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
        with open(Path(folder) / "log.txt", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "rayfed", "run", *values],
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # jobs may ignore it
            )
        print(memory_table(sampled(process, folder, seconds)).to_string(), flush=True)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
        rounds = read(folder, "soak").rounds
        numbers = rounds.loc[rounds["stage"] == "round", "round"].tolist()
        assert numbers == list(range(1, len(numbers) + 1)), "rounds are missing"
        print(f"{len(numbers)} rounds, all in the table\n", flush=True)


def sampled(process: "subprocess.Popen[bytes]", folder: str, seconds: float) -> list[dict[str, float]]:
    """Return every five seconds the megabytes and the open files of each role, after the first round."""
    while not list(Path(folder).glob("soak/rounds/*.parquet")):
        if process.poll() is not None:
            raise SystemExit(f"the run ended:\n{(Path(folder) / 'log.txt').read_text()}")
        time.sleep(1)
    samples, end = [], time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        sample = collections.defaultdict[str, float](float)
        for one in [psutil.Process(process.pid), *descendants(process.pid)]:
            for role, begins in ROLES.items():
                if one.pid == process.pid if role == "driver" else title(one).startswith(begins):
                    with contextlib.suppress(psutil.Error):
                        sample[f"{role} MB"] += one.memory_full_info().uss / 1e6
                        sample[f"{role} files"] += one.num_fds()
        sample["shared MB"] = psutil.disk_usage("/dev/shm").used / 1e6
        samples.append(dict(sample))
        time.sleep(5)
    return samples


def memory_table(samples: Sequence[dict[str, float]]) -> pd.DataFrame:
    """Return the medians of the samples in each part of the time."""
    table = pd.DataFrame(samples)
    part = [row * SLICES // len(table) + 1 for row in range(len(table))]
    return table.groupby(part).median().round(1).rename_axis("part")


def disturbed(seconds: float, rounds: int, between: float, rng: random.Random) -> int:
    """Run commands with faults for `seconds`, print what came of each, and return 1 if one went wrong."""
    expected: dict[tuple[str, str], dict[str, str]] = {}
    end, wrong, faults = time.monotonic() + seconds, 0, 0
    for algorithm, kind in itertools.cycle(itertools.product(ALGORITHMS, ("run", "sweep"))):
        if time.monotonic() > end:
            break
        what = Fault(algorithm, kind, "", rounds)
        if (algorithm, kind) not in expected:
            with tempfile.TemporaryDirectory(prefix="rayfed-soak-") as folder:
                expected[algorithm, kind], _ = undisturbed_run(what, folder)
        with tempfile.TemporaryDirectory(prefix="rayfed-soak-") as folder:
            struck, error = strike(what, folder, expected[algorithm, kind], between, rng)
        faults, wrong = faults + len(struck), wrong + bool(error)
        print(f"{algorithm:<9} {kind:<6} {error or 'same hash, tables complete'}  ({', '.join(struck)})", flush=True)
    print(f"\n{faults} faults; {wrong} commands went wrong")
    return min(wrong, 1)


def strike(
    what: Fault, folder: str, expected: dict[str, str], between: float, rng: random.Random
) -> tuple[list[str], str]:
    """Run a command with random faults, and return these and what was wrong in the end, "" if nothing."""
    struck: list[str] = []
    names = [name for name in (IN_RUNS if what.command == "run" else IN_SWEEPS) if name != "node"]
    process = start_command(what, folder, None)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=rng.expovariate(1 / between))
                break
            name = rng.choice(names)
            victim = find(process.pid, name, None, rng) if begun(folder) and len(struck) < MOST else None
            if victim is None:
                continue
            with contextlib.suppress(psutil.Error):
                victim.kill()
                struck.append(name)
            if name in RESUMED:
                process.wait(timeout=300)
                time.sleep(2)
                process = start_command(what, folder, None, resume=True)
        found = hashes(folder)
        if code or found != expected:
            log = (Path(folder) / "log.txt").read_text().splitlines()
            return struck, f"exit {code}, {found} in place of {expected}; {' / '.join(log[-3:])}"
        tables = read(folder, "faults")
        return struck, incomplete(tables.rounds, tables.metrics, what.rounds)
    except subprocess.TimeoutExpired:
        return struck, f"did not end after {struck[-1]}"
    finally:
        for left in [process, *descendants(process.pid)]:
            with contextlib.suppress(psutil.Error, OSError):
                left.kill()


def begun(folder: str) -> bool:
    """Whether a trial has a round on disk."""
    with contextlib.suppress(UsageError, OSError):
        return not read(folder, "faults").rounds.empty
    return False


if __name__ == "__main__":
    sys.exit(main())
