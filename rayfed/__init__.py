"""Simulation of federated learning on non-IID data, on Ray.

`rayfed.run(config)` runs one simulation and returns a `Result`, whose `model()` is the trained network. `rayfed.sweep`
compares many configurations, `rayfed.report` tabulates results, `rayfed.load` returns an earlier `Result`, and
`rayfed.read_results` the tables of a folder. `rayfed --help` lists the commands.

`rayfed.check` looks for mistakes in an algorithm that show only on a cluster or after a resume.

To write an algorithm, derive from `rayfed.Algorithm`, whose module `rayfed.algorithm` documents the hooks, or from
`rayfed.algorithms.fedavg.FedAvg`, and declare its hyperparameters with `rayfed.option`.
"""

from typing import TYPE_CHECKING, Any

from rayfed.core import torchvision_cpu

if TYPE_CHECKING:
    from rayfed.algorithm import Algorithm
    from rayfed.api import check, load, report, run, sweep
    from rayfed.core.errors import BadHook, Diverged, HostLost, StorageError, UsageError
    from rayfed.core.options import option
    from rayfed.data.clients import Client, Examples
    from rayfed.data.user_clients import Clients
    from rayfed.experiments.config import Config
    from rayfed.experiments.contract import Finding
    from rayfed.reports.read import read as read_results
    from rayfed.reports.read import read_events
    from rayfed.result import Report, Result, SweepResult

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "BadHook",
    "Client",
    "Clients",
    "Config",
    "Diverged",
    "Examples",
    "Finding",
    "HostLost",
    "Report",
    "Result",
    "StorageError",
    "SweepResult",
    "UsageError",
    "check",
    "load",
    "option",
    "read_events",
    "read_results",
    "report",
    "run",
    "sweep",
]

_ORIGINS = {
    "Algorithm": "rayfed.algorithm:Algorithm",
    "BadHook": "rayfed.core.errors:BadHook",
    "Client": "rayfed.data.clients:Client",
    "Clients": "rayfed.data.user_clients:Clients",
    "Config": "rayfed.experiments.config:Config",
    "Diverged": "rayfed.core.errors:Diverged",
    "Examples": "rayfed.data.clients:Examples",
    "Finding": "rayfed.experiments.contract:Finding",
    "HostLost": "rayfed.core.errors:HostLost",
    "Report": "rayfed.result:Report",
    "Result": "rayfed.result:Result",
    "StorageError": "rayfed.core.errors:StorageError",
    "SweepResult": "rayfed.result:SweepResult",
    "UsageError": "rayfed.core.errors:UsageError",
    "check": "rayfed.api:check",
    "load": "rayfed.api:load",
    "option": "rayfed.core.options:option",
    "read_events": "rayfed.reports.read:read_events",
    "read_results": "rayfed.reports.read:read",
    "report": "rayfed.api:report",
    "run": "rayfed.api:run",
    "sweep": "rayfed.api:sweep",
}

torchvision_cpu.install()


def __getattr__(name: str) -> Any:
    """Import a name of the public API at its first use, so that commands that need no torch start at once."""
    if name not in _ORIGINS:
        raise AttributeError(f"module 'rayfed' has no attribute {name!r}")
    import importlib

    module, _, attribute = _ORIGINS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
