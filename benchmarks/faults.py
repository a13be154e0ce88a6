"""Random faults: processes of runs and sweeps are killed at random moments, and nothing may be lost.

Each fault gets a run of its own, of one of five algorithms on two hosts, or a sweep of two trials. Once a random round
is on disk, a random process is killed (-9): a host, the server, a whole node (with the raylets of a second and a third
node on this machine), the recorder or the command itself; after the last two, the command is given again with
resume=true. A host is also killed four times in a run, more often than faults.restarts allows without progress, and
stopped without dying (SIGSTOP). The command must end with the hash of the undisturbed one and with complete tables,
without doubled rows.

Except for the loss of a node, the commands start a Ray of their own, also where a cluster is running.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import psutil
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
from ray.cluster_utils import Cluster

from rayfed.core.errors import UsageError
from rayfed.distributed.cluster import protect_token
from rayfed.reports.read import read

ALGORITHMS = ("fedavg", "scaffold", "adcol", "dbe", "afl")
VICTIMS = {"host": "ray::RayHost", "server": "ray::ServerActor", "recorder": "ray::Recorder"}
OFTEN = "4 hosts"
"""A host that is killed four times, each time when its trial has gone on."""
STOPPED = "stopped"
"""A host that is stopped and does not die."""
IN_RUNS = ("host", "server", "node", "recorder", "command", OFTEN, STOPPED)
IN_SWEEPS = ("server", "host", "node", "command")
RESUMED = ("recorder", "command")
"""The victims after which the command ends, and is given again with resume=true."""
MISSED = "missed"
SETTINGS = (
    "data.name=mini_digits",
    "data.per_domain=120",
    "model.name=cnn",
    "local.epochs=1",
    "checkpoint.every=4",
)


@dataclasses.dataclass
class Fault:
    """One fault and what came of it."""

    algorithm: str
    command: str
    victim: str
    rounds: int
    error: str = ""
    seconds: float = 0.0
    noted: str = ""

    def __str__(self) -> str:
        outcome = self.error or "same hash, tables complete"
        name = f"{self.algorithm:<9} {self.command:<6} {self.victim:<9}"
        return f"{name} {self.seconds:6.1f} s lost  {outcome}  {self.noted}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=40, help="how many")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--only", default="", help="only faults whose line contains this, such as 'run host'")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    faults = [
        fault for fault in itertools.islice(plan(args.rounds), args.faults) if args.only in " ".join(str(fault).split())
    ]
    undisturbed: dict[tuple[str, str, bool], tuple[dict[str, str], float]] = {}
    for fault in faults:
        key = fault.algorithm, fault.command, fault.victim == "node"
        if key not in undisturbed:
            with tempfile.TemporaryDirectory(prefix="rayfed-faults-") as folder:
                undisturbed[key] = run_once(fault, folder)
        for _ in range(3):  # a command may be over before the fault strikes
            fault.error = ""
            with tempfile.TemporaryDirectory(prefix="rayfed-faults-") as folder:
                disturb(fault, folder, rng, *undisturbed[key])
            if not fault.error.startswith(MISSED):
                break
        print(fault, flush=True)
    wrong = [fault for fault in faults if fault.error]
    lost = [fault.seconds for fault in faults if not fault.error]
    print(f"\n{len(faults) - len(wrong)} of {len(faults)} faults ended as if nothing had happened", end="")
    print(f"; median {statistics.median(lost):.1f} s lost" if lost else "")
    return min(len(wrong), 1)


def plan(rounds: int) -> Iterator[Fault]:
    """Yield faults without end: every algorithm with every fault."""
    kinds = [("run", victim) for victim in IN_RUNS] + [("sweep", victim) for victim in IN_SWEEPS]
    yield from (
        Fault(algorithm, *kind, rounds) for algorithm, kind in itertools.cycle(itertools.product(ALGORITHMS, kinds))
    )


def command(fault: Fault, folder: str, *, resume: bool = False) -> list[str]:
    options = [
        *SETTINGS,
        f"rounds={fault.rounds}",
        f"results={folder}",
        "experiment=faults",
        f"resume={str(resume).lower()}",
    ]
    if fault.command == "run":
        options += [f"algorithm.name={fault.algorithm}", "placement.hosts=2", "placement.cpus=0.5"]
        if fault.victim == STOPPED:
            options.append("faults.patience=0.1")
        return [sys.executable, "-m", "rayfed", "run", *options]
    space = Path(folder) / "space.yaml"
    space.write_text(f"algorithm.name: {fault.algorithm}\n")
    options += ["placement.hosts=1", "placement.cpus=0.5", "seeds=[0,1]"]
    return [sys.executable, "-m", "rayfed", "sweep", str(space), *options]


@contextlib.contextmanager
def nodes(fault: Fault) -> Iterator[Cluster | None]:
    """Within, run a cluster with a head and three nodes of a CPU each for the loss of a node; else yield None."""
    if fault.victim != "node":
        yield None
        return
    protect_token()
    enable_token_auth_by_default()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def start(fault: Fault, folder: str, cluster: Cluster | None, *, resume: bool = False) -> "subprocess.Popen[str]":
    address = "local" if cluster is None else cluster.address
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": address}
    with open(Path(folder) / "log.txt", "a") as log:
        return subprocess.Popen(
            command(fault, folder, resume=resume),
            stdout=log,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )


def run_once(fault: Fault, folder: str) -> tuple[dict[str, str], float]:
    """Return the hash of each trial of an undisturbed command, and its seconds."""
    began = time.monotonic()
    with nodes(fault) as cluster:
        process = start(fault, folder, cluster)
        code = process.wait(timeout=600)
    if code:
        raise SystemExit(f"the undisturbed {fault.command} failed:\n{(Path(folder) / 'log.txt').read_text()}")
    return hashes(folder), time.monotonic() - began


def hashes(folder: str) -> dict[str, str]:
    trials = read(folder, "faults").trials
    return {row.trial: f"{row.status} {row.weights_hash}" for row in trials.itertuples()}


def disturb(fault: Fault, folder: str, rng: random.Random, expected: dict[str, str], usual: float) -> None:
    """Run the command with a fault, and note in `fault` what was wrong in the end."""
    with nodes(fault) as cluster:
        began = time.monotonic()
        process = start(fault, folder, cluster)
        try:
            for number in strikes(fault, rng):
                wait_for_round(folder, process, number)
                time.sleep(rng.uniform(0, 0.3))
                victim = find(process.pid, fault.victim, cluster, rng)
                if victim is None:
                    fault.error = f"{MISSED}: no {fault.victim} was found"
                    return
                if fault.victim == STOPPED:
                    victim.suspend()
                else:
                    victim.kill()
            code = process.wait(timeout=300)
            if fault.victim in RESUMED:
                time.sleep(1)
                process = start(fault, folder, cluster, resume=True)
                code = process.wait(timeout=300)
            fault.seconds = time.monotonic() - began - usual
            found = hashes(folder)
            if code or found != expected:
                log = (Path(folder) / "log.txt").read_text().splitlines()
                fault.error = f"exit {code}, {found} in place of {expected}; {' / '.join(log[-3:])}"
                return
            tables = read(folder, "faults")
            fault.error = incomplete(tables.rounds, tables.metrics, fault.rounds)
            fault.noted = noted(folder)
        except subprocess.TimeoutExpired:
            log = (Path(folder) / "log.txt").read_text().splitlines()
            fault.error = f"did not end; {' / '.join(log[-3:])}"
        finally:
            for left in [process, *descendants(process.pid)]:
                with contextlib.suppress(psutil.Error, OSError):
                    left.kill()


def strikes(fault: Fault, rng: random.Random) -> list[int]:
    """Return the rounds on disk at which a process is struck."""
    if fault.victim == OFTEN:  # with a checkpoint every four rounds, there is a new one before each
        return [fault.rounds * part // 5 for part in (1, 2, 3, 4)]
    return [rng.randint(1, max(1, fault.rounds * 2 // 3))]


def wait_for_round(folder: str, process: "subprocess.Popen[str]", number: int) -> None:
    """Wait until a trial has its round `number` on disk, or the command has ended."""
    end = time.monotonic() + 200
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(UsageError, OSError):
            if read(folder, "faults").rounds["round"].max() >= number:
                return
        time.sleep(0.1)


def find(command: int, victim: str, cluster: Cluster | None, rng: random.Random) -> psutil.Process | None:
    """Return a random process to kill: one below the command, the command, or the raylet of a node that works."""
    if victim == "command":
        return psutil.Process(command)
    if cluster is not None:
        raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.worker_nodes]
        works = (VICTIMS["host"], VICTIMS["server"])
        found = [
            psutil.Process(raylet)
            for raylet in raylets
            if any(title(process).startswith(works) for process in descendants(raylet))
        ]
    else:
        wanted = VICTIMS.get(victim, VICTIMS["host"])
        found = [process for process in descendants(command) if title(process).startswith(wanted)]
    return rng.choice(found) if found else None


def descendants(parent: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        found += psutil.Process(parent).children(recursive=True)
    return found


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def incomplete(rounds: pd.DataFrame, metrics: pd.DataFrame, count: int) -> str:
    """Return what is wrong with the tables, or an empty string."""
    for trial, rows in rounds.groupby("trial"):
        numbers = sorted(rows.loc[rows["stage"] == "round", "round"])
        if numbers != list(range(1, count + 1)):
            return f"{trial} has the rounds {numbers}"
    keys = ["trial", "round", "client", "domain", "split", "point", "metric"]
    if metrics.duplicated(keys).any():
        return f"{int(metrics.duplicated(keys).sum())} scores are there twice"
    counts = metrics.groupby(["trial", "round"]).size()
    return "" if counts.groupby("trial").nunique().eq(1).all() else "rounds have different numbers of scores"


def noted(folder: str) -> str:
    """Return the events of the trials, in short."""
    files = sorted((Path(folder) / "faults" / "events").glob("*.parquet"))
    events = pd.concat([pd.read_parquet(file) for file in files]) if files else pd.DataFrame({"event": []})
    return "(" + ", ".join(events["event"]) + ")"


if __name__ == "__main__":
    sys.exit(main())
