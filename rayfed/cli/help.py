"""What `--help` and `--list` print, made from the declared options themselves."""

import dataclasses
import textwrap
import typing
from collections.abc import Iterator
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

_COMMAND = """\
usage: python -m rayfed.run [file.yaml …] [key=value …]
       python -m rayfed.sweep space.yaml [key=value …]
       python -m rayfed.report RESULTS
       python -m rayfed.partition [key=value …] [--save FILE] [--plot FILE.png]     who holds what
       python -m rayfed.run --list     the algorithms, datasets, partitions, models, augmentations and metrics

Later values win over earlier ones. Values are YAML: local.lr=0.05 evaluate.points=[global,trained] cohort=0.5
A name may also be your own module:Class, such as algorithm.name=mine:MyMethod for a file mine.py beside you.
"""


def usage() -> str:
    """The keys of the configuration, each with its default and its meaning."""
    lines = [_COMMAND]
    defaults = Config.read({})
    names = {key: getattr(defaults, key).name or "" for key in ("data", "partition", "model", "augment")}
    for key, name in {"algorithm": defaults.algorithm_name, **names}.items():
        lines.append(_line(f"{key}.name", name, f"which {key}; its own keys are {key}.<key> (see --list)"))
    for field in dataclasses.fields(Config):
        if field.metadata:
            lines.append(_line(field.name, _default(field), field.metadata["help"]))
    for name, kind in GROUPS.items():
        lines += _lines(kind, f"{name}.")
    lines.append(_line("metrics.NAME", "", f"measure also {', '.join(METRICS)}; true, or options (see --list)"))
    lines += ["", "In a sweep's file, or after it:"]
    lines.append(_line("seeds", "[seed]", "every configuration runs once with each"))
    lines.append(_line("arms", "[{}]", "list of what is compared: the keys in which one differs from the others"))
    lines += _lines(Search, "search.")
    return "\n".join(lines)


def listing() -> str:
    """Everything that can be chosen by name, with its own keys."""
    parts = []
    tables = {"algorithm": ALGORITHMS, "data": DATASETS, "partition": PARTITIONS, "model": MODELS, "augment": AUGMENTS}
    for key, table in tables.items():
        parts.append(f"{key}.name=…")
        for name in table:
            found = resolve(name, table, where=key)
            source = getattr(found, "reference", "") or (found.__doc__ or "").strip().splitlines()[0]
            parts.append(f"  {name:20} {source}")
            parts += [f"  {line}" for line in _lines(found, f"  {key}.")]
    parts.append("metrics.NAME=true, or metrics.NAME.<key>=…")
    for name in METRICS:
        found = resolve(name, METRICS, where="metrics")
        first = " ".join((found.__doc__ or "").split("\n\n")[0].split())
        parts += [_line(name, "", first), *(f"  {line}" for line in _lines(found, f"  metrics.{name}."))]
    return "\n".join(parts)


def _lines(kind: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        if field.init:
            yield _line(f"{prefix}{field.name}", _default(field), field.metadata.get("help", ""))


def _line(name: str, default: str, words: str) -> str:
    left = f"  {name}{f' = {default}' if default else ''}"
    first = " " * 38 if len(left) > 36 else left.ljust(38)
    text = textwrap.fill(words, 118, initial_indent=first, subsequent_indent=" " * 38)
    return f"{left}\n{text}" if len(left) > 36 else text


def _default(field: "dataclasses.Field[typing.Any]") -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "(needed)"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value.name if hasattr(value, "name") else str(value)
