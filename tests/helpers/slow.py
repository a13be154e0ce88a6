"""Cases of a test of which `make test` runs some and `make test-all` the others."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def slow_but(fast: Collection[str], cases: Mapping[str, Any]) -> list[Any]:
    """Return parameters of a test with the ids of `cases`; those that are not in `fast` are marked as slow."""
    return [pytest.param(c, id=name, marks=() if name in fast else pytest.mark.slow) for name, c in cases.items()]
