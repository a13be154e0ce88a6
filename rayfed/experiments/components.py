"""Components that a configuration chooses by name. Their options are checked at once; the objects are built later.

The class of a component declares its options. Importing the class imports torch, which takes seconds.
"""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayfed.algorithms import ALGORITHMS
from rayfed.augment import AUGMENTS
from rayfed.channel import ATTACKS, COMPRESSIONS, PRIVACIES, RULES
from rayfed.core.errors import UsageError, shown
from rayfed.core.lr_schedule import SCHEDULES
from rayfed.core.options import checked, checked_options, is_required, type_hints, unquoted
from rayfed.core.registry import resolve
from rayfed.core.round_schedule import ROUND_SCHEDULES
from rayfed.data.partitions import PARTITIONS
from rayfed.data.sets import DATASETS
from rayfed.data.without import KEY as WITHOUT
from rayfed.data.without import names_in
from rayfed.losses import LOSSES
from rayfed.metrics import METRICS, PREFIX
from rayfed.models import MODELS
from rayfed.sampling import SAMPLERS

KINDS: Mapping[str, Mapping[str, str]] = {
    "algorithm": ALGORITHMS,
    "data": DATASETS,
    "partition": PARTITIONS,
    "model": MODELS,
    "loss": LOSSES,
    "augment": AUGMENTS,
    "sampling": SAMPLERS,
    "lr_schedule": SCHEDULES,
    "schedule": ROUND_SCHEDULES,
    "privacy": PRIVACIES,
    "compression": COMPRESSIONS,
    "attack": ATTACKS,
    "robust": RULES,
    "metrics": METRICS,
}
"""The keys under which something is chosen by name, each with its registry."""
BASES = {
    "algorithm": "rayfed.algorithm:Algorithm",
    "augment": "rayfed.augment.base:Augment",
    "sampling": "rayfed.sampling.base:Sampler",
    "lr_schedule": "rayfed.core.lr_schedule:LrSchedule",
    "privacy": "rayfed.channel.privacy:Privacy",
    "compression": "rayfed.channel.compression:Compression",
    "attack": "rayfed.channel.attacks:Attack",
    "robust": "rayfed.channel.robust:Rule",
    "metrics": "rayfed.metrics.base:Metric",
}
"""The classes from which components of a kind derive. Other kinds also take functions, or classes of any base."""

_NESTED = {"rayfed.algorithm": "algorithm", "rayfed.channel.compression": "compression"}
"""The modules of classes whose objects are options of other components, with their kind."""
_BESIDE = {"model": ("head", "weights"), "algorithm": ("personal",), "data": (WITHOUT,)}


@dataclass(frozen=True)
class Component:
    """A component chosen by name, with the options that were given.

    The options of the user's own data, partition, model and loss are not checked here. A nested algorithm or
    compression is a component as well.
    """

    kind: str
    name: str | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> "list[Component]":
        """This component, and those that its options choose."""
        nested = [value for value in self.options.values() if isinstance(value, Component)]
        return [self, *(choice for value in nested for choice in value.choices)]

    @property
    def values(self) -> dict[str, Any]:
        """The name and the given options as plain values."""
        plain = {key: value.values if isinstance(value, Component) else value for key, value in self.options.items()}
        return {"name": self.name, **plain}

    def build(self) -> Any:
        """Return an object of one of the kinds in `BASES`."""
        cls = class_of(self.kind, self.name or "", f"{self.kind}.name")
        options = {key: value.build() if isinstance(value, Component) else value for key, value in self.options.items()}
        patterns = options.pop("personal", ()) if self.kind == "algorithm" else ()
        built = cls(**options)
        if patterns:
            vars(built)["personal_weights"] = tuple(patterns)
        return built


def choose(kind: str, values: Mapping[str, Any], default: str | None, *, where: str = "") -> Component:
    """Return the component that `values` name, after checking its options as far as that needs no data.

    Args:
        kind: A key of `KINDS`.
        values: The options, and the name as `name`.
        default: The name without one in `values`.
        where: The prefix of the keys in error messages; `kind` by default.

    Raises:
        UsageError: The name is unknown, or an option is unknown, missing, of the wrong type or out of range.
    """
    where = where or kind
    options = dict(values)
    name = options.pop("name", default)
    if not isinstance(name, str) and (name, default) != (None, None):
        raise UsageError(f"{where}.name={shown(name)}: expected a string, got {type(name).__name__}{unquoted(name)}")
    if kind == "data" and WITHOUT in options:
        names = names_in(options)
        del options[WITHOUT]
        if names:
            options[WITHOUT] = list(names)
    if name is None or (":" in name and kind not in BASES):
        return Component(kind, name, options)
    # Beside the options of its class, a model has `weights`, one given in Python a `head`, a relative of FedAvg
    # `personal`, and every dataset `without`.
    also = {key: options.pop(key) for key in _BESIDE.get(kind, ()) if key in options}
    if kind == "algorithm" and also:
        also = {"personal": _globs(also["personal"], resolve(name, ALGORITHMS, where=where), f"{where}.personal")}
    return Component(kind, name, _checked(kind, name, options, where) | also)


def _globs(given: Any, cls: type, where: str) -> list[str]:
    """Return the patterns of names in `algorithm.personal`: a list, or a string with commas."""
    if not hasattr(cls, "personal"):
        to_base = "give it to algorithm.base" if "base" in type_hints(cls) else "use a method that derives from fedavg"
        raise UsageError(f"{where}: this method does not say which weights stay with the client; {to_base}")
    patterns: list[str] = checked(given.split(",") if isinstance(given, str) else given, list[str], {}, where=where)
    return [pattern.strip() for pattern in patterns]


def _checked(kind: str, name: str, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of a component with the types that they are declared with."""
    named = where if kind == "metrics" else f"{where}.name"
    cls = class_of(kind, name, named)
    if kind == "metrics" and name.startswith(PREFIX):
        from rayfed.metrics.from_torchmetrics import torch_metric  # imports torch

        options = torch_metric(name.removeprefix(PREFIX), options)
        checked_options(cls, options, where=where)
        cls(**options).made()  # refuses what torchmetrics refuses
        return options
    if name not in KINDS[kind]:
        _check_class(kind, cls, f"{named}={name}")
    required = [field.name for field in dataclasses.fields(cls) if is_required(field)]
    if kind == "partition" and any(key not in options for key in required):
        return dict(options)  # the dataset may give the missing options
    apart = _nested_kinds(cls)
    given = {}
    for key in (key for key in apart if key in options):
        named = checked(options[key], str | dict, {}, where=f"{where}.{key}")
        values = {"name": named} if isinstance(named, str) else named
        default = "fedavg" if apart[key] == "algorithm" else "none"
        given[key] = choose(apart[key], values, default, where=f"{where}.{key}")
    also = () if kind in ("partition", "model", "metrics") else ("name",)
    if kind == "data":
        also = (WITHOUT,)
    return checked_options(cls, {**options, **given}, where=where, also=also, apart=list(apart))


def _nested_kinds(cls: type) -> dict[str, str]:
    """Return the kinds of the options that are components, by their key."""
    modules = {}
    for key, hint in type_hints(cls).items():
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
        modules[key] = getattr(kinds[0], "__module__", "")
    return {key: _NESTED[module] for key, module in modules.items() if module in _NESTED}


def class_of(kind: str, name: str, where: str) -> Any:
    """Return the class of a component, whose errors are those of `resolve`."""
    if kind == "metrics" and name.startswith(PREFIX):
        of_masks = name.startswith(f"{PREFIX}segmentation.")
        name = f"rayfed.metrics.from_torchmetrics:{'TorchSegmentation' if of_masks else 'TorchMetric'}"
    return resolve(name, KINDS[kind], where=where)


def _check_class(kind: str, cls: Any, where: str) -> None:
    """Raise UsageError if a class of the user's own is no component of a kind."""
    base = resolve(BASES[kind], {}, where=kind)
    if not (isinstance(cls, type) and issubclass(cls, base) and dataclasses.is_dataclass(cls)):
        raise UsageError(f"{where}: must be a dataclass that derives from {base.__module__}.{base.__name__}")


def choose_partition(values: Mapping[str, Any], data: Component) -> Component:
    """Return the partition that `values` name; without a name, the default partition of the dataset."""
    if values.get("name") is not None or data.name not in DATASETS:
        return choose("partition", values, None)
    default = getattr(resolve(data.name or "", DATASETS, where="data.name"), "default_partition", "domains")
    options = {key: value for key, value in values.items() if key != "name"}
    if isinstance(default, str):  # otherwise the default depends on the options of the dataset
        options = choose("partition", options, default).options
    return Component("partition", None, options)


def summary(kind: str, name: str) -> str:
    """Return the paper of a component, or the first line of its description; of a metric, the first paragraph."""
    cls = resolve(name, KINDS[kind], where=kind)
    text = (cls.__doc__ or "").strip()
    if kind == "metrics":
        return " ".join(text.split("\n\n")[0].split())
    return str(getattr(cls, "reference", "") or text.partition("\n")[0])


def description(kind: str, name: str) -> str:
    """Return the docstring of a component's class, for an algorithm after the text of its module with the equations."""
    cls = resolve(name, KINDS[kind], where=kind)
    texts = [sys.modules[cls.__module__].__doc__] if kind == "algorithm" else []
    texts += [] if cls.__doc__.startswith(f"{cls.__name__}(") else [cls.__doc__]  # which dataclasses write
    return "\n\n".join(inspect.cleandoc(text) for text in texts if text)
