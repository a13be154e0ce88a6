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

_PLURALS = {"algorithms": "algorithm", "partitions": "partition", "models": "model", "augments": "augment"}
_PLURALS |= {"datasets": "data", "augmentations": "augment", "metric": "metrics", "space": "spaces"}
_PLURALS |= {"samplers": "sampling", "sampler": "sampling", "lr_schedules": "lr_schedule"}


_MORE = (
    "rayfed list KIND, such as algorithms, adds the keys of its names; rayfed list NAME, such as fedprox, explains one."
)
_WIDTH = 97  # characters of the description of a space in the overview


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List everything that can be chosen by name, and the packaged search spaces. With a kind, such as algorithms, "
        "list its names with their keys, defaults and meanings; with a name, such as fedprox, explain it."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"kinds ({', '.join([*KINDS, 'spaces'])}) and names")


def execute(options: argparse.Namespace) -> int:
    kinds = [*KINDS, "spaces"]
    if not options.names:
        print("\n\n".join([*(named_choices(kind, keys=False) for kind in KINDS), _spaces(short=True), _MORE]))
        return 0
    texts = [text for name in options.names for text in _texts(_PLURALS.get(name, name))]
    print(("\n\n" if set(options.names) - {*kinds, *_PLURALS} else "\n").join(texts))
    return 0


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
    kinds = [kind for kind, table in KINDS.items() if name in table]
    spaces = packaged_spaces()
    if not kinds and name not in spaces:
        known = [*KINDS, "spaces", *_PLURALS, *itertools.chain(*KINDS.values()), *spaces]
        raise UsageError(f"{name}: no such kind or name; {_nearest(name, known)}")
    yield from (one_choice(kind, name) for kind in kinds)
    if name in spaces:
        yield _space(name)


def _nearest(name: str, known: list[str]) -> str:
    near = suggestion(name, known)
    return near if near.startswith("did you mean") else f"kinds: {', '.join([*KINDS, 'spaces'])}"


def _spaces(*, short: bool = False) -> str:
    """Return one entry per packaged space, with the comment that opens its file, or its beginning."""
    lines = ["rayfed sweep SPACE"]
    for name in packaged_spaces():
        if short:
            lines.append(f"  {name:20} {textwrap.shorten(' '.join(_opening(name)), _WIDTH, placeholder=' …')}")
            continue
        lines += [f"  {name}", *(f"      {line}" for line in _opening(name))]
    return "\n".join(lines)


def _space(name: str) -> str:
    return "\n".join(
        [f"rayfed sweep {name}", *(f"  {line}" for line in _opening(name)), f"  {packaged_spaces()[name]}"]
    )


def _opening(name: str) -> list[str]:
    """Return the comment that opens the file of a packaged space."""
    lines = packaged_spaces()[name].read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#").strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
