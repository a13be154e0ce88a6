"""The sources of a configuration (YAML files, `key=value` arguments, mappings), merged into one nested dict."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayfed.core.errors import UsageError, shown
from rayfed.core.options import key_path
from rayfed.core.paths import expanded, read_file

SPACE_KEYS = ("seeds", "search", "arms", "published")
"""The keys that only a search space has; see `rayfed.experiments.space`."""
_MOST_REPEATED = 100_000  # values that the aliases of a document may add to it
_INVALID = (yaml.YAMLError, ValueError, TypeError, RecursionError)  # ValueError: a date such as 2001-99-99


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Reads YAML without traps: a key given twice is an error, and only decimal numbers are numbers.

    YAML 1.1 reads 010 as 8, 1_000 as 1000 and 12:30 as 750. Here they stay strings, because a folder may be called 010.
    """

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    raise yaml.MarkedYAMLError(
                        problem=f"found the key {key.value!r} twice", problem_mark=key.start_mark
                    )
                keys.add((key.tag, key.value))
        return node


_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, _NUMBERS.get(tag, pattern)) for tag, pattern in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _parsed(text: str, name: str) -> Any:
    """Return the content of a YAML document, which errors call `name`."""
    loader = _Loader(text)
    loader.name = name
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_aliases(root)
        return loader.construct_document(root)
    except (AttributeError, LookupError, TypeError) as error:  # PyYAML raises them for values that do not fit a tag
        raise yaml.YAMLError("a value does not fit its tag") from error
    finally:
        loader.dispose()


def _check_aliases(root: yaml.Node) -> None:
    """Raise an error of YAML's if aliases make a document without end, or far larger than its text.

    Nine lists of nine aliases each stand for nine to the ninth power of values, which fit in no memory.
    """
    sizes: dict[int, int | None] = {}  # by node, the values that it stands for; None while they are counted

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = None
            sizes[id(node)] = 1 + sum(map(size, _children(node)))
        counted = sizes[id(node)]
        if counted is None:
            raise yaml.MarkedYAMLError(problem="found a value that contains itself", problem_mark=node.start_mark)
        return counted

    if size(root) > len(sizes) + _MOST_REPEATED:
        raise yaml.MarkedYAMLError(
            problem=f"found aliases that repeat more than {_MOST_REPEATED:,} values", problem_mark=root.start_mark
        )


def _children(node: yaml.Node) -> list[yaml.Node]:
    """Return the nodes directly inside a node."""
    if isinstance(node, yaml.MappingNode):
        return list(itertools.chain(*node.value))  # pairs of a key and its value
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return []


def merged(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return one nested dict from mappings with nested or dotted keys.

    Later values take precedence, and nested mappings are merged key by key. If a source changes the `name` of a
    mapping, the options of the previous name are dropped, and those that the source gives are kept, in any order.

    Raises:
        UsageError: A key below a key that has a value.
    """
    tree: dict[str, Any] = {}
    for source in sources:
        for key, value in _names_first(source):
            _put(tree, key_path(key), value, key)
    return tree


def _names_first(source: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of `source`, each after the names around it, since a new name clears its mapping."""
    items = {str(key): value for key, value in source.items()}
    for key in list(items):
        path = key.split(".")
        for depth in range(len(path)):
            group = ".".join(path[:depth])
            inner = items.get(group)
            name = ".".join([*path[:depth], "name"])
            if name in items:
                yield name, items.pop(name)
            elif isinstance(inner, Mapping) and "name" in inner:
                yield name, inner["name"]
        if key in items:
            yield key, items[key]


def _put(tree: dict[str, Any], path: Sequence[str], value: Any, where: str) -> None:
    """Set the value at a path of keys; errors call the path `where`."""
    key, *rest = path
    if rest:
        inner = tree.setdefault(key, {})
        if isinstance(inner, str) and key == "base":  # algorithm.base=scaffold, then algorithm.base.server_lr=…
            inner = tree[key] = {"name": inner}
        if not isinstance(inner, dict):
            raise UsageError(f"{where}: {key} already has the value {shown(inner)}, so it can have no keys below it")
        _put(inner, rest, value, where)
    elif isinstance(value, Mapping):
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = tree[key] = {}
        for name, item in _names_first(value):
            _put(inner, key_path(f"group.{name}")[1:], item, f"{where}.{name}")
    elif key == "name" and tree.get("name", value) != value:
        tree.clear()
        tree["name"] = value
    else:
        tree[key] = value


def from_file(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        UsageError: There is no such file, or it does not hold a YAML mapping.
    """
    path = expanded(path)
    if not path.is_file():
        raise UsageError(f"{path}: no such file (give values as key=value)")
    try:
        content = _parsed(read_file(path).decode(), str(path))
    except _INVALID as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise UsageError(f"{path}: expected a mapping, got {type(content).__name__}")
    return dict(content)


def from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the dotted keys and values of `key=value` arguments.

    Values are read as YAML: 0.1, true, null and [1, 2] have their types. A value that contains " #" is a string, and
    has no comment.

    Raises:
        UsageError: An argument without "=", or a value that is not valid YAML.
    """
    values = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise UsageError(f"{argument}: expected key=value, such as algorithm.name=fedavg")
        try:
            values[key] = _argument_value(key, text)
        except _INVALID as error:
            raise UsageError(f"{argument}: {shown(text)} is not valid YAML: {' '.join(str(error).split())}") from error
    return values


def _argument_value(key: str, text: str) -> Any:
    """Return the value that the text of an argument stands for; None without text."""
    if text.startswith("*") or _has_comment(text):  # a pattern of names is no alias
        return text
    if not text:
        return None
    return _parsed(text, key)


def _has_comment(text: str) -> bool:
    """Return whether YAML would drop the end of `text` as a comment."""
    end = 0
    for token in yaml.scan(text):
        if not isinstance(token, yaml.StreamEndToken):
            end = token.end_mark.index
    return bool(text[end:].strip())
