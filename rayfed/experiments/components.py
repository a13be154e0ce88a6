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
_NESTED_DEFAULTS = {"algorithm": "fedavg", "compression": "none"}
"""The name of a nested component that is chosen without one."""
_BESIDE = {"model": ("head", "weights"), "algorithm": ("personal",), "data": (WITHOUT,)}
"""The options beside those of the class: a model has `weights`, one given in Python a `head`, a relative of FedAvg
`personal`, and every dataset `without`."""


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
        choices = [self]
        for value in self.options.values():
            if isinstance(value, Component):
                choices += value.choices
        return choices

    @property
    def values(self) -> dict[str, Any]:
        """The name and the given options as plain values."""
        values = {"name": self.name, **self.options}
        for key, value in self.options.items():
            if isinstance(value, Component):
                values[key] = value.values
        return values

    def build(self) -> Any:
        """Return an object of one of the kinds in `BASES`."""
        cls = class_of(self.kind, self.name or "", f"{self.kind}.name")
        options = dict(self.options)
        for key, value in self.options.items():
            if isinstance(value, Component):
                options[key] = value.build()
        if self.kind != "algorithm":
            return cls(**options)
        patterns = options.pop("personal", ())
        algorithm = cls(**options)
        if patterns:
            vars(algorithm)["personal_weights"] = tuple(patterns)
        return algorithm


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
    also = {}
    for key in _BESIDE.get(kind, ()):
        if key in options:
            also[key] = options.pop(key)
    if "personal" in also:
        also["personal"] = _globs(also["personal"], resolve(name, ALGORITHMS, where=where), f"{where}.personal")
    return Component(kind, name, _checked(kind, name, options, where) | also)


def _globs(given: Any, cls: type, where: str) -> list[str]:
    """Return the patterns of names in `algorithm.personal`: a list, or a string with commas."""
    if not hasattr(cls, "personal"):
        remedy = "use a method that derives from fedavg"
        if "base" in type_hints(cls):
            remedy = "give it to algorithm.base"
        raise UsageError(f"{where}: this method does not say which weights stay with the client; {remedy}")
    if isinstance(given, str):
        given = given.split(",")
    patterns: list[str] = checked(given, list[str], {}, where=where)
    return [pattern.strip() for pattern in patterns]


def _checked(kind: str, name: str, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of a component with the types that they are declared with."""
    named = f"{where}.name"
    if kind == "metrics":
        named = where
    cls = class_of(kind, name, named)
    if kind == "metrics" and name.startswith(PREFIX):
        return _checked_torch_metric(cls, name, options, where)
    if name not in KINDS[kind]:
        _check_class(kind, cls, f"{named}={name}")
    if kind == "partition" and _lacks_options(cls, options):
        return dict(options)  # the dataset may give the missing options
    nested_kinds = _nested_kinds(cls)
    values = dict(options)
    for key, nested_kind in nested_kinds.items():
        if key in options:
            values[key] = _choose_nested(nested_kind, options[key], f"{where}.{key}")
    also: tuple[str, ...] = ("name",)
    if kind == "data":
        also = (WITHOUT,)
    elif kind in ("partition", "model", "metrics"):
        also = ()
    return checked_options(cls, values, where=where, also=also, apart=list(nested_kinds))


def _checked_torch_metric(cls: Any, name: str, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of a metric of torchmetrics."""
    from rayfed.metrics.from_torchmetrics import torch_metric  # imports torch

    options = torch_metric(name.removeprefix(PREFIX), options)
    checked_options(cls, options, where=where)
    cls(**options).made()  # refuses what torchmetrics refuses
    return options


def _lacks_options(cls: type, options: Mapping[str, Any]) -> bool:
    """Return whether a required option of a dataclass is missing."""
    return any(is_required(field) and field.name not in options for field in dataclasses.fields(cls))


def _choose_nested(kind: str, given: Any, where: str) -> Component:
    """Return the component that an option of another one gives: its name, or a mapping with its options."""
    values = checked(given, str | dict, {}, where=where)
    if isinstance(values, str):
        values = {"name": values}
    return choose(kind, values, _NESTED_DEFAULTS[kind], where=where)


def _nested_kinds(cls: type) -> dict[str, str]:
    """Return the kinds of the options that are components, by their key."""
    kinds = {}
    for key, hint in type_hints(cls).items():
        module = getattr(_without_none(hint), "__module__", "")
        if module in _NESTED:
            kinds[key] = _NESTED[module]
    return kinds


def _without_none(hint: Any) -> Any:
    """Return the first type of a union that is not None, and any other annotation as it is."""
    for kind in typing.get_args(hint):
        if kind is not type(None):
            return kind
    return hint


def class_of(kind: str, name: str, where: str) -> Any:
    """Return the class of a component. Errors are those of `resolve`."""
    if kind == "metrics" and name.startswith(PREFIX):
        wrapper = "TorchMetric"
        if name.startswith(f"{PREFIX}segmentation."):
            wrapper = "TorchSegmentation"
        name = f"rayfed.metrics.from_torchmetrics:{wrapper}"
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
    options = dict(values)
    options.pop("name", None)
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
    texts = []
    module_text = sys.modules[cls.__module__].__doc__
    if kind == "algorithm" and module_text:
        texts.append(inspect.cleandoc(module_text))
    if not cls.__doc__.startswith(f"{cls.__name__}("):  # which dataclasses write
        texts.append(inspect.cleandoc(cls.__doc__))
    return "\n\n".join(texts)
