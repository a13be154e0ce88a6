"""The table of compared pairs: differences, intervals, effect sizes and p-values, and the stars beside the results."""

import csv
import math
import textwrap

import pandas as pd

from rayfed.core.round_record import is_fraction
from rayfed.core.terminal import plain_table
from rayfed.reports.comparison import Comparison, Pairs
from rayfed.reports.formats import markdown_columns
from rayfed.reports.significance import PAIRED_T, RESAMPLED, TEST_ROWS, stars
from rayfed.reports.tables import Stars

_REASONS = {
    PAIRED_T: "paired t test over seeds",
    RESAMPLED: "corrected resampled t test (Nadeau and Bengio 2003), because each seed has a split of its own",
    TEST_ROWS: "t test over seeds and test examples (Obuchowski and Rockette 1995, by bootstrap), because the seeds "
    "share one split",
}


def stars_against(pairs: Pairs) -> Stars:
    """Return the stars of each method by its difference from the baseline, or from the best method of all pairs.

    There are none if only one pair was compared, or sites one by one.
    """
    against = ""
    marks = {}
    p_values = {}
    comparisons = pairs.comparisons
    if pairs.by is not None:
        comparisons = []
    for pair in comparisons:
        first, second = pair.orders
        if pairs.baseline is not None:
            against = pair.first
            other = second
        elif second == pairs.best:
            against = pair.second
            other = first
        else:
            continue
        marks[other] = stars(pair.p_value)
        p_values[other] = _p_text(pair.p_value)
    return Stars(against, _test_words(pairs), marks, p_values)


def _test_words(pairs: Pairs) -> str:
    methods = " or ".join(_methods(pairs))
    count = len(pairs.comparisons)
    if count == 1:
        return methods
    return f"{methods}, Holm-corrected for {count} comparisons"


def _methods(pairs: Pairs) -> list[str]:
    """Return the tests of the comparisons, each once."""
    return list(dict.fromkeys(pair.tested.method for pair in pairs.comparisons))


def pairs_table(pairs: Pairs, *, width: int, format: str = "text") -> str:
    """Return a table of pairs of methods: differences, effect sizes, and p-values with Holm's correction."""
    columns = pairs_columns(pairs)
    if format == "csv":
        text: str = pd.DataFrame(columns).to_csv(index=False, quoting=csv.QUOTE_ALL)
        return text.rstrip("\n")
    title = pairs_title(pairs)
    notes = pairs_notes(pairs)
    if format == "markdown":
        escaped = {}
        for name, cells in columns.items():
            escaped[name] = [_escaped(cell) for cell in cells]
        return "\n\n".join([title, markdown_columns(escaped), *map(_escaped, notes)])
    left = ["difference of"]
    if pairs.by is not None:
        left.append(pairs.by)
    remarks = " ".join(notes)
    parts = [
        textwrap.fill(title, width),
        plain_table(columns, left=left, width=width),
        textwrap.fill(remarks, width),
    ]
    text = "\n\n".join(parts)
    if format == "latex":  # a comment
        return textwrap.indent(text, "% ")
    return text


def pairs_title(pairs: Pairs) -> str:
    """Return what is compared, in one line."""
    what = f"{pairs.split} {pairs.metric}"
    if is_fraction(pairs.metric):
        what += ", percentage points"
    if pairs.baseline is not None:
        which = f"all against {pairs.baseline}"
    elif pairs.best is not None:
        which = "all pairs"
    else:
        which = "one pair"
    return f"{pairs.experiment}: {which}, {what}, {pairs.caption}"


def _escaped(text: str) -> str:
    return text.replace("*", "\\*")


def pairs_columns(pairs: Pairs) -> dict[str, list[str]]:
    """Return the columns of the table of pairs as text."""
    columns: dict[str, list[str]] = {}
    for pair in pairs.comparisons:
        for name, cell in _cells(pair, pairs).items():
            columns.setdefault(name, []).append(cell)
    return columns


def _cells(pair: Comparison, pairs: Pairs) -> dict[str, str]:
    cells = {"difference of": f"{pair.second} − {pair.first}"}
    if pairs.by is not None:
        cells[pairs.by] = str(pair.site)
    low = _signed(pair.tested.low, pairs.metric)
    high = _signed(pair.tested.high, pairs.metric)
    cells["mean"] = _signed(pair.tested.mean, pairs.metric)
    if math.isnan(pair.tested.low):
        cells["95 % interval"] = "-"
    else:
        cells["95 % interval"] = f"{low} to {high}"
    if math.isnan(pair.effect):
        cells["d_z"] = "-"
    else:
        cells["d_z"] = f"{pair.effect:+.2f}"
    cells["wins"] = f"{pair.wins} of {len(pair.differences)}"
    cells["p"] = _p_text(pair.p_value)
    cells["p (Wilcoxon)"] = _p_text(pair.p_wilcoxon)
    cells[""] = stars(pair.p_value)
    return cells


def pairs_notes(pairs: Pairs) -> list[str]:
    """Return the notes below the table of pairs: what its columns mean, and what limits the tests."""
    count = len(pairs.comparisons)
    corrected = ""
    before = ""
    if count > 1:
        corrected = f", Holm-corrected for {count} comparisons"
        before = " before the correction"
    tests = "; or ".join(_REASONS[method] for method in _methods(pairs))
    notes = [
        f"p: two-sided {tests}{corrected}; *, **, ***: below 0.05, 0.01, 0.001. d_z: mean difference over seeds "
        "divided by its standard deviation. wins: seeds at which the first named has the greater value."
    ]
    least = min(len(pair.differences) for pair in pairs.comparisons)
    lowest_p = 2.0 ** (1 - least)
    if lowest_p * count >= 0.05:
        notes.append(f"Wilcoxon's p is over seeds alone; with {least} pairs it is at least {lowest_p:.2g}{before}.")
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
