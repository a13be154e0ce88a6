"""The processes of a trial's hosts.

Importing torch takes most of the time in which a process starts. This module does not import it. So the server's
process asks for those of the hosts first, and all import it at the same time.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfed.core.machine import Process, importing
from rayfed.distributed.liveness import this_process
from rayfed.distributed.shared import Shared, opened
from rayfed.distributed.user_modules import SentFiles, install


def hide_unreserved_gpus() -> None:
    """Hide the GPUs of the machine from a process that has reserved none, before it imports torch.

    Ray shows all of them to such a process. A `.cuda()` in a user's code would use one that others have reserved.
    """
    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@contextmanager
def reserved_group(bundles: Sequence[Mapping[str, float]]) -> Iterator[PlacementGroup]:
    """Reserve what a trial needs until the end of this block. The place may not be there yet."""
    group = placement_group([dict(bundle) for bundle in bundles if bundle], strategy="PACK")
    try:
        yield group
    finally:
        remove_placement_group(group)


def placed(bundles: Sequence[Mapping[str, float]], group: PlacementGroup | None, position: int) -> dict[str, Any]:
    """Return the options of Ray for the process that takes the bundle at `position`; see `HostPool`."""
    bundle = bundles[position]
    options: dict[str, Any] = {"num_cpus": bundle.get("CPU", 0.0), "num_gpus": bundle.get("GPU", 0.0)}
    if group is None:
        return options
    index = -1  # anywhere in the group
    if bundle:
        index = sum(bool(before) for before in bundles[:position])  # an empty bundle is not part of the group
    options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return options


class RayHost:
    """The process of a host: calls of `HostMethods`."""

    def __init__(self, files: SentFiles | None = None, name: str = "") -> None:
        install(files)
        hide_unreserved_gpus()
        with importing():
            from rayfed.distributed.host_actor import HostMethods  # imports torch

        self._name = name
        self._methods = HostMethods()

    def __repr__(self) -> str:  # for Ray's dashboard
        return self._name

    def process(self) -> Process:
        """Return where this process runs."""
        return this_process()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of `HostMethods` returns. It gets the values of `Shared` arguments.

        An exception that no other process could unpickle is replaced, since Ray's substitute looks like a dead host.
        """
        from rayfed.distributed.host_actor import readable

        values = []
        for argument in arguments:
            if isinstance(argument, Shared):
                values.append(opened(argument))
            else:
                values.append(argument)
        try:
            return getattr(self._methods, method)(*values)
        except Exception as error:
            replacement = readable(error)
            if replacement is not error:
                raise replacement from error
            raise


class HostPool:
    """The processes of a trial's hosts. The next trial may use them again, since a process takes seconds to start.

    Args:
        bundles: What the trial reserved: the server's bundle, possibly empty, and one for each host.
        group: The placement group of the bundles that are not empty; without it, hosts take what the cluster has.
        files: The user's folders and modules, which each host installs.
        name: The name of the processes in Ray's dashboard, before their positions.

    Attributes:
        bundles: What each host has reserved.
        actors: The actors of the hosts, in the same order.
    """

    def __init__(
        self,
        bundles: Sequence[Mapping[str, float]],
        group: PlacementGroup | None,
        files: SentFiles | None = None,
        name: str = "",
    ):
        hosts = bundles[1:]
        actor_class: Any = ray.remote(RayHost)
        self.bundles = hosts  # the server may have a share of the first host's GPU
        self.actors = []
        for position in range(len(hosts)):
            options = placed(bundles, group, position + 1)
            actor = actor_class.options(**options).remote(files, f"{name} host {position}")
            self.actors.append(actor)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
