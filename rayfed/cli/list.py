"""`rayfed list`: list everything that can be chosen by name, the keys of a kind, or what is known about one name."""

import argparse
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rayfed.cli.arguments import packaged_spaces
from rayfed.cli.help import keys_of, named_choices, one_choice
from rayfed.cli.json_output import Document, add_json, write_json
from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.experiments.components import KINDS, summary

_ALSO = {"datasets": "data", "augmentations": "augment", "samplers": "sampling", "losses": "loss"}
_ALSO |= {f"{kind}s": kind for kind in KINDS}
_MORE = (
    "rayfed list KIND, such as algorithms, adds the keys of its names; rayfed list NAME, such as fedprox, explains one."
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List everything that can be chosen by name, and the packaged search spaces. With a kind, such as algorithms, "
        "list its names with their keys, defaults and meanings; with a name, such as fedprox, explain it."
    )
    kinds = ", ".join([*KINDS, "spaces"])
    add_json(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"kinds ({kinds}) and names")


def execute(options: argparse.Namespace) -> int:
    if options.json:
        return write_json("list", lambda: _document(options.names))
    if not options.names:
        choices = []
        for kind in KINDS:
            choices.append(named_choices(kind, keys=False))
        print("\n\n".join([*choices, _spaces(short=True), _MORE]))
    else:
        texts: list[str] = []
        for name in options.names:
            texts.extend(_texts(_ALSO.get(name, name)))
        print("\n\n".join(texts))
    return 0


def _document(names: Sequence[str]) -> Document:
    """Return a line on each name of some kinds, or of all without `names`; and of names, their keys."""
    content: dict[str, Any] = {}
    for given in names or [*KINDS, "spaces"]:
        name = _ALSO.get(given, given)
        if name == "spaces":
            content[name] = {space: " ".join(_opening(space)) for space in packaged_spaces()}
        elif name in KINDS:
            content[name] = {choice: summary(name, choice) for choice in KINDS[name]}
        else:
            content[name] = _explained(name)
    return 0, content


def _explained(name: str) -> dict[str, Any]:
    """Return what each kind with this name says of it: a summary and its keys; of a packaged space, its file.

    Raises:
        UsageError: No kind has it.
    """
    explained = {}
    for kind, table in KINDS.items():
        if name in table:
            explained[kind] = {"summary": summary(kind, name), "keys": keys_of(kind, name)}
    spaces = packaged_spaces()
    if name in spaces:
        explained["spaces"] = {"summary": " ".join(_opening(name)), "file": str(spaces[name])}
    if not explained:
        raise _unknown(name)
    return explained


def _texts(name: str) -> Iterator[str]:
    """Yield the list of a kind, or an explanation of each thing called `name`.

    Raises:
        UsageError: There is neither.
    """
    if name == "spaces":
        yield _spaces()
        return
    if name in KINDS:
        yield named_choices(name)
        return
    is_known = False
    for kind, table in KINDS.items():
        if name in table:
            yield one_choice(kind, name)
            is_known = True
    spaces = packaged_spaces()
    if name in spaces:
        yield "\n  ".join([f"rayfed sweep {name}", *_opening(name), str(spaces[name])])
    elif not is_known:
        raise _unknown(name)


def _unknown(name: str) -> UsageError:
    """Return the error for a word that is neither a kind nor a name."""
    names = itertools.chain(*KINDS.values())
    known = suggestion(name, [*KINDS, "spaces", *_ALSO, *names, *packaged_spaces()])
    if not known.startswith("did you mean"):
        known = f"kinds: {', '.join([*KINDS, 'spaces'])}"
    return UsageError(f"{name}: no such kind or name; {known}")


def _spaces(*, short: bool = False) -> str:
    """Return one entry per packaged space, with the comment that opens its file, or its beginning."""
    lines = ["rayfed sweep SPACE"]
    for name in packaged_spaces():
        if short:
            opening = " ".join(_opening(name))
            text = textwrap.shorten(opening, 97, placeholder=" …")
            lines.append(f"  {name:20} {text}")
        else:
            lines.append("\n      ".join([f"  {name}", *_opening(name)]))
    return "\n".join(lines)


def _opening(name: str) -> list[str]:
    """Return the comment that opens the file of a packaged space."""
    lines = packaged_spaces()[name].read_text(encoding="utf-8").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return [line.removeprefix("#").strip() for line in comments]
