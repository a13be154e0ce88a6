"""What a trial reserves, and whether the nodes that Ray has or would have here offer it.

Ray is not imported, and torch only when it is asked for GPUs.
"""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config, Placement

_SERVERS_SHARE = 0.25  # of what the first host would reserve of a GPU

Bundle = dict[str, float]
"""Amounts of "CPU" and "GPU"; what is absent is 0."""


def this_machine() -> list[Bundle]:
    """Return the one node that Ray would start here."""
    import torch

    return [{"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(torch.cuda.device_count())}]


def cluster_is_running() -> bool:
    """Return whether Ray would join a cluster: RAY_ADDRESS is set, or `ray start` has run on this machine."""
    address = os.environ.get("RAY_ADDRESS")
    if address == "local":  # Ray's word for a session of its own
        return False
    return bool(address) or _address_file().exists()


def cluster_address() -> str:
    """Return the address of the cluster that Ray would join, "" if there is none or Ray itself has to find it."""
    given = os.environ.get("RAY_ADDRESS", "")
    if given and given != "auto":
        return given
    if not _address_file().exists():
        return ""
    return _address_file().read_text().strip()


def ray_folder() -> Path:
    """Return the folder in which Ray keeps its sessions and the address of a cluster on this machine, by Ray's rule."""
    place = "/tmp"
    if sys.platform == "linux":
        place = os.environ.get("TMPDIR", place)
    return Path(os.environ.get("RAY_TMPDIR", place)) / "ray"


def _address_file() -> Path:
    return ray_folder() / "ray_current_cluster"


def known_nodes() -> list[Bundle] | None:
    """Return the resources of each node, or None if a running cluster has to be joined first.

    These are the nodes of the Ray session of this process, or this machine if Ray would be started here.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if cluster_is_running():
        return None
    return this_machine()


def fits(bundles: Iterable[Bundle], nodes: Sequence[Bundle]) -> bool:
    """Return whether `bundles` fit on idle `nodes`, the largest placed first.

    A bundle lies on one node, and a share of a GPU on one GPU: 3 bundles of 1/2 GPU need 2 GPUs. Ray, too, takes the
    fullest GPU that has room for a share.
    """
    free = [_FreeNode(node) for node in nodes]
    return all(_place(bundle, free) for bundle in sorted(bundles, key=_size, reverse=True))


def _place(bundle: Bundle, nodes: Sequence["_FreeNode"]) -> bool:
    """Place a bundle on the first node with room for it, and return whether there is one."""
    return any(node.take(bundle) for node in nodes)


def _size(bundle: Bundle) -> tuple[float, float]:
    """Return the GPUs and the CPUs of a bundle; the larger pair is the larger bundle."""
    return bundle.get("GPU", 0.0), bundle.get("CPU", 0.0)


class _FreeNode:
    """What is free on a node, at first all of it."""

    def __init__(self, node: Bundle) -> None:
        self._cpus = node.get("CPU", 0.0)
        self._gpus = [1.0] * int(node.get("GPU", 0.0))  # the free share of each

    def take(self, bundle: Bundle) -> bool:
        """Place a bundle here, and return whether it fits."""
        gpus, cpus = _size(bundle)
        share = min(gpus, 1.0)
        count = math.ceil(gpus)
        fullest_first = sorted(range(len(self._gpus)), key=self._gpus.__getitem__)
        chosen = [number for number in fullest_first if self._gpus[number] + 1e-6 >= share][:count]
        if self._cpus + 1e-6 < cpus or len(chosen) < count:
            return False
        self._cpus -= cpus
        for number in chosen:
            self._gpus[number] -= share
        return True


def most_on_node(bundle: Bundle, node: Bundle) -> float:
    """Return how many processes that reserve `bundle` fit on an idle node at once; infinity if it reserves nothing."""
    most = math.inf
    share, cpus = _size(bundle)
    gpus = int(node.get("GPU", 0.0))
    if cpus:
        most = math.floor(node.get("CPU", 0.0) / cpus + 1e-6)
    if share > 1:
        most = min(most, gpus // math.ceil(share))
    elif share:
        most = min(most, gpus * math.floor(1 / share + 1e-6))
    return most


def memory_share(bundle: Bundle, node: Bundle, at_once: int) -> float:
    """Return the share of a node's memory for a process that reserves `bundle`.

    Args:
        at_once: The most such processes that run at once, on all nodes.
    """
    return 1 / max(1, min(most_on_node(bundle, node), at_once))


def bundles(placement: Placement) -> list[Bundle]:
    """Return what a trial reserves: the server's bundle, possibly empty, then one per host.

    Without hosts, one process needs one bundle.
    """
    if not placement.hosts:
        return [_bundle(placement.cpus, max(placement.gpus, placement.server_gpus or 0.0))]
    server = _bundle(placement.server_cpus, placement.server_gpus or 0.0)
    host = _bundle(placement.cpus, placement.gpus)
    return [server] + [host] * placement.hosts


def together(parts: Iterable[Bundle]) -> Bundle:
    """Return the sum of bundles."""
    total: Bundle = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _bundle(cpus: float, gpus: float) -> Bundle:
    bundle = {}
    if cpus:
        bundle["CPU"] = cpus
    if gpus:
        bundle["GPU"] = gpus
    return bundle


def reserved(config: Config) -> list[Bundle]:
    """Return the bundles that a trial of `config` reserves.

    A server that trains shares the GPU of the first host, because a thread of a CPU would be too slow.
    """
    placement = config.placement
    needed = bundles(placement)
    shares = placement.hosts and 0 < placement.gpus <= 1 and placement.server_gpus is None
    if shares and config.algorithm.traits.trains_server:
        of_server = round(placement.gpus * _SERVERS_SHARE, 4)  # Ray's precision
        needed[0] = needed[0] | {"GPU": of_server}
        needed[1] = needed[1] | {"GPU": round(placement.gpus - of_server, 4)}
    return needed


def servers_gpus(config: Config) -> float:
    """Return the GPUs that the process of the server reserves. Without hosts it is the only process."""
    return reserved(config)[0].get("GPU", 0.0)


def check_run(placement: Placement) -> None:
    """Raise UsageError if a single run lacks resources here. A running cluster is asked when it is joined."""
    if not placement.hosts:
        from rayfed.engine.device import device_for

        device_for(bundles(placement)[0].get("GPU", 0.0))
    else:
        check_sweep([placement])


def check_sweep(placements: Iterable[Placement]) -> None:
    """Raise UsageError if a trial cannot be placed here. A running cluster is asked when it is joined."""
    placements = list(placements)
    check_address()
    for placement in placements:
        check_reserves(placement)
    nodes = known_nodes()
    if nodes is None:
        return
    for placement in placements:
        check_fits(placement, nodes)


def check_address() -> None:
    """Raise UsageError if the cluster would be joined from outside, by Ray's client."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise UsageError(
            f"RAY_ADDRESS={address}: results would be on the cluster and not here; submit the command as a job, "
            "ray job submit --address http://HEAD:8265 -- rayfed …; or unset RAY_ADDRESS to use this machine alone"
        )


def check_reserves(placement: Placement) -> None:
    """Raise UsageError if a process that trains would reserve nothing: Ray would start any number of them."""
    if not placement.cpus and not placement.gpus:
        raise UsageError(
            "placement.cpus=0: a process that trains reserves something; give placement.cpus above 0, such as 0.1, or "
            "placement.gpus"
        )


def check_fits(placement: Placement, nodes: Sequence[Bundle]) -> None:
    """Raise UsageError, with numbers, if a trial cannot be placed on `nodes` even if they are idle.

    With placement.autoscale nothing is refused, because more nodes may start.
    """
    needed = bundles(placement)
    if placement.autoscale or fits(needed, nodes):
        return
    total = _amounts(together(needed))
    largest = _amounts(max(needed, key=_size))
    key = "cpus"
    if placement.hosts:
        key = "hosts"
    elif needed[0].get("GPU"):
        key = "gpus"
    there = f"are {len(nodes)} nodes"
    if len(nodes) == 1:
        there = "is 1 node"
    there += f" with {'; '.join(map(_amounts, nodes))}"
    raise UsageError(
        f"placement.{key}={getattr(placement, key):g}: a trial needs {total}, of which {largest} "
        f"on one node, but there {there}; use fewer hosts or smaller placement.cpus and placement.gpus, or "
        "placement.autoscale=true if nodes can still start"
    )


def _amounts(bundle: Bundle) -> str:
    return f"{bundle.get('CPU', 0):g} CPU and {bundle.get('GPU', 0):g} GPU"
