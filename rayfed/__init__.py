"""rayfed: simulation of federated learning on non-IID data, on Ray.

In Python: `rayfed.run(config) -> Result`. On the command line: `python -m rayfed.run`, `rayfed.sweep`, `rayfed.report`.
To write a method: `rayfed.algorithm` is the interface, `rayfed.algorithms.fedavg` what most start from.
"""

from typing import Any

__all__ = ["Client", "Config", "Examples", "Result", "UsageError", "run"]


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is first used: `rayfed.report` starts without waiting for torch."""
    homes = {
        "Client": "rayfed.data.population",
        "Examples": "rayfed.data.population",
        "Config": "rayfed.experiments.config",
        "Result": "rayfed.api",
        "UsageError": "rayfed.core.errors",
        "run": "rayfed.api",
    }
    if name not in homes:
        raise AttributeError(f"module 'rayfed' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(homes[name]), name)
