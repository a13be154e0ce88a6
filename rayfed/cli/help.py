"""Help on configuration keys, made from the declared options."""

import dataclasses
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from rayfed.core.registry import resolve
from rayfed.data import without
from rayfed.experiments.components import KINDS, description, summary
from rayfed.experiments.config import COMPONENTS, GROUPS, Config
from rayfed.experiments.published import PublishedOptions
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
    lines.append(_without())
    names = ", ".join(KINDS["metrics"])
    lines.append(_entry("metrics.NAME", "", f"also measure {names}; true, or its keys (rayfed list)"))
    return "\n".join(lines)


def space_keys() -> str:
    """Return one entry per key that only a search space has."""
    lines = [_SPACES, "keys of the search space:"]
    lines.append(_entry("seeds", "[seed]", "run every configuration with each of these seeds"))
    lines.append(_entry("arms", "[{}]", "list of variants to compare; each entry overrides the common keys"))
    lines += _entries(Search, "search.")
    what = "in an arm: values that somebody published for it, by column of the report, as [mean, sd] or mean"
    lines.append(_entry("published", "{}", what))
    return "\n".join([*lines, *_entries(PublishedOptions, "published.")])


def partition_keys() -> str:
    """Return one entry per key that decides which client holds which examples."""
    lines = ["keys of the configuration that have an effect:", *_names("data", "partition"), _without()]
    for field in dataclasses.fields(Config):
        if field.name in ("leave_out", "seed"):
            lines.append(_entry(field.name, default_text(field), field.metadata["help"]))
    return "\n".join(lines)


def _without() -> str:
    """Return the entry of the key that every dataset has."""
    return _entry(f"data.{without.KEY}", "[]", without.HELP)


def named_choices(kind: str, *, keys: bool = True) -> str:
    """Return one entry per name of a registry, with its keys if wanted; `kind` is one of `KINDS`."""
    lines = [f"{kind}.name=NAME"]
    if kind == "metrics":
        lines = ["metrics.NAME=true, or metrics.NAME.KEY=VALUE"]
    for name in KINDS[kind]:
        text = summary(kind, name)
        if kind == "metrics":
            lines.append(_entry(name, "", text))
        else:
            lines.append(f"  {name:20} {text}")
        if keys:
            lines += [f"    {line}" for line in _keys_of(kind, name)]
    if kind == "metrics":
        path = "classification.MulticlassMatthewsCorrCoef={num_classes: 10}"
        example = f"any metric of torchmetrics, such as metrics.{PREFIX}{path}"
        lines.append(_entry(f"{PREFIX}PATH", "", example))
    return "\n".join(lines)


def one_choice(kind: str, name: str) -> str:
    """Return what there is to know about one name of a registry: its description, its paper, and its keys."""
    if kind == "metrics":
        chosen = f"metrics.{name}=true"
    else:
        chosen = f"{kind}.name={name}"
    text = textwrap.indent(description(kind, name), "  ")
    lines = [chosen, ""]
    if text:
        lines += [text, ""]
    if kind == "algorithm":
        source = summary(kind, name)
        if source:
            lines.append(f"  source: {source}")
        lines += [*_traits_of(name), ""]
    keys = _keys_of(kind, name) or ["  no keys of its own"]
    if kind == "data":
        keys.append(_without())
    return "\n".join([*lines, *keys])


def _traits_of(name: str) -> list[str]:
    """Return the traits of an algorithm that differ from the defaults; for a wrapper, those with its default base."""
    cls = resolve(name, KINDS["algorithm"], where="algorithm")
    if isinstance(cls.traits, property):
        traits = cls().traits
    else:
        traits = cls.traits
    declared = traits.declared().items()
    words = "; ".join(f"{trait} = {_as_yaml(value)}" for trait, value in declared)
    if not words:
        return []
    return [textwrap.fill(f"traits: {words}", 118, initial_indent="  ", subsequent_indent=" " * 10)]


def keys_of(kind: str, name: str) -> dict[str, dict[str, str]]:
    """Return the keys of one name of a registry, each with its `default`, as YAML has it, and its `help`."""
    keys = {}
    for key, default, words in _declared_keys(*_declared_by(kind, name)):
        keys[key] = {"default": default, "help": words}
    return keys


def _keys_of(kind: str, name: str) -> list[str]:
    return list(_entries(*_declared_by(kind, name)))


def _declared_by(kind: str, name: str) -> tuple[Any, str]:
    """Return the class of one name of a registry, and how its keys begin."""
    if kind == "metrics":
        prefix = f"metrics.{name}."
    else:
        prefix = f"{kind}."
    return resolve(name, KINDS[kind], where=kind), prefix


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
    for kind in kinds or ("algorithm", *COMPONENTS):
        name = "fedavg"
        if kind != "algorithm":
            name = COMPONENTS[kind] or "null"
        words = f"{_MEANINGS[kind]}; rayfed list {kind} shows all, with their keys {kind}.KEY"
        yield _entry(f"{kind}.name", name, words)


def _entries(kind: Any, prefix: str) -> Iterator[str]:
    """Yield the entries of the options of a class, whose keys begin with `prefix`."""
    for key in _declared_keys(kind, prefix):
        yield _entry(*key)


def _declared_keys(kind: Any, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the default and the meaning of each option of a class."""
    for field in dataclasses.fields(kind):
        if field.init:
            yield f"{prefix}{field.name}", default_text(field), field.metadata.get("help", "")
            section = field.metadata.get("section")
            if section is not None:
                yield from _declared_keys(section, f"{prefix}{field.name}.")


def _entry(name: str, default: str, words: str) -> str:
    left = f"  {name}"
    if default:
        left += f" = {default}"
    if len(left) > 36:
        first = " " * 38
    else:
        first = left.ljust(38)
    text = textwrap.fill(words, 118, initial_indent=first, subsequent_indent=" " * 38)
    if len(left) > 36:
        return f"{left}\n{text}"
    return text
