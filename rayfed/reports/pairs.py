"""The table of compared pairs: differences, intervals, effect sizes and p-values, and the stars beside the results."""

import csv
import math
import textwrap

import pandas as pd

from rayfed.core.records import is_fraction
from rayfed.core.terminal import plain_table
from rayfed.reports.comparison import Comparison, Pairs
from rayfed.reports.formats import markdown_columns
from rayfed.reports.significance import stars
from rayfed.reports.tables import Stars


def stars_against_best(pairs: Pairs) -> Stars:
    """Return the stars of each method by its difference from the best method; none unless all pairs were compared."""
    best = ""
    marks = {}
    p_values = {}
    for pair in pairs.comparisons:
        first, second = pair.orders
        if second == pairs.best:
            best = pair.second
            marks[first] = stars(pair.p_t)
            p_values[first] = _p_text(pair.p_t)
    return Stars(best, marks, p_values)


def pairs_table(pairs: Pairs, *, width: int, format: str = "text") -> str:
    """Return a table of pairs of methods: differences, effect sizes, and p-values with Holm's correction."""
    columns = pairs_columns(pairs)
    if format == "csv":
        text: str = pd.DataFrame(columns).to_csv(index=False, quoting=csv.QUOTE_ALL)
        return text.rstrip("\n")
    title = _title(pairs)
    notes = pairs_notes(pairs)
    if format == "markdown":
        escaped = {name: [_escaped(cell) for cell in cells] for name, cells in columns.items()}
        return "\n\n".join([title, markdown_columns(escaped), *map(_escaped, notes)])
    parts = [
        textwrap.fill(title, width),
        plain_table(columns, left=("difference of",), width=width),
        textwrap.fill(" ".join(notes), width),
    ]
    text = "\n\n".join(parts)
    if format == "latex":  # a comment
        return textwrap.indent(text, "% ")
    return text


def _title(pairs: Pairs) -> str:
    what = f"{pairs.split} {pairs.metric}"
    if is_fraction(pairs.metric):
        what += ", percentage points"
    which = "one pair" if pairs.best is None else "all pairs"
    return f"{pairs.experiment}: {which}, {what}, {pairs.caption}"


def _escaped(text: str) -> str:
    return text.replace("*", "\\*")


def pairs_columns(pairs: Pairs) -> dict[str, list[str]]:
    """Return the columns of the table of pairs as text."""
    columns: dict[str, list[str]] = {}
    for pair in pairs.comparisons:
        for name, cell in _cells(pair, pairs.metric).items():
            columns.setdefault(name, []).append(cell)
    return columns


def _cells(pair: Comparison, metric: str) -> dict[str, str]:
    low = _signed(pair.low, metric)
    high = _signed(pair.high, metric)
    effect = "-" if math.isnan(pair.effect) else f"{pair.effect:+.2f}"
    return {
        "difference of": f"{pair.second} − {pair.first}",
        "mean": _signed(pair.differences.mean(), metric),
        "95 % interval": f"{low} to {high}",
        "d_z": effect,
        "wins": f"{pair.wins} of {len(pair.differences)}",
        "p (t)": _p_text(pair.p_t),
        "p (Wilcoxon)": _p_text(pair.p_wilcoxon),
        "": stars(pair.p_t),
    }


def pairs_notes(pairs: Pairs) -> list[str]:
    """Return the notes below the table of pairs: what its columns mean, and what limits the tests."""
    count = len(pairs.comparisons)
    corrected = ""
    before = ""
    if count > 1:
        corrected = f", Holm-corrected for {count} pairs"
        before = " before the correction"
    notes = [
        f"Paired over seeds. p: two-sided{corrected}; *, **, ***: the t test is below 0.05, 0.01, 0.001. d_z: mean "
        "difference divided by its standard deviation. wins: pairs in which the first named has the greater value."
    ]
    least = min(len(pair.differences) for pair in pairs.comparisons)
    lowest_p = 2.0 ** (1 - least)
    if lowest_p * count >= 0.05:
        notes.append(f"With {least} pairs, Wilcoxon's p is at least {lowest_p:.2g}{before}.")
    if count == 1:
        notes.append(f"Differences by seed: {_differences_by_seed(pairs)}.")
    return [*notes, *pairs.notes]


def _differences_by_seed(pairs: Pairs) -> str:
    words = []
    for seed, difference in pairs.comparisons[0].differences.items():
        words.append(f"{_signed(difference, pairs.metric)} ({seed})")
    return ", ".join(words)


def _signed(difference: float, metric: str) -> str:
    """Return a difference of `metric` as text, in percentage points if it is shown in percent."""
    if is_fraction(metric):
        return f"{100 * difference:+.2f}"
    return f"{difference:+.4f}"


def _p_text(p_value: float) -> str:
    """Return a p-value with four decimals, and "-" for NaN."""
    if math.isnan(p_value):
        return "-"
    if p_value < 0.0001:
        return "<0.0001"
    return f"{p_value:.4f}"
