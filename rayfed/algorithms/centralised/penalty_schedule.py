"""The schedule of a penalty's weight β in DomainBed: a small value for the first steps, then the full one.

The optimiser starts anew when β changes.
"""

from typing import Protocol

from rayfed.algorithm import Context


class Schedule(Protocol):
    """The options of a method with such a schedule."""

    @property
    def beta(self) -> float: ...

    @property
    def beta_start(self) -> float: ...

    @property
    def anneal(self) -> int: ...


def scheduled_beta(schedule: Schedule, ctx: Context) -> float:
    """Return β in the round of `ctx`."""
    return schedule.beta if ctx.round > schedule.anneal else schedule.beta_start


def beta_changes(schedule: Schedule, ctx: Context) -> bool:
    """Return whether β changes in the round of `ctx`."""
    return ctx.round == schedule.anneal + 1
