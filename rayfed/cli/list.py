"""`rayfed list`: list everything that can be chosen by name, with its keys, and the packaged search spaces."""

import argparse
import itertools

from rayfed.cli.help import KINDS, named_choices
from rayfed.cli.packaged import packaged_spaces
from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List everything that can be chosen by name, with its keys, defaults and meanings; then the packaged search "
        "spaces."
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"list only these: {', '.join([*KINDS, 'spaces'])}")


def execute(options: argparse.Namespace) -> int:
    kinds = [*KINDS, "spaces"]
    for kind in options.kinds:
        if kind not in kinds:
            raise UsageError(f"{kind}: no such list; {suggestion(kind, kinds)}")
    print("\n".join(_spaces() if kind == "spaces" else named_choices(kind) for kind in options.kinds or kinds))
    return 0


def _spaces() -> str:
    """Return one entry per packaged space, with the comment that opens its file."""
    lines = ["rayfed sweep SPACE"]
    for name, path in packaged_spaces().items():
        opening = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        lines += [f"  {name}", *(f"      {line.removeprefix('#').strip()}" for line in opening)]
    return "\n".join(lines)
