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
from rayfed.reports.pairs import Pairs, one_pair, paired_scores
from rayfed.reports.read import Tables
from rayfed.reports.row_filter import filter_rows
from rayfed.reports.selection import TRIAL, aggregate_clients
from rayfed.reports.significance import p_value_text, stars
from rayfed.reports.summary import countable_trials
from rayfed.reports.target import check_target, rounds_to_target, target_table
from rayfed.reports.view import View

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
    done, _ = countable_trials(tables)
    curves = aggregate_clients(tables.metrics.merge(done[TRIAL], on=TRIAL))
    means = curves[curves["quantity"] == "mean"].merge(done[[*TRIAL, *_GROUP]], on=TRIAL)
    means = filter_rows(means, tables, view)
    parts = []
    for experiment, rows in means.groupby("experiment"):
        of_split, metric = str(rows["split"].iloc[0]), str(rows["metric"].iloc[0])
        check_target(target, metric)
        average = average_words(tables.metrics[tables.metrics["experiment"] == experiment], of_split, metric)
        side = "at least" if rows["higher_is_better"].iloc[0] else "at most"
        title = (
            f"{experiment}: first evaluated round whose {of_split} {metric}, {average}, is {side} {target:g}, and GB "
            "(10⁹ bytes, down and up, including the setup) sent until its end; mean ± sd over the runs that reached it"
        )
        table = target_table(rounds_to_target(rows, tables, target), done, width=width)
        parts += [textwrap.fill(title, width), table]
    parts += [textwrap.fill(note, width) for note in scored_clients_notes(tables.metrics, means)]
    return "\n\n".join(parts)


def comparison_text(tables: Tables, names: tuple[str, str], view: View, *, width: int) -> str:
    """Return the mean difference of the second of `names` from the first, over pairs, with its confidence interval.

    Args:
        tables: The tables of one experiment.
        names: Two algorithms, or algorithms with their hyperparameters as the table shows them.
        view, width: As in `render`.

    Raises:
        UsageError: a name that is not in the results, or trials that cannot be paired.
    """
    scores = paired_scores(tables, view)
    return textwrap.fill(_sentence(one_pair(scores, names), scores.metric, scores.split, scores.caption), width)


def pairs_table(
    pairs: Pairs, experiment: str, metric: str, split: str, caption: str, *, width: int, format: str = "text"
) -> str:
    """Return a table of all pairs of methods: differences, effect sizes, and p-values with Holm's correction.

    Args:
        pairs: The comparisons.
        experiment, metric, split, caption: What is compared; `caption` is that of `PairedScores`.
        width, format: As in `render`.
    """
    unit = ", percentage points" if is_fraction(metric) else ""
    title = f"{experiment}: all pairs, {split} {metric}{unit}, {caption}"
    columns, notes = pairs_columns(pairs, metric), pairs_notes(pairs)
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
        return latex_columns(escaped, " ".join([f"{title}.", *notes]), f"{experiment}-pairs-{split}-{metric}")
    table = plain_table(columns, left=("difference of",), width=width)
    return "\n\n".join([textwrap.fill(title, width), table, textwrap.fill(" ".join(notes), width)])


def pairs_columns(pairs: Pairs, metric: str) -> dict[str, list[str]]:
    """Return the columns of the table of all pairs as text."""
    scale, decimals = (100, 2) if is_fraction(metric) else (1, 4)
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
    """Return what a reader of the table of all pairs must know."""
    over = " or ".join(sorted({pair.over for pair in pairs.comparisons}, reverse=True))
    plural = "s" if len(pairs.comparisons) > 1 else ""
    sizes = sorted({len(pair.pairs) for pair in pairs.comparisons})
    notes = [
        f"Paired over {over}. p: two-sided, Holm-corrected for {len(pairs.comparisons)} pair{plural}; *, **, ***: the "
        "t test is below 0.05, 0.01, 0.001. d_z: mean difference divided by its standard deviation. wins: pairs in "
        "which the first named has the greater value."
    ]
    if "clients" in over:
        notes.append("Where only one seed is common, the pairs are its clients, which do not cover other seeds.")
    if (least := 2.0 ** (1 - sizes[0])) * len(pairs.comparisons) >= 0.05:
        notes.append(f"With {sizes[0]} pairs, Wilcoxon's p is at least {least:.2g} before the correction.")
    return [*notes, *pairs.notes]


def _sentence(result: Comparison, metric: str, split: str, caption: str) -> str:
    scale, unit, decimals = (100, ", percentage points", 2) if is_fraction(metric) else (1, "", 4)
    differences = ", ".join(
        f"{difference * scale:+.{decimals}f} ({pair})"
        for pair, difference in zip(result.pairs, result.differences, strict=True)
    )
    count = len(result.pairs)
    if result.over == "seeds":
        over = f"paired t over {count} seeds"
    else:
        over = f"paired t over the {count} clients of one seed, which does not cover other seeds"
    low, high, mean = (f"{x * scale:+.{decimals}f}" for x in (result.low, result.high, result.difference))
    effect = "" if result.effect != result.effect else f" Effect size d_z {result.effect:+.2f}."
    return (
        f"{result.second} − {result.first}, {split} {metric}{unit}, {caption}: {mean}, 95 % confidence "
        f"interval {low} to {high} ({over}). p = {p_value_text(result.p_t)} by the paired t test, "
        f"{p_value_text(result.p_wilcoxon)} by Wilcoxon's signed ranks.{effect} Differences by {result.over[:-1]}: "
        f"{differences}.{_left_out(result)}"
    )


def _left_out(result: Comparison) -> str:
    if not result.left_out:
        return ""
    seeds = ", ".join(map(str, result.left_out))
    return f" Only the seeds that both have count; left out: {seeds}."
