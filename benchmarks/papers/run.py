"""A results table of a paper, measured anew and printed beside the published numbers.

    python benchmarks/papers/run.py --list
    python benchmarks/papers/run.py dbe_table2 --small
    python benchmarks/papers/run.py dbe_table2 --small --markdown resume=true     # print again what is done

Without --small it is the full configuration, which wants a GPU. Any key of a search space may follow as key=value.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

import pandas as pd
from _tables import Claim, PaperTable, measure, names, read_table

from rayfed.config import Config
from rayfed.errors import UsageError
from rayfed.results.read import read
from rayfed.sources import from_arguments
from rayfed.sweep import sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 some trials went wrong, 2 it could not be started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", metavar="TABLE", help="one of --list")
    parser.add_argument("--list", action="store_true", help="the tables there are")
    parser.add_argument("--small", action="store_true", help="the form for two CPU cores and ten minutes")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for docs/fidelity.md")
    parser.add_argument("values", nargs="*", metavar="key=value", help="of the search space; wins over the file")
    given = parser.parse_intermixed_args(arguments)
    if given.list or given.table is None:
        for name in names():
            print(f"{name:<22}{read_table(name).content['title']}")
        return 0 if given.list else 2
    try:
        return _run(given)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    table, scale = read_table(given.table), "small" if given.small else "full"
    space = table.space(scale, from_arguments(given.values))
    wrong = sweep(space)
    first = Config.read(next(space.trials()))
    tables = read(first.results, first.experiment)
    found = measure(table, scale, space, tables)
    command = f"python benchmarks/papers/run.py {table.name}{' --small' if given.small else ''}"
    shown = [value for value in given.values if value.split("=")[0] not in ("resume", "results")]
    print(render(table, scale, found, shlex.join([*command.split(), *shown]), markdown=given.markdown))
    return 1 if wrong else 0


def render(table: PaperTable, scale: str, found: pd.DataFrame, command: str, *, markdown: bool) -> str:
    """The table beside the published one, and what became of its claims."""
    seeds = sorted(set(found["seed"]))
    counted = ", ".join(map(str, seeds)) or "none"
    plural = "" if len(seeds) == 1 else "s"
    head = [
        f"{'## ' if markdown else ''}{table.content['title']} ({table.content['paper']})",
        f"Published: {table.content['setting']}",
        f"Here: {table.content[scale]['note']} Seed{plural} {counted}; ± is the sd over seeds.",
    ]
    lines = [*_lines(table, scale, found)]
    title = ["row", "column", "published", "here", "difference"]
    body = _as_markdown(title, lines) if markdown else _as_text(title, lines)
    arms = table.arms(scale)
    verdicts = [f"- {verdict(claim, found)}" for claim in table.claims if claim.more in arms and claim.less in arms]
    shown = f"    {command}" if markdown else f"Command: {command}"
    return "\n\n".join([*head, body, "Claims:\n" + ("\n" if markdown else "") + "\n".join(verdicts), shown])


def _lines(table: PaperTable, scale: str, found: pd.DataFrame) -> list[list[str]]:
    lines = []
    for row in table.arms(scale):
        for column in table.columns:
            values = found[(found["row"] == row) & (found["column"] == column)]["value"]
            published = table.published(row, column)
            if not len(values) and published is None:
                continue
            difference = f"{values.mean() - published[0]:+.1f}" if len(values) and published else "–"
            paper = "–" if published is None else _number(published[0], published[1], 2)
            here = _number(values.mean(), values.std() if len(values) > 1 else None, 1) if len(values) else "–"
            lines.append([row, column, paper, here, difference])
    return lines


def verdict(claim: Claim, found: pd.DataFrame) -> str:
    """Whether `claim` holds, by the differences between its rows at the same seed."""
    own = found[found["column"] == claim.column].pivot(index="seed", columns="row", values="value")
    if not {claim.more, claim.less} <= set(own.columns):
        return f"{claim.text}: not measured"
    gaps = (own[claim.more] - own[claim.less]).dropna()
    if not len(gaps):
        return f"{claim.text}: not measured"
    answer = "holds" if gaps.mean() > claim.margin else "does not hold"
    if len(gaps) == 1:
        return f"{claim.text}: {answer} (difference {gaps.mean():+.1f}; one seed)"
    noisy = ", within one sd" if abs(gaps.mean() - claim.margin) <= gaps.std() else ""
    return f"{claim.text}: {answer}{noisy} (difference {gaps.mean():+.1f} ± {gaps.std():.1f}, {len(gaps)} seeds)"


def _number(mean: float, sd: float | None, digits: int) -> str:
    text = f"{mean:.{digits}f}"
    return text if sd is None else f"{text} ± {sd:.{digits}f}"


def _as_markdown(title: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [title, ["---"] * len(title), *lines])


def _as_text(title: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [title, *lines]) for i in range(len(title))]
    padded = [[f"{text:<{width}}" for text, width in zip(line, widths, strict=True)] for line in [title, *lines]]
    return "\n".join("  ".join(line).rstrip() for line in padded)


if __name__ == "__main__":
    sys.exit(main())
