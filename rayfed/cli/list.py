"""`rayfed list`: list everything that can be chosen by name, the keys of a kind, or what is known about one name."""

import argparse
import itertools
import textwrap
from collections.abc import Iterator

from rayfed.cli.arguments import packaged_spaces
from rayfed.cli.help import named_choices, one_choice
from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.experiments.components import KINDS

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
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"kinds ({', '.join([*KINDS, 'spaces'])}) and names")


def execute(options: argparse.Namespace) -> int:
    if not options.names:
        print("\n\n".join([*(named_choices(kind, keys=False) for kind in KINDS), _spaces(short=True), _MORE]))
    else:
        print("\n\n".join(text for name in options.names for text in _texts(_ALSO.get(name, name))))
    return 0


def _texts(name: str) -> Iterator[str]:
    """Yield the list of a kind, or an explanation of each thing called `name`.

    Raises:
        UsageError: There is neither.
    """
    kinds, spaces = [kind for kind, table in KINDS.items() if name in table], packaged_spaces()
    if name == "spaces":
        yield _spaces()
    elif name in KINDS:
        yield named_choices(name)
    elif not kinds and name not in spaces:
        near = suggestion(name, [*KINDS, "spaces", *_ALSO, *itertools.chain(*KINDS.values()), *spaces])
        known = near if near.startswith("did you mean") else f"kinds: {', '.join([*KINDS, 'spaces'])}"
        raise UsageError(f"{name}: no such kind or name; {known}")
    else:
        yield from (one_choice(kind, name) for kind in kinds)
        if name in spaces:
            yield "\n".join([f"rayfed sweep {name}", *(f"  {line}" for line in _opening(name)), f"  {spaces[name]}"])


def _spaces(*, short: bool = False) -> str:
    """Return one entry per packaged space, with the comment that opens its file, or its beginning."""
    lines = ["rayfed sweep SPACE"]
    for name in packaged_spaces():
        if short:
            lines.append(f"  {name:20} {textwrap.shorten(' '.join(_opening(name)), 97, placeholder=' …')}")
        else:
            lines += [f"  {name}", *(f"      {line}" for line in _opening(name))]
    return "\n".join(lines)


def _opening(name: str) -> list[str]:
    """Return the comment that opens the file of a packaged space."""
    lines = packaged_spaces()[name].read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#").strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
