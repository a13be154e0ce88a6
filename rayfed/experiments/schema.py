"""A JSON schema of configurations and search spaces, from which editors complete and check YAML files.

It is made from the declarations in `rayfed.experiments.catalogue` and `rayfed.experiments.config`, without torch.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from rayfed.core.options import SPACE_KINDS
from rayfed.experiments.catalogue import KINDS, Entry, entry
from rayfed.experiments.config import COMPONENTS, GROUPS, Config
from rayfed.experiments.space import Search

Schema = dict[str, Any]

_BOUNDS = {"low": "minimum", "above": "exclusiveMinimum", "high": "maximum", "below": "exclusiveMaximum"}
_PLAIN: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": ["string", "number"]},  # a folder 2024 and a domain 2010 are taken as texts
    type(None): {"type": "null"},
    Any: {},
}
_SPACE: Schema = {"$ref": "#/definitions/space"}


def json_schema() -> Schema:
    """Return the schema (draft 7) of a configuration, with everything that a search space adds."""
    groups = {**_groups(), **{kind: _chosen(kind) for kind in ("algorithm", *COMPONENTS)}, "metrics": _metrics()}
    algorithm = {"algorithm": {"$ref": "#/definitions/algorithm"}}
    whole = {name: {"anyOf": [schema, _SPACE]} for name, schema in (groups | algorithm).items()}
    keys = {**_scalars(), **whole, **_dotted(groups)}
    own: Schema = {f"^({'|'.join(KINDS)})\\..+$": {}}  # options of the user's own classes, which only they know
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "rayfed: a configuration or a search space",
        "type": "object",
        "properties": {
            **keys,
            "seeds": {
                "description": "run every configuration with each of these seeds",
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "uniqueItems": True,
                "minItems": 1,
            },
            "arms": {
                "description": "variants to compare; each entry overrides the common keys",
                "type": "array",
                "items": {"$ref": "#/definitions/configuration"},
                "minItems": 1,
            },
            "search": _object(_options(Search, spaces=False)),
            **{f"search.{name}": schema for name, schema in _options(Search, spaces=False).items()},
        },
        "patternProperties": own,
        "additionalProperties": False,
        "definitions": {
            "space": _space(),
            "algorithm": groups["algorithm"],
            "configuration": {
                "type": "object",
                "properties": keys,
                "patternProperties": own,
                "additionalProperties": False,
            },
        },
    }


def _scalars() -> dict[str, Schema]:
    fields = (field for field in dataclasses.fields(Config) if field.metadata)
    hints = typing.get_type_hints(Config, localns={"Algorithm": Any, "Metric": Any})
    return {field.name: _option(field, hints[field.name]) for field in fields}


def _groups() -> dict[str, Schema]:
    return {name: _object(_options(group)) | {"description": _summary(group)} for name, group in GROUPS.items()}


def _metrics() -> Schema:
    choices = {}
    for name in KINDS["metrics"]:
        found = entry("metrics", name)
        on = {"anyOf": [{"type": ["boolean", "null"]}, _object(_options(found.declaration))]}
        choices[name] = {"description": found.summary, **on}
    return {"type": "object", "properties": choices, "patternProperties": {":": {}}, "additionalProperties": False}


def _chosen(kind: str) -> Schema:
    """Return the schema of a component: its name, and the options that go with the name."""
    entries = {name: entry(kind, name) for name in KINDS[kind]}
    options = {name: _entry_options(found) for name, found in entries.items()}
    every = {"name", *(key for keys in options.values() for key in keys)}
    no_name = [None] if COMPONENTS.get(kind, "") is None else []
    name = {
        "description": f"one of {', '.join(entries)}, or your own module:Name",
        "anyOf": [{"enum": [*entries, *no_name]}, {"type": "string", "pattern": ":"}, _SPACE],
    }
    rules: list[Schema] = [_rule({"type": "string", "pattern": "^[^:]*$"}, {"propertyNames": {"enum": sorted(every)}})]
    for one, keys in options.items():
        allowed = {"properties": keys, "propertyNames": {"enum": ["name", *keys]}}
        rules.append(_rule({"const": one}, allowed, required=["name"]))
    return {"type": "object", "properties": {"name": name, **_merged(options)}, "allOf": rules}


def _rule(name: Schema, then: Schema, *, required: Iterable[str] = ()) -> Schema:
    return {"if": {"properties": {"name": name}, "required": list(required)}, "then": then}


def _entry_options(found: Entry) -> dict[str, Schema]:
    nested = {key: {"anyOf": [{"type": "string"}, {"$ref": "#/definitions/algorithm"}, _SPACE]} for key in found.nested}
    return _options(found.declaration) | nested


def _merged(options: Mapping[str, Mapping[str, Schema]]) -> dict[str, Schema]:
    """Return the options of several things by name; where they differ, each of them is allowed."""
    merged: dict[str, list[Schema]] = {}
    for keys in options.values():
        for key, schema in keys.items():
            if schema not in merged.setdefault(key, []):
                merged[key].append(schema)
    return {key: schemas[0] if len(schemas) == 1 else {"anyOf": schemas} for key, schemas in merged.items()}


def _dotted(groups: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the keys of groups, components and metrics as they are written with dots."""
    dotted = {}
    for name, schema in groups.items():
        for key, value in schema["properties"].items():
            dotted[f"{name}.{key}"] = value
            if name == "metrics":
                options = value["anyOf"][-1]["properties"]
                dotted |= {f"{name}.{key}.{option}": inner for option, inner in options.items()}
    return dotted


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _options(declaration: type, *, spaces: bool = True) -> dict[str, Schema]:
    hints = typing.get_type_hints(declaration)
    fields = [field for field in dataclasses.fields(declaration) if field.init]
    return {field.name: _option(field, hints[field.name], spaces=spaces) for field in fields}


def _option(field: "dataclasses.Field[Any]", hint: Any, *, spaces: bool = True) -> Schema:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    allowed = [_value(kind, field.metadata) for kind in kinds]
    schema: Schema = {"anyOf": [*allowed, _SPACE]} if spaces else {"anyOf": allowed}
    if "help" in field.metadata:
        schema = {"description": field.metadata["help"], **schema}
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return schema if default is dataclasses.MISSING else {**schema, "default": default}


def _value(kind: Any, metadata: Mapping[str, Any]) -> Schema:
    if typing.get_origin(kind) in (list, tuple):
        return {"type": "array", "items": _value(typing.get_args(kind)[0], metadata)}
    if kind is dict or typing.get_origin(kind) is dict:
        return {"type": "object"}
    schema = dict(_PLAIN.get(kind, {}))
    if kind in (int, float):
        schema |= {_BOUNDS[name]: metadata[name] for name in _BOUNDS if name in metadata}
    if "choices" in metadata and kind is not type(None):
        schema = {"enum": list(metadata["choices"])}
    return schema


def _space() -> Schema:
    values = {"type": "array", "minItems": 1}
    bounds = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    one = {kind: values if kind in ("grid", "choice") else bounds for kind in SPACE_KINDS}
    return _object(one) | {"minProperties": 1, "maxProperties": 1, "description": "a space that a sweep searches"}


def _summary(group: type) -> str:
    return (group.__doc__ or "").partition("\n")[0].partition(": ")[2]
