"""A results table of a paper, measured anew and printed beside the published numbers.

    python benchmarks/papers/run.py --list
    python benchmarks/papers/run.py dbe_table2 --small
    python benchmarks/papers/run.py dbe_table2 --small --markdown resume=true     # print again what is done
    python benchmarks/papers/run.py dbe_table2 --rows 'Fed*' --rows DBE           # a part of it now,
    python benchmarks/papers/run.py dbe_table2 resume=true                        # and the rest later

Without --small it is the full configuration, which wants a GPU. Any key of a search space may follow as key=value.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence

import pandas as pd
from _columns import in_points
from _tables import Claim, PaperTable, measure, names, read_table

from rayfed.core.errors import UsageError
from rayfed.distributed.tune import sweep
from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_arguments
from rayfed.results.read import read


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 some trials went wrong, 2 it could not be started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", metavar="TABLE", help="one of --list")
    parser.add_argument("--list", action="store_true", help="the tables there are")
    parser.add_argument("--small", action="store_true", help="the form for two CPU cores and ten minutes")
    parser.add_argument("--rows", action="append", metavar="PATTERN", help="only rows of such names, as in 'ADCOL*'")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for docs/fidelity.md")
    parser.add_argument("values", nargs="*", metavar="key=value", help="of the search space; wins over the file")
    given = parser.parse_intermixed_args(arguments)
    if given.list or given.table is None:
        width = max(map(len, names()))
        for name in names():
            content = read_table(name).content
            print(f"{name:<{width}}  {content['title']}{' (no small form)' * isinstance(content['small'], str)}")
        return 0 if given.list else 2
    try:
        return _run(given)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    table, scale = read_table(given.table), "small" if given.small else "full"
    overrides = from_arguments(given.values)
    wrong = sweep(table.space(scale, overrides, given.rows or ["*"]))
    space = table.space(scale, overrides)  # with the rows of earlier calls
    first = Config.read(next(space.trials()))
    tables = read(first.results, first.experiment)
    found = measure(table, scale, space, tables)
    command = f"python benchmarks/papers/run.py {table.name}{' --small' if given.small else ''}"
    shown = [part for pattern in given.rows or () for part in ("--rows", pattern)]
    shown += [value for value in given.values if value.split("=")[0] not in ("resume", "results")]
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
    columns = table.columns_of(scale)
    claims = [c for c in table.claims if c.column in columns and c.more in arms and c.less in arms]
    verdicts = [f"- {verdict(claim, found)}" for claim in claims]
    shown = f"    {command}" if markdown else f"Command: {command}"
    return "\n\n".join([*head, body, "Claims:\n" + ("\n" if markdown else "") + "\n".join(verdicts), shown])


def _lines(table: PaperTable, scale: str, found: pd.DataFrame) -> list[list[str]]:
    lines, arms = [], table.arms(scale)
    for row in table.rows:
        if row not in arms and (scale == "small" or "arm" in table.rows[row]):
            continue
        for column, rule in table.columns_of(scale).items():
            values = found[(found["row"] == row) & (found["column"] == column)]["value"]
            published = table.published(row, column)
            if not len(values) and published is None:
                continue
            points = in_points(rule)
            paper = "–" if published is None else _number(*published, "{:.2f}" if points else "{:.4g}")
            lines.append([row, column, paper, _here(values, points), _difference(values, published, points)])
    return lines


def _here(values: pd.Series, points: bool) -> str:
    """The mean over seeds; where some seeds never came to the target, that of the others and how many they are."""
    if not len(values):
        return "–"
    reached = values[values < math.inf]
    spread = round(reached.std(), 12) if len(reached) > 1 else None
    text = _number(reached.mean(), spread, "{:.1f}" if points else "{:.3g}")
    if not len(reached):
        return "never"
    return text if len(reached) == len(values) else f"{text} ({len(reached)} of {len(values)} seeds)"


def _difference(values: pd.Series, published: tuple[float, float | None] | None, points: bool) -> str:
    if not len(values) or published is None or math.isinf(published[0]):
        return "–"
    gap = values.mean() - published[0]
    return f"{gap:+.1f}" if points and math.isfinite(gap) else f"{gap:+.3g}" if math.isfinite(gap) else "–"


def verdict(claim: Claim, found: pd.DataFrame) -> str:
    """Whether `claim` holds, by the differences between its rows at the same seed."""
    own = found[found["column"] == claim.column].pivot(index="seed", columns="row", values="value")
    if not {claim.more, claim.less} <= set(own.columns):
        return f"{claim.text}: not measured"
    both = own[[claim.more, claim.less]].dropna()
    gaps = (both[claim.more] - both[claim.less]).round(12)
    gaps = gaps.fillna(0.0)  # infinity less infinity: neither comes to the target
    if not len(gaps):
        return f"{claim.text}: not measured"
    if not all(map(math.isfinite, gaps)):
        holding = int((gaps > claim.margin).sum())
        return f"{claim.text}: holds in {holding} of {len(gaps)} seeds (in some, a row never comes to the target)"
    answer = "holds" if gaps.mean() > claim.margin else "does not hold"
    if len(gaps) == 1:
        return f"{claim.text}: {answer} (difference {_short(gaps.mean(), '+')}; one seed)"
    gap = _short(gaps.mean(), "+")
    noisy = ", within one sd" if abs(gaps.mean() - claim.margin) <= gaps.std() else ""
    return f"{claim.text}: {answer}{noisy} (difference {gap} ± {_short(gaps.std())}, {len(gaps)} seeds)"


def _short(value: float, sign: str = "") -> str:
    """One digit after the point, as is usual for accuracies, and more where that would leave nothing."""
    return f"{value:{sign}.1f}" if value == 0 or abs(value) >= 0.1 else f"{value:{sign}.2g}"


def _number(mean: float, sd: float | None, form: str) -> str:
    if math.isinf(mean):
        return "never"
    return form.format(mean) if sd is None else f"{form.format(mean)} ± {form.format(sd)}"


def _as_markdown(title: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [title, ["---"] * len(title), *lines])


def _as_text(title: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [title, *lines]) for i in range(len(title))]
    padded = [[f"{text:<{width}}" for text, width in zip(line, widths, strict=True)] for line in [title, *lines]]
    return "\n".join("  ".join(line).rstrip() for line in padded)


if __name__ == "__main__":
    sys.exit(main())
