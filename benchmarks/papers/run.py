"""Measure a results table of a paper again and print it beside the published numbers.

    python benchmarks/papers/run.py --list
    python benchmarks/papers/run.py dbe_table2 --small
    python benchmarks/papers/run.py dbe_table2 --small --markdown resume=true     # print finished results again
    python benchmarks/papers/run.py dbe_table2 --rows 'Fed*' --rows DBE           # measure some rows now,
    python benchmarks/papers/run.py dbe_table2 resume=true                        # and the others later
    python benchmarks/papers/run.py dbe_table5 --settings FMNIST                  # one of its datasets
    python benchmarks/papers/run.py dbe_table5 --stored --markdown               # print what is stored, and run nothing

Without --small it runs the full configuration, which needs a GPU. Keys of a search space may follow as key=value.
What was measured is stored in the folder `measured`, from which index.py and figures.py make pages.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence

import pandas as pd
from _columns import in_points
from _stored import NEUTRAL, WHERE, load, store, store_curves
from _tables import Claim, PaperTable, measure, measure_curves, names, read_table
from _verdicts import by_column, verdict

from rayfed.api import run_sweep
from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_arguments
from rayfed.experiments.space import configurations
from rayfed.reports.read import read


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 some trials failed, 2 it could not be started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", metavar="TABLE", help="a table, see --list")
    parser.add_argument("--list", action="store_true", help="list the tables")
    parser.add_argument("--small", action="store_true", help="run the small form, for two CPU cores and ten minutes")
    parser.add_argument(
        "--rows", action="append", metavar="PATTERN", help="measure only rows that match, such as 'ADCOL*'"
    )
    parser.add_argument(
        "--settings", action="append", metavar="PATTERN", help="measure only settings (such as datasets) that match"
    )
    parser.add_argument("--stored", action="store_true", help="print what earlier calls have stored, and run nothing")
    parser.add_argument("--curves", action="store_true", help="also store the value after each evaluated round")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for docs/fidelity/")
    parser.add_argument(
        "values", nargs="*", metavar="key=value", help="keys of the search space; they override the file"
    )
    args = parser.parse_intermixed_args(arguments)
    if args.list or args.table is None:
        width = max(map(len, names()))
        for name in names():
            content = read_table(name).content
            print(f"{name:<{width}}  {content['title']}{' (no small form)' * isinstance(content['small'], str)}")
        return 0 if args.list else 2
    try:
        return _run(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    table, scale = read_table(args.table), "small" if args.small else "full"
    command = f"python benchmarks/papers/run.py {table.name}{' --small' if args.small else ''}"
    if args.stored:
        values, older = load(table, scale)
        for line in older:
            print(f"left out: {line}", file=sys.stderr)
        print(render(table, scale, values, command, markdown=args.markdown))
        return 0
    if args.settings:
        table = table.within(scale, args.settings)
    overrides = from_arguments(args.values)
    rows = table.space(scale, overrides, args.rows or ["*"])
    failed = run_sweep(rows, configurations(rows)).failed
    space = table.space(scale, overrides)  # all rows, also those that earlier calls measured
    first = Config.read(next(space.trials()))
    tables = read(first.results, first.experiment)
    values = measure(table, scale, space, tables)
    given = {key.split(".")[0] for key in overrides if key not in WHERE}
    if changed := sorted(given - NEUTRAL):
        print(f"not stored, since {', '.join(changed)} may change the values", file=sys.stderr)
    else:
        print(f"stored in {store(read_table(args.table), scale, values)}", file=sys.stderr)
        if args.curves:
            curves = measure_curves(table, scale, space, tables)
            print(f"stored in {store_curves(read_table(args.table), scale, curves)}", file=sys.stderr)
    options = [part for pattern in args.rows or () for part in ("--rows", pattern)]
    options += [part for pattern in args.settings or () for part in ("--settings", pattern)]
    options += [value for value in args.values if value.split("=")[0] not in ("resume", "results")]
    print(render(table, scale, values, shlex.join([*command.split(), *options]), markdown=args.markdown))
    return 1 if failed else 0


def render(table: PaperTable, scale: str, measured: pd.DataFrame, command: str, *, markdown: bool) -> str:
    """Return the table beside the published one, and the verdict on each claim."""
    seeds = sorted(set(measured["seed"]))
    counted = ", ".join(map(str, seeds)) or "none"
    plural = "" if len(seeds) == 1 else "s"
    head = [
        f"## {table.content['title']}" if markdown else f"{table.content['title']} ({table.content['paper']})",
        f"Published: {table.content['setting']}",
        f"Here: {table.content[scale]['note']} Seed{plural} {counted}.",
    ]
    lines = [*_lines(table, scale, measured)]
    arms = table.arms(scale)
    columns = table.columns_of(scale)
    claims = [c for c in table.claims if c.column in columns and c.more in arms and c.less in arms]
    verdicts = [(claim, *verdict(claim, measured)[:2]) for claim in claims]
    if markdown:
        return "\n\n".join([*head, _as_markdown(lines), _claims_as_markdown(verdicts), f"    {command}"])
    judged = [f"- {claim.text}: {answer}{f' ({gap})' * bool(gap)}" for claim, answer, gap in verdicts]
    return "\n\n".join([*head, _as_text(lines), "\n".join(["Claims:", *judged]), f"Command: {command}"])


def _lines(table: PaperTable, scale: str, measured: pd.DataFrame) -> list[list[str]]:
    lines, arms = [], table.arms(scale)
    for row in table.rows:
        if row not in arms and (scale == "small" or "arm" in table.rows[row]):
            continue
        for column, rule in table.columns_of(scale).items():
            values = measured[(measured["row"] == row) & (measured["column"] == column)]["value"]
            published = table.published(row, column)
            if not len(values) and published is None:
                continue
            points = in_points(rule)
            paper = "–" if published is None else _number(*published, "{:.2f}" if points else "{:.4g}")
            lines.append([row, column, paper, _here(values, points), _difference(values, published, points)])
    return lines


def _here(values: pd.Series, points: bool) -> str:
    """Return the mean over seeds; if some never reach the target, that of the others and their number."""
    if not len(values):
        return "–"
    reached = values[values < math.inf]
    spread = round(reached.std(), 12) if len(reached) > 1 else None
    text = _number(reached.mean(), spread, "{:.1f}" if points else "{:.3g}")
    if not len(reached):
        return "never"
    return text if len(reached) == len(values) else f"{text} [{len(reached)}/{len(values)}]"


def _difference(values: pd.Series, published: tuple[float, float | None] | None, points: bool) -> str:
    if not len(values) or published is None or math.isinf(published[0]):
        return "–"
    gap = values.mean() - published[0]
    return f"{gap:+.1f}" if points and math.isfinite(gap) else f"{gap:+.3g}" if math.isfinite(gap) else "–"


def _number(mean: float, sd: float | None, form: str) -> str:
    if math.isinf(mean):
        return "never"
    return "±".join(_plain(form.format(value)) for value in (mean, sd) if value is not None)


def _plain(number: str) -> str:
    """Return the same number without an exponent if it is large: 2330 for 2.33e+03."""
    return f"{float(number):.0f}" if "e+" in number else number


def _as_markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table with a line per row: what was measured and, in brackets, what was published."""
    columns = list(dict.fromkeys(column for _, column, *_ in lines))
    cells = {(row, column): here if paper == "–" else f"{here} ({paper})" for row, column, paper, here, _ in lines}
    body = [[row, *(cells.get((row, column), "") for column in columns)] for row in dict.fromkeys(x[0] for x in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [["row", *columns], ["---"] * (1 + len(columns)), *body])


def _claims_as_markdown(verdicts: Sequence[tuple[Claim, str, str]]) -> str:
    """Return a list with an entry per answer, in which claims are grouped by column and by the row that exceeds."""
    by_answer: dict[str, list[tuple[Claim, str]]] = {}
    for claim, answer, gap in verdicts:
        by_answer.setdefault(answer, []).append((claim, gap))
    return "\n".join(
        f"- **{answer.capitalize()}.** {' '.join(f'{text}.' for text in by_column(claims))}"
        for answer, claims in by_answer.items()
    )


def _as_text(lines: Sequence[Sequence[str]]) -> str:
    table = [["row", "column", "published", "here", "difference"], *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    padded = [[f"{text:<{width}}" for text, width in zip(line, widths, strict=True)] for line in table]
    return "\n".join("  ".join(line).rstrip() for line in padded)


if __name__ == "__main__":
    sys.exit(main())
