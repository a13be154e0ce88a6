"""What privacy, compression, attacks and robust rules cost: CPU seconds of a round, and memory on the server.

Clients with a small MLP take a few local steps each. Rounds of each section alternate with rounds of plain FedAvg, in
this process and on one thread, so that a slow minute of the machine affects both. Then each robust rule runs in a
process of its own with 100 clients, each with an update of 7.5 MB, where its highest memory is measured.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import torch
from _rounds import results_folder

from rayfed.core.round_record import Record
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan

NOISE = {"sigma": 1.0, "delta": 1e-4}
SECTIONS: dict[str, dict[str, Any]] = {
    "privacy": {"privacy": NOISE},
    "privacy, prv accountant": {"privacy": {**NOISE, "accountant": "prv"}},
    "privacy, noise by clients": {"privacy": {**NOISE, "local": True}},
    "privacy, adaptive clipping": {"privacy": {**NOISE, "quantile": 0.5}},
    "compression topk": {"compression.name": "topk"},
    "compression randk": {"compression.name": "randk"},
    "compression qsgd": {"compression.name": "qsgd"},
    "compression sign": {"compression.name": "sign"},
    "compression cast int8": {"compression": {"name": "cast", "type": "int8"}},
    "compression topk, down cast": {"compression": {"name": "topk", "down": "cast"}},
    "compression topk, down topk": {"compression": {"name": "topk", "down": "topk"}},
    "attack label_flip": {"attack.name": "label_flip"},
    "attack sign_flip": {"attack.name": "sign_flip"},
    "attack alie": {"attack.name": "alie"},
    "attack minmax": {"attack.name": "minmax"},
    "robust norm_bound": {"robust.name": "norm_bound"},
    "robust median": {"robust.name": "median"},
    "robust trimmed_mean": {"robust.name": "trimmed_mean"},
    "robust krum": {"robust.name": "krum"},
    "robust bulyan": {"robust.name": "bulyan"},
    "robust geometric_median": {"robust.name": "geometric_median"},
    "robust centred_clipping": {"robust.name": "centred_clipping"},
    "all four": {
        "privacy": NOISE,
        "compression.name": "topk",
        "attack.name": "alie",
        "robust.name": "centred_clipping",
    },
}
RULES = ("mean", "norm_bound", "median", "trimmed_mean", "krum", "bulyan", "geometric_median", "centred_clipping")
ATTACKED = 0.1  # the share of attackers that trimmed_mean, krum and bulyan are to tolerate
WIDE = 2360  # hidden units of the MLP whose update has 7.5 MB


class Memory(NamedTuple):
    """The highest resident memory of a process in bytes, and the CPU seconds of its last round."""

    peak: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each, after one warm-up round")
    parser.add_argument("--clients", type=int, default=500, help="clients of a round that is timed")
    parser.add_argument("--cohort", type=int, default=100, help="clients of a round for memory; 0: not measured")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these sections, such as 'robust krum'")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    unknown = sorted(set(args.only or ()) - SECTIONS.keys())
    if unknown:
        parser.error(f"--only: there is no {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    with results_folder() as folder:
        _seconds(args.only or list(SECTIONS), args.clients, args.rounds, folder)
        if args.cohort:
            _memory(args.cohort, folder)


def _seconds(names: Sequence[str], clients: int, rounds: int, folder: str) -> None:
    """Print the CPU seconds of a round with each section, beside those of rounds without that alternate with them."""
    print(f"CPU seconds of a round of {clients} clients, medians of {rounds}")
    print(f"{'':<28}{'with':>8}{'without':>9}{'ratio':>7}  (range over paired rounds)")
    people = _people(clients, images=60)
    for name in names:
        plain = _rounds({}, people, 64, rounds, folder)
        changed = _rounds(SECTIONS[name], people, 64, rounds, folder)
        pairs: list[tuple[float, float]] = []
        for _ in range(1 + rounds):
            before = _cpu_seconds(plain)
            after = _cpu_seconds(changed)
            pairs.append((after, before))
        after, before = (statistics.median(values) for values in zip(*pairs[1:], strict=True))
        ratios = [a / b for a, b in pairs[1:]]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:<28}{after:>8.2f}{before:>9.2f}{after / before:>7.2f}  {spread}", flush=True)


def _cpu_seconds(records: Iterator[Record]) -> float:
    """Return the CPU seconds until the next round of a server is done."""
    began = time.process_time()
    next(records)
    return time.process_time() - began


def _rounds(
    section: dict[str, Any], people: list[dict[str, Any]], hidden: int, rounds: int, folder: str
) -> Iterator[Record]:
    """Return the rounds of FedAvg with a section, which a server in this process computes one at a time."""
    if section.get("robust.name") in ("trimmed_mean", "krum", "bulyan"):
        section = {**section, "robust.byzantine": int(ATTACKED * len(people))}
    config = Config.read(
        {
            "algorithm.weighting": "equal",
            "model": {"name": "mlp", "hidden": [hidden]},
            "local": {"steps": 5, "batch_size": 10, "lr": 0.05},
            "rounds": 1 + rounds,
            "results": folder,
        },
        section,
    )
    plan = make_plan(config, Given(clients=people))
    fleet = LocalFleet(plan.blueprint, plan.population)
    return Server(plan.blueprint, plan.population, fleet, Evaluation(every=2 + rounds, points=())).run()


def _people(clients: int, images: int) -> list[dict[str, Any]]:
    """Return clients of random grey images of 28 x 28."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(clients):
        x = rng.integers(0, 256, (images, 1, 28, 28), dtype=np.uint8)
        y = rng.integers(0, 10, images)
        made.append({"train": (x, y), "test": (x[:10], y[:10])})
    return made


def _memory(cohort: int, folder: str) -> None:
    """Print the highest memory of a process with each robust rule, and the CPU seconds of a round."""
    print(f"\n{cohort} clients of 7.5 MB: highest memory of the process, CPU seconds of a round")
    for rule in RULES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            measured = alone.submit(_alone, rule, cohort, folder).result()
        print(f"{rule:<28}{measured.peak / 1e9:>6.2f} GB{measured.seconds:>8.1f} s", flush=True)


def _alone(rule: str, cohort: int, folder: str) -> Memory:
    """Run two rounds with a rule in this process."""
    torch.set_num_threads(1)
    section = {} if rule == "mean" else {"robust.name": rule}
    records = _rounds(section, _people(cohort, images=10), WIDE, 1, folder)
    _cpu_seconds(records)
    seconds = _cpu_seconds(records)
    return Memory(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, seconds)


if __name__ == "__main__":
    main()
