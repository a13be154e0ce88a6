"""How evenly hosts work where clients differ in size: cohorts dealt anew, against fixed homes.

Clients have lognormal sizes (sigma 1). "Fixed homes" gives every client to one host for the whole run, balanced over
all clients, as engines with stateful hosts do. Both train an MLP 784-200-200-10 with batches of 10 on noise.

Two jobs run on two Ray hosts, 100 of 10,000 clients and 10 of 100 clients a round. For 4, 8 and 16 hosts, schedules are
simulated from the training steps of the same cohorts, with speeds that differ from what was predicted by 3 %.
"""

import argparse
import heapq
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from _rounds import TRAINING, results_folder
from ray.util.placement_group import placement_group, remove_placement_group

from rayfed.core.ids import ClientIndex
from rayfed.data.population import Client, Examples
from rayfed.distributed import cluster
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.ray_fleet import RayFleet
from rayfed.engine.host_schedule import Chunk, Schedule, Unit
from rayfed.engine.server import Server
from rayfed.experiments.capacity import bundles
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan, make_plan

BATCH = 10
JOBS = ((10_000, 100), (100, 10))  # clients, cohort
DEALT, FIXED = "dealt anew", "fixed homes"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="rounds of each run, after one that measures speeds")
    parser.add_argument("--images", type=float, default=60.0, help="median number of training images of a client")
    args = parser.parse_args(argv)
    for count, cohort in JOBS:
        clients = make_clients(count, args.images)
        print(f"\n{cohort} of {count} clients a round, {args.rounds} rounds")
        print(f"{'':<22}  {'busiest / mean':>14}  {'worst':>6}  {'seconds a round':>15}")
        seconds = {}
        for name, fleet in ((DEALT, RayFleet), (FIXED, FixedHomes)):
            with results_folder() as folder:
                plan = plan_of(clients, cohort, args.rounds, folder)
                ratios, seconds[name] = run(plan, fleet)
            print(f"{f'2 hosts, {name}':<22}  {np.mean(ratios):14.3f}  {max(ratios):6.2f}  {seconds[name]:15.3f}")
        print(f"{'fixed / dealt anew':<22}  {'':>14}  {'':>6}  {seconds[FIXED] / seconds[DEALT]:15.2f}")
        steps = [1.0 + len(client.train) // BATCH for client in clients]
        for hosts in (4, 8, 16):
            for name, kind in ((DEALT, Schedule), (FIXED, FixedSchedule)):
                ratios = [
                    simulated(kind, hosts, steps, np.random.default_rng(r).choice(count, cohort, replace=False), r)
                    for r in range(args.rounds)
                ]
                print(f"{f'{hosts} simulated, {name}':<22}  {np.mean(ratios):14.3f}  {max(ratios):6.2f}")


def make_clients(count: int, images: float) -> list[Client]:
    """Return clients with lognormal numbers of training images, of a common pool of noise, and nothing to test."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(images), 1.0, count), BATCH, 3000).astype(int)
    x = rng.integers(0, 256, (4000, 1, 28, 28), dtype=np.uint8)
    y = rng.integers(0, 10, len(x))
    starts = rng.integers(0, len(x) - sizes)
    empty = Examples(x[:0], y[:0])
    cuts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return [Client(i, "all", Examples(x[cut], y[cut]), empty, empty) for i, cut in enumerate(cuts)]


def plan_of(clients: Sequence[Client], cohort: int, rounds: int, folder: str) -> Plan:
    config = Config.read(
        {
            "model.name": "mlp",
            "local": {"batch_size": BATCH, "epochs": 1, "lr": 0.005},
            "rounds": rounds + 1,
            "cohort": cohort,
            "evaluate.every": rounds + 1,
            "placement.hosts": 2,
            "results": folder,
        }
    )
    return make_plan(config, Given(clients=clients, num_classes=10))


def run(plan: Plan, kind: type[RayFleet]) -> tuple[list[float], float]:
    """Return busiest / mean of the hosts' working seconds in every round, and the median training seconds."""
    cluster.connect(plan.config.placement, dashboard=False)
    group = placement_group([bundle for bundle in bundles(plan.config.placement) if bundle], strategy="PACK")
    try:
        ray.get(group.ready())
        device = torch.device("cpu")
        pool = HostPool(bundles(plan.config.placement), group)
        fleet = kind(plan.blueprint, plan.population, sent=ray.put(plan.blueprint), device=device, pool=pool)
        server = Server(plan.blueprint, plan.population, fleet, plan.evaluation, device)
        records = list(server.run())[1:]
        pool.close()
    finally:
        remove_placement_group(group)
    seconds = [sum(record.seconds[part] for part in TRAINING) for record in records]
    return [max(record.busy) / statistics.mean(record.busy) for record in records], statistics.median(seconds)


def homes_of(sizes: Sequence[float], hosts: int) -> dict[ClientIndex, int]:
    """Return the home of each client: the largest first, each to the host with the least so far."""
    loads, homes = [0.0] * hosts, {}
    for client in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        host = min(range(hosts), key=loads.__getitem__)
        loads[host] += sizes[client]
        homes[ClientIndex(client)] = host
    return homes


class FixedSchedule(Schedule):
    """A schedule in which a client runs in its home and nowhere else, and a host gets its work in one piece."""

    def __init__(self, units: Sequence[Unit], free: Sequence[int], homes: Mapping[ClientIndex, int]):
        self._homes = homes
        super().__init__(units, free)

    def __post_init__(self) -> None:
        super().__post_init__()
        for plan in self._plans.values():
            plan.clear()
        for unit in self.units:
            self._plans[self._homes[unit.clients[0]]].append(unit)

    def _front(self, host: int) -> list[Unit]:
        plan, self._plans[host] = self._plans[host], deque()
        return list(plan)

    def _steal(self, host: int, now: float) -> None:
        pass


class FixedHomes(RayFleet):
    """Hosts with fixed homes, balanced over all clients."""

    def _schedule(self, units: Sequence[Unit], kind: Any) -> Schedule:
        homes = homes_of([len(client.train) for client in self._population.clients], len(self._actors))
        return FixedSchedule(units, range(len(self._actors)), homes)


def simulated(kind: type[Schedule], hosts: int, steps: Sequence[float], cohort: Any, seed: int) -> float:
    """Return the seconds of a simulated round by the mean seconds that hosts work."""
    rng = np.random.default_rng(seed)
    speeds = dict(enumerate(0.01 * (1 + 0.03 * rng.standard_normal(hosts))))
    units = [Unit((ClientIndex(int(client)),), cost=steps[client]) for client in cohort]
    if kind is FixedSchedule:
        schedule: Schedule = FixedSchedule(units, range(hosts), homes_of(steps, hosts))
    else:
        schedule = Schedule(units, range(hosts), dict.fromkeys(speeds, 0.01))
    now, busy = 0.0, 0.0
    queues: dict[int, list[Chunk]] = {host: [] for host in speeds}
    events: list[tuple[float, int, int]] = []

    def send() -> None:
        for host, queue in queues.items():
            while (chunk := schedule.next(host, now)) is not None:
                queue.append(chunk)
                if len(queue) == 1:
                    work(host)

    def work(host: int) -> None:
        heapq.heappush(events, (now + queues[host][0].cost * speeds[host], len(events), host))

    send()
    while not schedule.finished:
        now, _, host = heapq.heappop(events)
        chunk = queues[host].pop(0)
        busy += chunk.cost * speeds[host]
        schedule.done(chunk, now)
        if queues[host]:
            work(host)
        send()
    return now / (busy / hosts)


if __name__ == "__main__":
    main()
