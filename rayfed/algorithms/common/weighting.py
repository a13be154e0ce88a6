"""The option of methods whose server weighs clients by their training examples or equally."""

from typing import Any

from rayfed.core.options import option


def weighting_option(default: str, note: str = "") -> Any:
    """Declare `weighting`; `note` says what is peculiar to the method."""
    help = f"weigh clients by their training examples, or equally{note}"
    return option(default, choices=("examples", "equal"), help=help)
