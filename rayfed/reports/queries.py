"""Answers to questions of the reader: when a target is reached, and whether one method is better than another."""

import csv
import io
import textwrap

from rayfed.core.plain_table import plain_table
from rayfed.records.metric_names import is_fraction
from rayfed.reports.captions import average_words
from rayfed.reports.common_rounds import scored_clients_notes
from rayfed.reports.comparison import Comparison
from rayfed.reports.latex_table import latex_columns, latex_text
from rayfed.reports.markdown_table import markdown_columns
from rayfed.reports.pairs import Pairs
from rayfed.reports.read import Tables
from rayfed.reports.selection import TRIAL
from rayfed.reports.significance import p_value_text, stars
from rayfed.reports.target import check_target, rounds_to_target, target_table
from rayfed.reports.view import View, filter_rows

_GROUP = ["algorithm", "hyperparameters", "order"]


def target_text(tables: Tables, target: float, view: View, *, width: int) -> str:
    """Return a table of the rounds and gigabytes until the mean over clients reaches `target`.

    Args:
        tables: The tables of one experiment or of several.
        target: The value to reach.
        view, width: As in `render`.

    Raises:
        UsageError: a target that the metric cannot have, or no such values.
    """
    done = tables.done
    curves = tables.curves
    means = curves[curves["quantity"] == "mean"].merge(done[[*TRIAL, *_GROUP]], on=TRIAL)
    means = filter_rows(means, tables, view)
    parts = []
    for experiment, rows in means.groupby("experiment"):
        of_split, metric = str(rows["split"].iloc[0]), str(rows["metric"].iloc[0])
        check_target(target, metric)
        of_experiment = [table[table["experiment"] == experiment] for table in (tables.counts, tables.trials)]
        average = average_words(of_experiment[0], of_experiment[1], of_split, metric)
        side = "at least" if rows["higher_is_better"].iloc[0] else "at most"
        title = (
            f"{experiment}: first evaluated round whose {of_split} {metric}, {average}, is {side} {target:g}, and GB "
            "(10⁹ bytes, down and up, including the setup) sent until its end; mean ± sd over the runs that reached it"
        )
        table = target_table(rounds_to_target(rows, tables, target), done, width=width)
        parts += [textwrap.fill(title, width), table]
    parts += [textwrap.fill(note, width) for note in scored_clients_notes(tables.counts, means)]
    return "\n\n".join(parts)


def pairs_table(pairs: Pairs, *, width: int, format: str = "text") -> str:
    """Return a table of pairs of methods: differences, effect sizes, and p-values with Holm's correction.

    Args:
        pairs: The comparisons.
        width, format: As in `render`.
    """
    scores = pairs.scores
    what = f"{scores.split} {scores.metric}{', percentage points' if is_fraction(scores.metric) else ''}"
    title = f"{scores.experiment}: {'one pair' if pairs.best is None else 'all pairs'}, {what}, {scores.caption}"
    columns, notes = pairs_columns(pairs), pairs_notes(pairs)
    if format == "csv":
        out = io.StringIO()
        lines = [list(columns), *zip(*columns.values(), strict=True)]
        csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(lines)
        return out.getvalue().rstrip("\n")
    if format == "markdown":
        escaped = {name: [cell.replace("*", "\\*") for cell in cells] for name, cells in columns.items()}
        return "\n\n".join([title, markdown_columns(escaped), *(note.replace("*", "\\*") for note in notes)])
    if format == "latex":
        escaped = {latex_text(name): [latex_text(cell) for cell in cells] for name, cells in columns.items()}
        return latex_columns(
            escaped, " ".join([f"{title}.", *notes]), f"{scores.experiment}-pairs-{scores.split}-{scores.metric}"
        )
    table = plain_table(columns, left=("difference of",), width=width)
    return "\n\n".join([textwrap.fill(title, width), table, textwrap.fill(" ".join(notes), width)])


def pairs_columns(pairs: Pairs) -> dict[str, list[str]]:
    """Return the columns of the table of pairs as text."""
    scale, decimals = _scale(pairs.scores.metric)
    columns: dict[str, list[str]] = {
        name: [] for name in ("difference of", "mean", "95 % interval", "d_z", "wins", "p (t)", "p (Wilcoxon)", "")
    }
    for pair, p_t, p_wilcoxon in zip(pairs.comparisons, pairs.holm_t, pairs.holm_wilcoxon, strict=True):
        low, high, mean = (f"{x * scale:+.{decimals}f}" for x in (pair.low, pair.high, pair.difference))
        cells = (
            f"{pair.second} − {pair.first}",
            mean,
            f"{low} to {high}",
            "-" if pair.effect != pair.effect else f"{pair.effect:+.2f}",
            f"{pair.wins} of {len(pair.pairs)}",
            p_value_text(p_t),
            p_value_text(p_wilcoxon),
            stars(p_t),
        )
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    return columns


def pairs_notes(pairs: Pairs) -> list[str]:
    """Return what a reader of the table of pairs must know."""
    over = " or ".join(sorted({pair.over for pair in pairs.comparisons}, reverse=True))
    count, least = len(pairs.comparisons), min(len(pair.pairs) for pair in pairs.comparisons)
    corrected, before = (f", Holm-corrected for {count} pairs", " before the correction") if count > 1 else ("", "")
    notes = [
        f"Paired over {over}. p: two-sided{corrected}; *, **, ***: the t test is below 0.05, 0.01, 0.001. d_z: mean "
        "difference divided by its standard deviation. wins: pairs in which the first named has the greater value."
    ]
    if "clients" in over:
        notes.append("Where only one seed is common, the pairs are its clients, which do not cover other seeds.")
    if (p := 2.0 ** (1 - least)) * count >= 0.05:
        notes.append(f"With {least} pairs, Wilcoxon's p is at least {p:.2g}{before}.")
    if count == 1:
        notes.append(_each(pairs.comparisons[0], pairs.scores.metric))
    return [*notes, *pairs.notes]


def _each(pair: Comparison, metric: str) -> str:
    """Return a sentence with the difference of each pair."""
    scale, decimals = _scale(metric)
    differences = zip(pair.pairs, pair.differences, strict=True)
    each = ", ".join(f"{difference * scale:+.{decimals}f} ({number})" for number, difference in differences)
    return f"Differences by {pair.over[:-1]}: {each}."


def _scale(metric: str) -> tuple[int, int]:
    """Return what differences of a metric are multiplied with, and their decimals."""
    return (100, 2) if is_fraction(metric) else (1, 4)
