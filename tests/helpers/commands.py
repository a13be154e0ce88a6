"""The program's commands as functions, and a sweep without Ray."""

from collections.abc import Callable, Sequence

import rayfed
from rayfed.cli.main import main
from rayfed.experiments.space import Space
from rayfed.launch import Swept

TWO_CLIENTS = {
    "data": {"domains": ["plain", "font"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"batch_size": 8, "lr": 0.1},
}
"""A configuration of two clients whose rounds take milliseconds."""


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the command `rayfed NAME` as a function from its arguments to its exit code."""
    return lambda arguments: main([name, *arguments])


def run_trials(space: Space, configs: Sequence[rayfed.Config]) -> Swept:
    """Run the trials of a sweep in this process, one after the other; return that none failed."""
    for config in configs:
        rayfed.run(config)
    return Swept(0, None)
