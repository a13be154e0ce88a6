"""Help on configuration keys, made from the declared options."""

import dataclasses
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from rayfed.core.registry import resolve
from rayfed.experiments.components import KINDS, description, summary
from rayfed.experiments.config import COMPONENTS, GROUPS, Config
from rayfed.experiments.space import Search
from rayfed.metrics import PREFIX

VALUES = """\
Later values override earlier ones. Values are YAML: local.lr=0.05 evaluate.points=[global,trained] cohort_share=0.5
A name may also be your own module:Class: algorithm.name=mine:MyMethod for a file mine.py in the working directory.
"""

_SPACES = """\
Instead of a value, a search space may have {grid: [...]}, {choice: [...]}, {uniform: [low, high]},
{loguniform: [low, high]} or {randint: [low, high]} (high included).
"""

_MEANINGS = {
    "algorithm": "algorithm",
    "data": "dataset",
    "partition": "division of the data among clients; null: by domain, or as the dataset prescribes",
    "model": "model",
    "loss": "loss that trains and scores models",
    "augment": "augmentation of the training data",
    "sampling": "rule by which clients are sampled for a round",
    "lr_schedule": "how local.lr and the method's own rates change over the rounds",
    "schedule": "when the server updates its model",
    "privacy": "clipping and noise for differential privacy of clients",
    "compression": "how clients shorten what they send",
    "attack": "what malicious clients do",
    "robust": "what the server takes in place of the mean",
}


def config_keys() -> str:
    """Return one entry per key of the configuration, with its default and its meaning."""
    lines = ["keys of the configuration:", *_names()]
    for field in dataclasses.fields(Config):
        if field.metadata:
            lines.append(_entry(field.name, default_text(field), field.metadata["help"]))
    for name, group in GROUPS.items():
        lines += _entries(group, f"{name}.")
    lines.append(
        _entry("metrics.NAME", "", f"also measure {', '.join(KINDS['metrics'])}; true, or its keys (rayfed list)")
    )
    return "\n".join(lines)


def space_keys() -> str:
    """Return one entry per key that only a search space has."""
    lines = [_SPACES, "keys of the search space:"]
    lines.append(_entry("seeds", "[seed]", "run every configuration with each of these seeds"))
    lines.append(_entry("arms", "[{}]", "list of variants to compare; each entry overrides the common keys"))
    return "\n".join([*lines, *_entries(Search, "search.")])


def partition_keys() -> str:
    """Return one entry per key that decides which client holds which examples."""
    fields = [field for field in dataclasses.fields(Config) if field.name in ("leave_out", "seed")]
    entries = [_entry(field.name, default_text(field), field.metadata["help"]) for field in fields]
    return "\n".join(["keys of the configuration that have an effect:", *_names("data", "partition"), *entries])


def named_choices(kind: str, *, keys: bool = True) -> str:
    """Return one entry per name of a registry, with its keys if wanted; `kind` is one of `KINDS`."""
    lines = ["metrics.NAME=true, or metrics.NAME.KEY=VALUE" if kind == "metrics" else f"{kind}.name=NAME"]
    for name in KINDS[kind]:
        text = summary(kind, name)
        lines.append(_entry(name, "", text) if kind == "metrics" else f"  {name:20} {text}")
        lines += [f"    {line}" for line in _keys_of(kind, name)] if keys else []
    if kind == "metrics":
        path = "classification.MulticlassMatthewsCorrCoef={num_classes: 10}"
        lines.append(_entry(f"{PREFIX}PATH", "", f"any metric of torchmetrics, such as metrics.{PREFIX}{path}"))
    return "\n".join(lines)


def one_choice(kind: str, name: str) -> str:
    """Return what there is to know about one name of a registry: its description, its paper, and its keys."""
    chosen = f"metrics.{name}=true" if kind == "metrics" else f"{kind}.name={name}"
    text = textwrap.indent(description(kind, name), "  ")
    lines = [chosen, "", *([text, ""] if text else [])]
    if kind == "algorithm":
        source = summary(kind, name)
        lines += [f"  source: {source}"] if source else []
        lines += [*_traits_of(name), ""]
    return "\n".join([*lines, *(_keys_of(kind, name) or ["  no keys of its own"])])


def _traits_of(name: str) -> list[str]:
    """Return the traits of an algorithm that differ from the defaults; for a wrapper, those with its default base."""
    cls = resolve(name, KINDS["algorithm"], where="algorithm")
    traits = cls().traits if isinstance(cls.traits, property) else cls.traits
    words = "; ".join(f"{trait} = {_as_yaml(value)}" for trait, value in traits.declared().items())
    if not words:
        return []
    return [textwrap.fill(f"traits: {words}", 118, initial_indent="  ", subsequent_indent=" " * 10)]


def _keys_of(kind: str, name: str) -> list[str]:
    prefix = f"metrics.{name}." if kind == "metrics" else f"{kind}."
    return list(_entries(resolve(name, KINDS[kind], where=kind), prefix))


def default_text(field: "dataclasses.Field[typing.Any]") -> str:
    """Return the default of an option as YAML would have it, or "(needed)"."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "(needed)"
    return _as_yaml(value)


def _as_yaml(value: Any) -> str:
    """Return a value as YAML would have it; an algorithm by its name."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return str(getattr(value, "name", value))


def _names(*kinds: str) -> Iterator[str]:
    """Yield the entries of the keys that choose something by name: of `kinds`, or of all."""
    for kind in kinds or [kind for kind in KINDS if kind != "metrics"]:
        name = "fedavg" if kind == "algorithm" else COMPONENTS[kind] or "null"
        words = f"{_MEANINGS[kind]}; rayfed list {kind} shows all, with their keys {kind}.KEY"
        yield _entry(f"{kind}.name", name, words)


def _entries(kind: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        if field.init:
            yield _entry(f"{prefix}{field.name}", default_text(field), field.metadata.get("help", ""))


def _entry(name: str, default: str, words: str) -> str:
    left = f"  {name}{f' = {default}' if default else ''}"
    first = " " * 38 if len(left) > 36 else left.ljust(38)
    text = textwrap.fill(words, 118, initial_indent=first, subsequent_indent=" " * 38)
    return f"{left}\n{text}" if len(left) > 36 else text
