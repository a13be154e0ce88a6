"""The processes of hosts, which start before there is a simulation and stay for the next one."""

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfed.distributed.ray_host import RayHost
from rayfed.distributed.user_modules import SentFiles


class HostPool:
    """Processes of hosts, by position. A process takes seconds to start, most of them to import torch.

    Args:
        cpus, gpus: What each process reserves.
        server_gpus: What the server has got of the GPU that the first process would reserve.
        group: The placement group of the trial, where the bundles from `first_bundle` on are for hosts.
        grouped: How many hosts are in these bundles, dealt to them in turn. Further hosts, and all without a group, use
            whatever the cluster has.
        keep: Whether the processes stay when a trial ends. Whoever made the pool then calls `close`.
        files: What the processes are told about the user's files.

    Attributes:
        name: What Ray's dashboard calls the processes, with their positions.
    """

    def __init__(
        self,
        *,
        cpus: float,
        gpus: float,
        group: PlacementGroup | None,
        server_gpus: float = 0.0,
        first_bundle: int = 0,
        grouped: int = 0,
        keep: bool = False,
        files: SentFiles | None = None,
    ):
        self._files, self.name = files, ""
        self.cpus, self.group, self._keep = cpus, group, keep
        self._gpus, self._server_gpus = gpus, server_gpus
        self._first_bundle, self._grouped = first_bundle, grouped
        self._actors: dict[int, Any] = {}

    def gpus(self, position: int) -> float:
        """Return what the process at `position` reserves of GPUs."""
        return self._gpus if position else round(self._gpus - self._server_gpus, 4)

    def actor(self, position: int) -> Any:
        """Return the process at `position`; it is started if there is none."""
        if position not in self._actors:
            options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus(position)}
            if self.group is not None and position < self._grouped:
                bundle = self._first_bundle + position % (len(self.group.bundle_specs) - self._first_bundle)
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=bundle
                )
            made: Any = ray.remote(RayHost)
            self._actors[position] = made.options(**options).remote(self._files, f"{self.name} host {position}")
        return self._actors[position]

    def drop(self, position: int) -> None:
        """Kill the process at `position`, so that `actor` starts another one."""
        if (actor := self._actors.pop(position, None)) is not None:
            ray.kill(actor)

    def release(self) -> None:
        """End the use by a trial."""
        if not self._keep:
            self.close()

    def close(self) -> None:
        """Kill all processes."""
        for position in list(self._actors):
            self.drop(position)
