"""Help on configuration keys, made from the declared options."""

import dataclasses
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from rayfed.algorithms import ALGORITHMS
from rayfed.augment import AUGMENTS
from rayfed.core.registry import resolve
from rayfed.data.partitions import PARTITIONS
from rayfed.data.sets import DATASETS
from rayfed.experiments.config import GROUPS, Config
from rayfed.experiments.space import Search
from rayfed.metrics.base import METRICS
from rayfed.models.build import MODELS

VALUES = """\
Later values override earlier ones. Values are YAML: local.lr=0.05 evaluate.points=[global,trained] cohort=0.5
A name may also be your own module:Class: algorithm.name=mine:MyMethod for a file mine.py in the working directory.
"""

_SPACES = """\
Instead of a value, a search space may have {grid: [...]}, {choice: [...]}, {uniform: [low, high]},
{loguniform: [low, high]} or {randint: [low, high]} (high included).
"""

KINDS: Mapping[str, Mapping[str, str]] = {
    "algorithm": ALGORITHMS,
    "data": DATASETS,
    "partition": PARTITIONS,
    "model": MODELS,
    "augment": AUGMENTS,
    "metrics": METRICS,
}
"""The keys under which something is chosen by name, each with its registry."""

_MEANINGS = {
    "algorithm": "algorithm",
    "data": "dataset",
    "partition": "division of the data among clients; null: by domain, or as the dataset prescribes",
    "model": "model",
    "augment": "augmentation of the training data",
}


def config_keys() -> str:
    """Return one entry per key of the configuration, with its default and its meaning."""
    lines = ["keys of the configuration:", *_names()]
    for field in dataclasses.fields(Config):
        if field.metadata:
            lines.append(_entry(field.name, default_text(field), field.metadata["help"]))
    for name, group in GROUPS.items():
        lines += _entries(group, f"{name}.")
    lines.append(_entry("metrics.NAME", "", f"also measure {', '.join(METRICS)}; true, or its keys (rayfed list)"))
    return "\n".join(lines)


def space_keys() -> str:
    """Return one entry per key that only a search space has."""
    lines = [_SPACES, "keys of the search space:"]
    lines.append(_entry("seeds", "[seed]", "run every configuration with each of these seeds"))
    lines.append(_entry("arms", "[{}]", "list of variants to compare; each entry overrides the common keys"))
    return "\n".join([*lines, *_entries(Search, "search.")])


def partition_keys() -> str:
    """Return one entry per key that decides which client holds which examples."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    leave_out, seed = fields["leave_out"], fields["seed"]
    entries = [
        _entry(leave_out.name, default_text(leave_out), leave_out.metadata["help"]),
        _entry(seed.name, default_text(seed), "seed of the run, which partition.seed=null follows"),
    ]
    return "\n".join(["keys of the configuration that have an effect:", *_names("data", "partition"), *entries])


def named_choices(kind: str) -> str:
    """Return one entry per name of a registry, with its keys; `kind` is one of `KINDS`."""
    lines = ["metrics.NAME=true, or metrics.NAME.KEY=VALUE" if kind == "metrics" else f"{kind}.name=NAME"]
    for name in KINDS[kind]:
        piece = resolve(name, KINDS[kind], where=kind)
        if kind == "metrics":
            lines.append(_entry(name, "", " ".join((piece.__doc__ or "").split("\n\n")[0].split())))
        else:
            lines.append(f"  {name:20} {getattr(piece, 'reference', '') or _first_line(piece)}")
        prefix = f"  metrics.{name}." if kind == "metrics" else f"  {kind}."
        lines += [f"  {entry}" for entry in _entries(piece, prefix)]
    return "\n".join(lines)


def default_text(field: "dataclasses.Field[typing.Any]") -> str:
    """Return the default of an option as YAML would have it, or "(needed)"."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "(needed)"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value.name if hasattr(value, "name") else str(value)


def _names(*kinds: str) -> Iterator[str]:
    """Yield the entries of the keys that choose something by name: of `kinds`, or of all."""
    defaults = Config.read({})
    for kind in kinds or [kind for kind in KINDS if kind != "metrics"]:
        name = defaults.algorithm_name if kind == "algorithm" else getattr(defaults, kind).name or "null"
        words = f"{_MEANINGS[kind]}; rayfed list {kind} shows all, with their keys {kind}.KEY"
        yield _entry(f"{kind}.name", name, words)


def _first_line(piece: Any) -> str:
    return (piece.__doc__ or "").strip().splitlines()[0]


def _entries(kind: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        if field.init:
            yield _entry(f"{prefix}{field.name}", default_text(field), field.metadata.get("help", ""))


def _entry(name: str, default: str, words: str) -> str:
    left = f"  {name}{f' = {default}' if default else ''}"
    first = " " * 38 if len(left) > 36 else left.ljust(38)
    text = textwrap.fill(words, 118, initial_indent=first, subsequent_indent=" " * 38)
    return f"{left}\n{text}" if len(left) > 36 else text
