"""Time a local step: rayfed's loop in this process against plain eager PyTorch, for three networks.

Eight clients train one after the other (vmap_clients=1) or all at once by torch.vmap (vmap_clients=8). Clients with few
steps show the cost of a client, clients with many steps the cost of a step. The benchmark uses one thread and measures
CPU time, so that other programs on the machine matter little; the variants alternate in every round.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _bare import BareWorker, state_of

from rayfed.algorithm import Phase
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.optim import SGD
from rayfed.data.population import Client, ClientTable, Examples, Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.fleet import ExchangeRequest
from rayfed.engine.host import Host
from rayfed.models.base import build_model

CLIENTS, BATCH = 8, 10
NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mlp": ("mlp", {}, (1, 28, 28)),
    "cnn": ("cnn", {}, (1, 28, 28)),
    "batch norm": ("digits_cnn", {"width": 0.125}, (3, 28, 28)),
}
NCHW, CHANNELS_LAST = "plain, NCHW", "plain, channels last"
Variant = Callable[[], Any]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), help="networks to time"
    )
    parser.add_argument("--steps", nargs="+", type=int, default=[10, 40], help="local steps per client")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one warm-up round")
    parser.add_argument("--profile", action="store_true", help="print a profile of rayfed with vmap_clients=1 instead")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not args.profile:
        print(f"{'CPU µs per step':<20}  {'steps':>5}  {'':<24}{'min':>8}  {'median':>8}  {'max':>8}  of medians")
    for network in args.networks:
        for steps in args.steps:
            variants = make_variants(network, steps)
            if args.profile:
                _profile(f"{network}, {steps} steps per client", variants["rayfed, vmap_clients=1"], args.rounds)
            else:
                _show(network, steps, alternate(variants, args.rounds))


def make_variants(network: str, steps: int) -> dict[str, Variant]:
    """Return functions that train eight clients for `steps` steps each, by name.

    Channels last is left out for networks without convolutions.
    """
    plan, population = job(network, steps)
    variants = {f"rayfed, vmap_clients={width}": exchange(plan, population, width) for width in (1, CLIENTS)}
    variants[NCHW] = plain(plan, population, channels_last=False)
    if plan.context(population, "cpu").task.channels_last:
        variants[CHANNELS_LAST] = plain(plan, population, channels_last=True)
    return variants


def job(network: str, steps: int, clients: int = CLIENTS, **changes: Any) -> tuple[Blueprint, Population]:
    """Return one epoch of FedAvg with SGD on noise, `steps` steps for each client; `changes` are the blueprint's.

    A network that is not in `NETWORKS` has its own defaults and small colour images.
    """
    name, options, shape = NETWORKS.get(network, (network, {}, (3, 32, 32)))
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "algorithm": FedAvg(),
        "model": build_model(name, options, shape, 10),
        "loss": F.cross_entropy,
        "batch_norm": "aggregate",
        "optimizer": SGD(lr=0.005),
        "local": Phase("train", epochs=1),
        "batch_size": BATCH,
        "drop_last": True,
        "rounds": 1,
        "cohort": clients,
        "seed": 0,
    }
    return Blueprint(**(values | changes)), _population(shape, steps, clients)


def _population(shape: tuple[int, ...], steps: int, clients: int) -> Population:
    rng = np.random.default_rng(0)
    n = steps * BATCH

    def client(number: int) -> Client:
        train = Examples(rng.integers(0, 256, (n, *shape), dtype=np.uint8), rng.integers(0, 10, n))
        empty = Examples(train.x[:0], train.y[:0])
        return Client(number, "all", train, empty, empty)

    halves = (0.5,) * shape[0]
    return Population("noise", ClientTable.of(list(map(client, range(clients)))), 10, shape, mean=halves, std=halves)


def exchange(plan: Blueprint, population: Population, width: int, device: str | torch.device = "cpu") -> Variant:
    """Return one exchange of rayfed's host, with all costs of a client from the download to the summed reply."""
    ctx = plan.context(population, device)
    host = Host(plan, population, device)
    down = plan.algorithm.broadcast(ctx, plan.algorithm.init(ctx))
    clients = tuple(map(ClientIndex, range(len(population.clients))))
    weights = dict.fromkeys(clients, 1 / len(clients))
    request = ExchangeRequest(
        moment=Moment("round", 1), cohort=clients, clients=clients, weights=weights, vmap_clients=width
    )
    return lambda: host.exchange(request, down, {}, {}, host.empty_sum())


def plain(
    plan: Blueprint, population: Population, *, channels_last: bool, device: str | torch.device = "cpu"
) -> Variant:
    """Return a round of the bare loop of `_bare` in this process."""
    worker = BareWorker(plan, population, range(len(population.clients)), device, channels_last=channels_last)
    state = state_of(plan.model)
    return lambda: worker.round(1, state)


def alternate(variants: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of every variant in every round except the first."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    return {name: values[1:] for name, values in seconds.items()}


def _show(network: str, steps: int, seconds: dict[str, list[float]]) -> None:
    """Print the microseconds per step of one client for each variant, and rayfed's ratios to the plain loops."""
    plain = {name: statistics.median(values) for name, values in seconds.items() if name.startswith("plain")}
    for name, values in seconds.items():
        scaled = [value / (CLIENTS * steps) * 1e6 for value in (min(values), statistics.median(values), max(values))]
        ratios = [
            f"{statistics.median(values) / base:.3f} × {other}" for other, base in plain.items() if name not in plain
        ]
        line = f"{network:<20}  {steps:>5}  {name:<24}" + "  ".join(f"{value:8.0f}" for value in scaled)
        print(f"{line}  {', '.join(ratios)}".rstrip(), flush=True)


def _profile(title: str, variant: Variant, rounds: int) -> None:
    import cProfile
    import pstats

    variant()
    with cProfile.Profile() as profile:
        for _ in range(rounds):
            variant()
    print(f"== {title}")
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
