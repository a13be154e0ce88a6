"""Time a FedAvg round on rayfed, a bare PyTorch loop, pfl-research and Flower's simulation engine.

The jobs are those of `round_seconds.py` (mnist-cnn, which needs RAYFED_DATA) and `many_clients.py` (many-clients), and
two that also measure start-up and memory: users that are made on demand, of whom each engine draws 100 per round by
itself (many-users, without the bare loop), and a large MLP on ten clients (large-model). Two have other tasks: a U-Net
finds strokes (pixels), and a GRU predicts words (next-words). The job cifar10 is pfl-research's own, with an evaluation
in every tenth round, on noise; `--rounds` counts cycles of ten rounds there, and each engine draws the clients.
Every engine has two processes of one thread each and takes the same steps on the same batches; the other jobs evaluate
nothing. With `--gpu`, both processes of Flower share a GPU, and rayfed and pfl-research have one process. The engines
run in turn, each time in a new process. Times are from the end of one round to the end of the next, without start-up.
The environments of pfl-research and Flower are installed on demand.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from _rounds import data_folder

from peers import jobs
from peers.engines import ENGINES
from peers.environments import Unavailable
from peers.job import Job, Outcome
from peers.report import show
from rayfed.core.errors import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    cache = args.cache.resolve()
    folder = cache / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    pythons = {}
    for name in args.engines:
        try:
            pythons[name] = ENGINES[name].python(cache)
        except Unavailable as error:
            print(error, flush=True)
    results, same = {}, True  # same: whether every job ran, with the same work on all engines
    for name in args.jobs:
        try:
            made = _jobs(name, args)
        except UsageError as error:
            print(f"{name}: {error}", flush=True)
            same = False
            continue
        for made_job in made:
            job = replace(made_job, gpu=args.gpu)
            runs = _run(job, pythons, folder, args)
            if not runs:
                print(f"{job.name}: no engine could run it", flush=True)
                same = False
                continue
            same = show(job, runs) and same
            results[job.name] = {engine: [_summary(run) for run in outcomes] for engine, outcomes in runs.items()}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if same else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (
        jobs.MNIST_CNN,
        jobs.MANY_CLIENTS,
        jobs.MANY_USERS,
        jobs.LARGE_MODEL,
        jobs.PIXELS,
        jobs.NEXT_WORDS,
        jobs.CIFAR10,
    )
    parser.add_argument("--jobs", nargs="+", choices=names, default=names[:2], help="default: the first two")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all")
    parser.add_argument("--repeats", type=_positive, default=3, help="times that every engine runs (default: 3)")
    parser.add_argument(
        "--rounds", type=_positive, default=3, help="timed rounds of a run, after one that warms up (default: 3)"
    )
    parser.add_argument("--share", type=_share, default=1.0, help="mnist-cnn: share of each client's images to keep")
    parser.add_argument("--clients", type=_positive, default=500, help="many-clients: number of clients")
    parser.add_argument("--images", type=_positive, default=100, help="many-clients: training images per client")
    parser.add_argument(
        "--users", nargs="+", type=_positive, default=[1000, 1_000_000], help="many-users: numbers of users"
    )
    parser.add_argument("--cifar-users", type=_positive, default=1000, help="cifar10: number of users (default: 1000)")
    parser.add_argument("--cifar-cohort", type=_positive, default=50, help="cifar10: users in a round (default: 50)")
    parser.add_argument("--parameters", type=_positive, default=20_000_000, help="large-model: about how many")
    parser.add_argument(
        "--layout",
        choices=("channels_last", "contiguous"),
        default="channels_last",
        help="mnist-cnn: memory format of all engines but rayfed, which always uses channels_last",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("build") / "peers",
        help="folder of the environments and logs (default: build/peers)",
    )
    parser.add_argument("--timeout", type=_positive, default=3600, help="seconds that one run may take (default: 3600)")
    parser.add_argument("--gpu", action="store_true", help="train on a GPU, without the bare loop")
    parser.add_argument("--json", type=Path, help="file to write the seconds of every round to")
    args = parser.parse_args(argv)
    args.engines = [name for name in ENGINES if name in args.engines]  # the bare loop first: others compare with it
    args.jobs = [name for name in names if name in args.jobs]
    return args


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer above 0, got {text}")
    return value


def _share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {text}")
    return value


def _jobs(name: str, args: argparse.Namespace) -> list[Job]:
    """Return the jobs of that name, or none after saying that their data are not there."""
    rounds = args.rounds + 1
    if name == jobs.MANY_CLIENTS:
        return [jobs.many_clients(rounds, clients=args.clients, images=args.images)]
    if name == jobs.MANY_USERS:
        return [jobs.many_users(rounds, users=users) for users in args.users]
    if name in (jobs.PIXELS, jobs.NEXT_WORDS):
        return [(jobs.pixels if name == jobs.PIXELS else jobs.next_words)(rounds)]
    if name == jobs.CIFAR10:
        return [jobs.cifar10(rounds, users=args.cifar_users, cohort=args.cifar_cohort)]
    if name == jobs.LARGE_MODEL:
        return [jobs.large_model(rounds, parameters=args.parameters)]
    if not (root := data_folder()):
        return []
    return [jobs.mnist_cnn(Path(root), rounds, share=args.share, channels_last=args.layout == "channels_last")]


def _run(job: Job, pythons: dict[str, Path], folder: Path, args: argparse.Namespace) -> dict[str, list[Outcome]]:
    """Run the job `args.repeats` times on every engine; engines that fail once are left out from then on.

    The engines take turns, and each repetition begins with another one, so that a slow minute of the machine, or the
    heat of the run before, does not always meet the same engine.
    """
    path = folder / f"{job.name}.npz"
    job.save(path)
    runs: dict[str, list[Outcome]] = {name: [] for name in pythons if name != "bare" or not (job.cohort or job.gpu)}
    for repeat in range(args.repeats):
        order = list(runs)
        shift = repeat % max(len(order), 1)
        for name in order[shift:] + order[:shift]:
            try:
                options = {"watched": job.watched, "gpu": job.gpu}
                outcome = ENGINES[name].run(pythons[name], path, folder, args.timeout, **options)
            except Unavailable as error:
                print(error, flush=True)
                del runs[name]
                continue
            outcome = replace(outcome, cycle=job.evaluate_every or 1)
            runs[name].append(outcome)
            took = ", ".join(f"{value:.2f}" for value in outcome.seconds)
            print(f"{job.name}, run {repeat + 1} of {args.repeats}, {name}: {took} s", flush=True)
    return runs


def _summary(run: Outcome) -> dict[str, object]:
    return {name: getattr(run, name) for name in ("version", "start_up", "seconds", "steps", "memory")}


if __name__ == "__main__":
    sys.exit(main())
