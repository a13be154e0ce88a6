"""Simulation of federated learning on non-IID data, on Ray.

`rayfed.run(config)` runs one simulation and returns a `Result`, whose `model()` is the trained network. `rayfed.rounds`
runs it as a loop, one `Round` at a time. `rayfed.sweep` compares many configurations, and `rayfed.report` tabulates
results. `rayfed.load` returns an earlier `Result`, and `rayfed.read_results` the tables of a folder. `rayfed --help`
lists the commands.

`rayfed.check` looks for mistakes in an algorithm that show only on a cluster or after a resume.

To write an algorithm, derive from `rayfed.Algorithm`, whose module `rayfed.algorithm` documents the hooks, or from
`rayfed.algorithms.fedavg.FedAvg`, and declare its hyperparameters with `rayfed.option`.
"""

from typing import TYPE_CHECKING, Any

from rayfed.core import torchvision_cpu

if TYPE_CHECKING:
    from rayfed.algorithm import Algorithm
    from rayfed.api import check, load, report, rounds, run, sweep, trainable
    from rayfed.core.errors import BadHook, Diverged, HostLost, StorageError, UsageError
    from rayfed.core.options import option
    from rayfed.data.inputs import padded
    from rayfed.data.population import Client, Examples
    from rayfed.data.user_clients import Clients
    from rayfed.experiments.config import Config
    from rayfed.experiments.contract import Finding
    from rayfed.experiments.round import Round
    from rayfed.reports.read import read as read_results
    from rayfed.reports.read import read_events
    from rayfed.result import Report, Result, Rounds, SweepResult

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
    "Round",
    "Rounds",
    "StorageError",
    "SweepResult",
    "UsageError",
    "check",
    "load",
    "option",
    "padded",
    "read_events",
    "read_results",
    "report",
    "rounds",
    "run",
    "sweep",
    "trainable",
]

_NAMES = {
    "rayfed.algorithm": ["Algorithm"],
    "rayfed.api": ["check", "load", "report", "rounds", "run", "sweep", "trainable"],
    "rayfed.core.errors": ["BadHook", "Diverged", "HostLost", "StorageError", "UsageError"],
    "rayfed.core.options": ["option"],
    "rayfed.data.inputs": ["padded"],
    "rayfed.data.population": ["Client", "Examples"],
    "rayfed.data.user_clients": ["Clients"],
    "rayfed.experiments.config": ["Config"],
    "rayfed.experiments.contract": ["Finding"],
    "rayfed.experiments.round": ["Round"],
    "rayfed.reports.read": ["read_events", "read_results"],
    "rayfed.result": ["Report", "Result", "Rounds", "SweepResult"],
}

torchvision_cpu.install()


def __getattr__(name: str) -> Any:
    """Import a name of the public API at its first use, so that commands that need no torch start at once."""
    import importlib

    module, attribute = _origin(name)
    return getattr(importlib.import_module(module), attribute)


def _origin(name: str) -> tuple[str, str]:
    """Return the module of a public name, and the name that it has there."""
    module = next((module for module, names in _NAMES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'rayfed' has no attribute {name!r}")
    if name == "read_results":
        name = "read"
    return module, name


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
