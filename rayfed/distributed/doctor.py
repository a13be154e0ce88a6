"""Checks of Ray, and of every node of a cluster."""

from collections.abc import Iterator

from rayfed.core.errors import HostLost, UsageError
from rayfed.experiments.capacity import cluster_is_running
from rayfed.experiments.config import Placement
from rayfed.experiments.machine_checks import Check, package_versions
from rayfed.records.storage import one_line


def ray_checks() -> Iterator[Check]:
    """Join the running cluster or start Ray, and yield the outcomes; Ray is shut down after the last one."""
    joined = cluster_is_running()
    what = "cluster" if joined else "Ray"
    try:
        import ray

        from rayfed.distributed import cluster

        cluster.connect(Placement(cpus=0), dashboard=False)
    except (HostLost, UsageError, ImportError) as error:
        remedy = "ray status shows the cluster; unset RAY_ADDRESS or run ray stop to do without it"
        yield Check(what, str(error), remedy if joined else "see the logs; placement.hosts=0 works without Ray")
        return
    amounts = ray.cluster_resources()
    resources = f"{amounts.get('CPU', 0):g} CPU, {amounts.get('GPU', 0):g} GPU"
    yield Check(what, f"{'joined' if joined else 'starts'}: {resources}")
    yield from _nodes()
    ray.shutdown()


def _nodes() -> Iterator[Check]:
    """Yield for every node whether a process starts there, and finds the same versions."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task, here, calls = ray.remote(package_versions), package_versions(), {}
    for node in [node for node in ray.nodes() if node["Alive"]]:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls[node["NodeManagerAddress"]] = task.options(num_cpus=0, scheduling_strategy=there).remote()
    for address, call in calls.items():
        try:
            found = ray.get(call, timeout=120)
        except ray.exceptions.RayError as error:
            remedy = "install rayfed in the same way on it"
            yield Check("node", f"{address}: no process can start ({one_line(error):.160})", remedy)
            continue
        different = [
            f"{name} {found[name]} (here {version})" for name, version in here.items() if found[name] != version
        ]
        remedy = "install the same versions on all nodes" if different else ""
        yield Check("node", f"{address}: {', '.join(different) or 'ready'}", remedy)
