"""Checks of Ray, and of every node of a cluster."""

from collections.abc import Iterator

from rayfed.core.errors import HostLost, UsageError, one_line
from rayfed.experiments.capacity import cluster_is_running
from rayfed.experiments.config import Placement
from rayfed.experiments.machine_checks import Check, package_versions


def ray_checks() -> Iterator[Check]:
    """Join the running cluster or start Ray, and yield the outcomes; Ray is shut down after the last one."""
    joined = cluster_is_running()
    what = "Ray"
    if joined:
        what = "cluster"
    try:
        import ray

        from rayfed.distributed import cluster

        cluster.connect(Placement(cpus=0), dashboard=False)
    except (HostLost, UsageError, ImportError) as error:
        remedy = "ray status shows the cluster; unset RAY_ADDRESS or run ray stop to do without it"
        if not joined:
            remedy = "see the logs; placement.hosts=0 works without Ray"
        yield Check(what, str(error), remedy)
        return
    amounts = ray.cluster_resources()
    cpus = amounts.get("CPU", 0)
    gpus = amounts.get("GPU", 0)
    resources = f"{cpus:g} CPU, {gpus:g} GPU"
    how = "starts"
    if joined:
        how = "joined"
    yield Check(what, f"{how}: {resources}")
    yield from _nodes()
    ray.shutdown()


def _nodes() -> Iterator[Check]:
    """Yield for every node whether a process starts there, and finds the same versions."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(package_versions)
    here = package_versions()
    calls = {}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls[node["NodeManagerAddress"]] = task.options(num_cpus=0, scheduling_strategy=there).remote()
    for address, call in calls.items():
        try:
            found = ray.get(call, timeout=120)
        except ray.exceptions.RayError as error:
            remedy = "install rayfed in the same way on it"
            reason = f"no process can start ({one_line(error):.160})"
            yield Check("node", f"{address}: {reason}", remedy)
            continue
        different = []
        for name, version in here.items():
            if found[name] != version:
                different.append(f"{name} {found[name]} (here {version})")
        remedy = ""
        if different:
            remedy = "install the same versions on all nodes"
        state = ", ".join(different) or "ready"
        yield Check("node", f"{address}: {state}", remedy)
