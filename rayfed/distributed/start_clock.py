"""How long a process may take to start, where its node may have to come first."""

import time

from ray.util.placement_group import PlacementGroup, placement_group_table

AUTOSCALE_SECONDS = 1800.0
"""How long a cluster that grows may take to start a node."""


class StartClock:
    """Counts the seconds since a process was asked for.

    Args:
        limit: The seconds that it may take.
        group: The trial's placement group on a cluster that grows, where the wait for another node in place of a lost
            one does not count; else None.
    """

    def __init__(self, limit: float, group: PlacementGroup | None):
        self._limit, self._group = limit, group
        self._began = time.monotonic()
        self._lacking = 0.0  # of the seconds, those until a node was last seen to be missing

    @property
    def seconds(self) -> float:
        """The seconds so far, with the wait for a node."""
        return time.monotonic() - self._began

    def is_late(self) -> bool:
        """Return whether the process should have started."""
        seconds = self.seconds
        if seconds - self._lacking <= self._limit:
            return False
        if self._group is not None and seconds < AUTOSCALE_SECONDS and _lacks_node(self._group):
            self._lacking = seconds
            return False
        return True


def _lacks_node(group: PlacementGroup) -> bool:
    """Return whether a node of `group` was lost, and no other has room for what was reserved there."""
    state: str = placement_group_table(group).get("state", "")
    return state == "RESCHEDULING"
