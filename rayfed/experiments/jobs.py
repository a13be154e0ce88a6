"""The trials of a sweep as they travel to the processes that run them."""

from collections.abc import Mapping
from typing import Any, TypedDict

from rayfed.experiments.config import Config


class Job(TypedDict):
    """One trial to run: its name and its configuration, of which nothing is built that only the user's modules know.

    `arm` is the position of its arm. `identity` has the fields of its `Plan` that name what was given in Python. They
    are computed once, because another process has no source of functions that were written in a notebook.
    """

    trial: str
    config: Config
    identity: Mapping[str, Any]
    arm: int
