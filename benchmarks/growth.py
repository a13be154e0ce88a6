"""How cost grows with clients, cohorts and trials: each measure at three sizes, in a process of its own.

An exponent b says that the cost grows as size^b: 1 is proportional. It is taken between the two largest sizes, where
fixed costs count least. The exit status is 1 if one is above its limit.
"""

import argparse
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
from _memory import most_private, shared_fairly, watching
from _rounds import results_folder
from _users import EXAMPLES, make_user

import rayfed
from rayfed.core.round_record import Record, Score
from rayfed.data.loading import load
from rayfed.experiments.config import Config
from rayfed.experiments.forecast import sweep_text
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.space import configurations, read_space
from rayfed.records.files import replace_parquet
from rayfed.records.recorder import Recorder
from rayfed.records.round_report import RoundReport
from rayfed.records.storage import open_storage
from rayfed.records.tables import METRICS_SCHEMA
from rayfed.records.trials import merge_trials, record_trial

LAYERS = 10  # of the large models, each a tenth of the parameters
MODELS = (5_000_000, 10_000_000, 20_000_000)  # parameters; 100,000,000 (`--size`) takes about 10 GB
PROPORTIONAL, CONSTANT = 1.2, 0.2


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="what to measure")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a run whose rounds are measured")
    parser.add_argument("--shrink", type=float, default=1.0, help="divide all sizes by this")
    parser.add_argument("--size", type=int, help="measure the first of --rows at this size, and print the number alone")
    args = parser.parse_args(argv)
    if args.size is not None:
        print(ROWS[args.rows[0]].measure(args.size, args.rounds))
        return
    print(f"{'measure':44} {'unit':6} {'sizes and costs':54} exponent  limit")
    too_steep = []
    for name in args.rows:
        row = ROWS[name]
        costs = {size: _measured(name, size, args.rounds) for size in (max(2, int(n / args.shrink)) for n in row.sizes)}
        exponent = _exponent(costs)
        points = ", ".join(f"{size:,}: {cost:.3g}" for size, cost in costs.items())
        print(f"{row.what:44} {row.unit:6} {points:54} {exponent:8.2f}  {row.limit:5.1f}", flush=True)
        too_steep += [name] if exponent > row.limit else []
    if too_steep:
        sys.exit(f"above their limits: {', '.join(too_steep)}")


def _measured(name: str, size: int, rounds: int) -> float:
    command = [sys.executable, __file__, "--rows", name, "--size", str(size), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} at {size}: {done.stderr.strip()[-2000:]}")
    return float(done.stdout.split()[-1])


def _exponent(costs: Mapping[int, float]) -> float:
    (first, low), (second, high) = sorted(costs.items())[-2:]
    return math.log(max(high, 1e-9) / max(low, 1e-9)) / math.log(second / first)


# Measures: a size and a number of rounds give a cost


def plan_seconds(clients: int, rounds: int) -> float:
    """CPU seconds to plan a run of clients that are made on demand."""
    config = Config.read(_values())
    made = make_clients(clients)
    began = time.process_time()
    make_plan(config, Given(clients=made, num_classes=10))
    return time.process_time() - began


def partition_seconds(clients: int, rounds: int) -> float:
    """CPU seconds to draw `synthetic` and give each client its own examples."""
    began = time.process_time()
    load("synthetic", {"clients": clients, "most_examples": 60})
    return time.process_time() - began


def round_seconds(clients: int, rounds: int) -> float:
    """Seconds of a round of 100 clients, without scoring."""
    return _rounds(clients, min(100, clients), rounds)["train"]


def cohort_seconds(cohort: int, rounds: int) -> float:
    """Seconds of a round of `cohort` among 100,000 clients, without scoring."""
    return _rounds(max(cohort, 100_000), cohort, rounds)["train"]


def scoring_seconds(clients: int, rounds: int) -> float:
    """Seconds to score the global model on the clients that are scored by default."""
    return _rounds(clients, min(100, clients), rounds)["evaluate"]


def memory_of_hosts(clients: int, rounds: int) -> float:
    """Proportional set size of all processes of a run on two hosts, MB, at its highest."""
    return _highest(lambda: _run(clients, min(100, clients), rounds, hosts=2))


def states_of_hosts(cohort: int, rounds: int) -> float:
    """The same with SCAFFOLD, by the clients that take part in a round, of 100,000."""
    return _highest(lambda: _run(100_000, cohort, rounds, hosts=2, **{"algorithm.name": "scaffold"}))


def copies_in_server(parameters: int, rounds: int) -> float:
    """Private memory of the server of a run on two hosts, in copies of its model, above that with a small model."""
    return _copies(parameters, rounds, "server")


def copies_in_host(parameters: int, rounds: int) -> float:
    """The same of the host that has most."""
    return _copies(parameters, rounds, "host")


def _copies(parameters: int, rounds: int, role: str) -> float:
    def private(width: int) -> int:
        model = {"name": "mlp", "hidden": [width] * (LAYERS + 1)}
        return most_private(lambda: _run(10, 10, rounds, hosts=2, model=model))[role]

    width = round(math.sqrt(parameters / LAYERS))
    idle = private(1)  # first, since its processes may not have ended when the next ones start
    return (private(width) - idle) / (4 * LAYERS * width**2)


def recording_seconds(trials: int, rounds: int) -> float:
    """CPU seconds to record the start and the end of each of `trials` trials."""
    values = {"experiment": "e", "seed": 0, "algorithm": {"name": "fedavg"}}
    with results_folder() as folder:
        began = time.process_time()
        for number in range(trials):
            for status in ("running", "done"):
                record_trial(folder, "e", f"trial-{number}", values | {"status": status})
        merge_trials(folder, "e")
        return time.process_time() - began


def recorder_seconds(trials: int, rounds: int) -> float:
    """CPU seconds of the recorder for `trials` trials of 20 rounds of 400 scores, of which 50 run at once."""
    with results_folder() as folder:
        return _recorded(folder, trials, 20, 400, at_once=50)


def recorder_of_long_trial(scores: int, rounds: int) -> float:
    """The same for `scores` scores of one trial in rounds of 1,000, after a checkpoint each."""
    with results_folder() as folder:
        return _recorded(folder, 1, max(1, scores // 1000), 1000, checkpoints=True)


def memory_of_recorder(trials: int, rounds: int) -> float:
    """Memory that the recorder takes while `trials` trials record 3 rounds of 39,000 scores, MB, at its highest."""
    with results_folder() as folder:
        before = _resident()
        highest = [before]
        with watching(lambda processes: highest.append(_resident())):
            _recorded(folder, trials, 3, 39_000, at_once=trials)
        return (max(highest) - before) / 1e6


def _recorded(
    folder: str, trials: int, rounds: int, scores: int, *, at_once: int = 1, checkpoints: bool = False
) -> float:
    """Record rounds as the processes of trials send them, and return the CPU seconds of the recorder."""
    reports = [pickle.dumps(RoundReport.of(_scored(number, scores))) for number in range(1, rounds + 1)]
    values = Config.read({}).tree() | {"default_eval_point": "global"}
    recorder = Recorder(folder, "e", in_sweep=True)
    names = [f"trial-{number:05d}" for number in range(trials)]
    began = time.process_time()
    for first in range(0, trials, at_once):
        running = names[first : first + at_once]
        for name in running:
            recorder.begin(name, values, rounds, None)
        for report in reports:
            for name in running:
                recorder.add(name, pickle.loads(report))
                if checkpoints:
                    recorder.begin_checkpoint(name)
        for name in running:
            recorder.end(name, {"status": "done"})
    return time.process_time() - began


def _scored(round: int, scores: int) -> Record:
    """Return a round with two metrics on two splits of each client."""
    record = Record(stage="round", round=round, cohort=100)
    for number in range(scores):
        client, kind = divmod(number, 4)
        score = Score(
            client=client,
            domain="abcde"[client % 5],
            split=("val", "test")[kind // 2],
            point="global",
            metric=("accuracy", "loss")[kind % 2],
            value=number / scores,
            n=10,
            higher_is_better=kind % 2 == 0,
        )
        record.scores.append(score)
    return record


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def dry_run_seconds(trials: int, rounds: int) -> float:
    """CPU seconds of `rayfed sweep --dry-run` on `trials` trials with four seeds."""
    rates = [0.1 + 0.9 * number / trials for number in range(max(1, trials // 4))]
    with results_folder() as folder:
        values = _values(results=folder, rounds=rounds, seeds=[0, 1, 2, 3]) | {"local.lr": {"grid": rates}}
        began = time.process_time()
        space = read_space(values)
        sweep_text(space, configurations(space))
        return time.process_time() - began


def report_seconds(trials: int, rounds: int) -> float:
    """CPU seconds of a report on `trials` trials of 100 rounds, each with four scores of 100 clients."""
    return _report(trials)[0]


def memory_of_report(trials: int, rounds: int) -> float:
    """Memory of the process that makes the same report, MB, at its highest."""
    return _report(trials)[1]


def _report(trials: int) -> tuple[float, float]:
    with results_folder() as folder:
        for number in range(trials):
            _write_scores(folder, number)
        done = subprocess.run([sys.executable, "-c", _REPORT, folder], capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, done.stdout.split()[-2:])
    return seconds, kilobytes / 1e3


_REPORT = """
import pathlib, re, sys, time
from rayfed.cli.main import main
main(["report", sys.argv[1]])
status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss would be that of the parent where it is higher
print(time.process_time(), re.search("VmHWM:\\s*(\\d+)", status)[1])
"""


def _write_scores(folder: str, number: int, clients: int = 100, rounds: int = 100) -> None:
    """Write the scores of a trial, two metrics on two splits, as if it had run."""
    rng, rows = np.random.default_rng(number), rounds * 4 * clients
    kind = np.tile(np.repeat(np.arange(4), clients), rounds)
    name, seed, mu = f"trial-{number:05d}", number // 20, number % 20
    table = pa.table(
        {
            "experiment": ["e"] * rows,
            "trial": [name] * rows,
            "algorithm": ["fedprox"] * rows,
            "seed": np.full(rows, seed),
            "round": np.repeat(np.arange(1, rounds + 1), 4 * clients),
            "client": np.tile(np.arange(clients), 4 * rounds),
            "domain": np.resize(["a", "b", "c", "d"], rows),
            "split": np.array(["val", "test"])[kind // 2],
            "point": ["global"] * rows,
            "metric": np.array(["accuracy", "loss"])[kind % 2],
            "value": rng.random(rows),
            "n": rng.integers(1, 50, rows),
            "unseen": np.zeros(rows, bool),
            "higher_is_better": kind % 2 == 0,
        }
    )
    home = open_storage(folder).child("e", "metrics")
    replace_parquet(table.cast(METRICS_SCHEMA), home, f"{name}-0000.parquet")
    values = {"algorithm": {"name": "fedprox", "mu": mu}, "seed": seed, "status": "done"}
    record_trial(folder, "e", name, values)


def make_clients(count: int) -> rayfed.Clients:
    """Return clients of 8 training and 2 test examples, drawn anew from their number whenever they are needed."""
    return rayfed.Clients({"train": np.full(count, EXAMPLES - 2), "test": np.full(count, 2)}, make_user)


def _values(**others: Any) -> dict[str, Any]:
    return {"algorithm.name": "fedavg", "model": {"name": "mlp"}, "local.batch_size": 8} | others


def _run(clients: int, cohort: int, rounds: int, *, hosts: int = 0, **others: Any) -> rayfed.Result:
    with results_folder() as folder:
        values = _values(cohort=cohort, rounds=rounds, results=folder) | {"placement.hosts": hosts} | others
        return rayfed.run(values, clients=make_clients(clients), num_classes=10, quiet=True, keep_state=False)


def _rounds(clients: int, cohort: int, rounds: int) -> dict[str, float]:
    table = _run(clients, cohort, rounds).rounds.iloc[1:]  # the first one warms up
    evaluate = float(table["seconds_evaluate"].median())
    return {"train": float((table["seconds_total"] - table["seconds_evaluate"]).median()), "evaluate": evaluate}


def _highest(run: Callable[[], object]) -> float:
    """Return the memory of this process and of all below it at its highest, MB; shared pages count once."""
    samples = [0]
    with watching(lambda processes: samples.append(sum(map(shared_fairly, processes)))):
        run()
    return max(samples) / 1e6


class Row(NamedTuple):
    """What is measured, at which sizes, and the highest exponent that is accepted."""

    what: str
    unit: str
    measure: Callable[[int, int], float]
    sizes: tuple[int, int, int]
    limit: float = PROPORTIONAL


ROWS = {
    "plan": Row("plan of clients made on demand", "CPU s", plan_seconds, (10_000, 100_000, 1_000_000)),
    "partition": Row("synthetic, its own clients", "CPU s", partition_seconds, (1000, 3000, 10_000)),
    "round": Row("round of 100, by clients", "s", round_seconds, (1000, 100_000, 1_000_000), CONSTANT),
    "cohort": Row("round of 100,000 clients, by cohort", "s", cohort_seconds, (10, 100, 1000)),
    "scoring": Row("scoring by default, by clients", "s", scoring_seconds, (1000, 10_000, 1_000_000)),
    "memory": Row("all processes, two hosts, by clients", "MB", memory_of_hosts, (1000, 100_000, 1_000_000)),
    "parameters": Row("server, two hosts, by parameters", "models", copies_in_server, MODELS, CONSTANT),
    "parameters-host": Row("the same of a host", "models", copies_in_host, MODELS, CONSTANT),
    "recording": Row("recording of trials", "CPU s", recording_seconds, (100, 1000, 5000)),
    "recorder": Row("recorder, by trials of 8,000 scores", "CPU s", recorder_seconds, (10, 100, 1000)),
    "recorder-scores": Row("the same, by scores of a trial", "CPU s", recorder_of_long_trial, (10**4, 10**5, 10**6)),
    "recorder-memory": Row("the same, by trials of 117,000 scores", "MB", memory_of_recorder, (50, 150, 500), CONSTANT),
    "dry-run": Row("dry run of trials", "CPU s", dry_run_seconds, (100, 1000, 10_000)),
    "report": Row("report, by trials of 40,000 scores", "CPU s", report_seconds, (20, 60, 200)),
    "report-memory": Row("the same", "MB", memory_of_report, (20, 60, 200)),
    "states": Row("the same with SCAFFOLD, by cohort", "MB", states_of_hosts, (10, 100, 1000)),
}

if __name__ == "__main__":
    main()
