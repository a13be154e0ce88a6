"""What a trial reserves, and whether a cluster could ever give it: pure arithmetic, so that it answers at once."""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from rayfed.core.errors import UsageError
from rayfed.experiments.config import Placement

Bundle = dict[str, float]


def bundles(placement: Placement) -> list[Bundle]:
    """The server's bundle (possibly empty), then one per host. With hosts=0 one process does it all."""
    if not placement.hosts:
        return [_bundle(placement.cpus, max(placement.gpus, placement.server_gpus))]
    server = _bundle(placement.server_cpus, placement.server_gpus)
    return [server, *(_bundle(placement.cpus, placement.gpus) for _ in range(placement.hosts))]


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


def this_machine() -> list[Bundle]:
    """The one node that Ray would start here."""
    return [{"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(torch.cuda.device_count())}]


def cluster_is_running() -> bool:
    """Whether Ray would join a cluster: RAY_ADDRESS is set, or `ray start` left its note on this machine."""
    folder = os.environ.get("RAY_TMPDIR", "/tmp")
    return bool(os.environ.get("RAY_ADDRESS")) or (Path(folder) / "ray" / "ray_current_cluster").exists()


def known_nodes() -> list[Bundle] | None:
    """The nodes to count on: those of the Ray that this process has joined, or this machine where Ray would start here.

    None where a running cluster has to be joined first.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return None if cluster_is_running() else this_machine()


def check_fits(placement: Placement, nodes: Sequence[Bundle]) -> None:
    """Raises UsageError, with numbers, if a trial cannot be placed on `nodes` even when they are idle.

    A share of a GPU is on one GPU: 3 hosts of 1/2 need two. With placement.autoscale more nodes may come.
    """
    if placement.autoscale:
        return
    wanted = bundles(placement)
    free = [{"CPU": node.get("CPU", 0.0), "GPU": node.get("GPU", 0.0)} for node in nodes]
    gpus = [[1.0] * int(node["GPU"]) for node in free]
    for bundle in sorted(wanted, key=lambda b: (-b.get("GPU", 0), -b.get("CPU", 0))):
        if not any(_take(bundle, node, slots) for node, slots in zip(free, gpus, strict=True)):
            raise UsageError(_refusal(placement, wanted, nodes))


def _take(bundle: Bundle, node: Bundle, slots: list[float]) -> bool:
    """Takes the bundle from a node's free amounts if it fits."""
    share, cpus = bundle.get("GPU", 0.0), bundle.get("CPU", 0.0)
    piece, pieces = min(share, 1.0), math.ceil(share)
    chosen = [i for i, left in enumerate(slots) if share and left + 1e-6 >= piece][:pieces]
    if node["CPU"] + 1e-6 < cpus or len(chosen) < pieces:
        return False
    for i in chosen:
        slots[i] -= piece
    node["CPU"] -= cpus
    return True


def _refusal(placement: Placement, wanted: Sequence[Bundle], nodes: Sequence[Bundle]) -> str:
    def amounts(bundle: Bundle) -> str:
        return f"{bundle.get('CPU', 0):g} CPU and {bundle.get('GPU', 0):g} GPU"

    has = "; ".join(amounts(node) for node in nodes)
    there = f"but there {'is 1 node' if len(nodes) == 1 else f'are {len(nodes)} nodes'} with {has}"
    if not placement.hosts:
        key = "gpus" if wanted[0].get("GPU") else "cpus"
        share = f"placement.{key}={getattr(placement, key):g}"
        return f"{share}: the one process needs {amounts(wanted[0])}, {there}"
    total = {name: sum(bundle.get(name, 0.0) for bundle in wanted) for name in ("CPU", "GPU")}
    server = f" and a server of {amounts(wanted[0])}" if wanted[0] else ""
    return (
        f"placement.hosts={placement.hosts}: {placement.hosts} hosts of {amounts(wanted[-1])}{server} need "
        f"{amounts(total)} in all, {there}; use fewer hosts or smaller placement.cpus and placement.gpus, or "
        f"placement.autoscale=true where nodes can still start"
    )
