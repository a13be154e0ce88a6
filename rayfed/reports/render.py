"""The report in several formats: tables of the results with captions, and notes on what does not count."""

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.paths import absolute, lasting
from rayfed.records.storage import is_url, join
from rayfed.reports.formats import LATEX_PACKAGES, latex_table, markdown_table, text_table
from rayfed.reports.published import published_values
from rayfed.reports.read import Tables, read_by_data, read_events
from rayfed.reports.sections import Section, reported_rows, sections
from rayfed.reports.summary import DEFAULT_VIEW, NOT_SCORED, Summary, View, nothing_to_show, summarise
from rayfed.reports.tables import Stars

FORMATS = ("text", "markdown", "latex", "csv")
_FAILURES_SHOWN = 5


def render(
    folder: str | Path,
    experiment: str | None = None,
    view: View = DEFAULT_VIEW,
    *,
    width: int | None = None,
    format: str = "text",
    stars: Mapping[str, Stars] | None = None,
    tables: Tables | None = None,
) -> str:
    """Return the report on `experiment`, or on every experiment in `folder`.

    Args:
        view: What to show. Without a split, the tables on the split ood follow.
        width: The width of the text in characters; None: that of the terminal.
        format: One of `FORMATS`; csv has the values under every rule.
        stars: The stars of significance by experiment.
        tables: What `read_by_data(folder, experiment, select=view.select)` returned, if the caller has it.

    Raises:
        UsageError: There are no results, or none of that metric, point, split or rule.
    """
    if tables is None:
        tables = read_by_data(folder, experiment, select=view.select)
    width = width or shutil.get_terminal_size((100, 24)).columns
    summary = summarise(tables)
    location = _parquet_location(folder, tables)
    failures = failure_notes(tables.trials)
    if summary.rows.empty:
        return "\n".join([nothing_to_show(tables), *summary.notes, *failures, location])
    _check_scored(summary, tables, view)
    if format == "csv":
        return _as_csv(summary, tables, view)
    published = published_values(folder, set(tables.trials["experiment"]))
    shown = sections(tables, summary, view, stars, published)
    absent = _absent_experiments(summary, shown, view)
    notes = [*absent, *summary.notes, *restart_notes(folder, experiment), *failures]
    if format == "latex":
        return _as_latex(shown, notes)
    if format == "markdown":
        return _as_markdown(shown, notes)
    return _as_text(shown, notes, location, width)


def _check_scored(summary: Summary, tables: Tables, view: View) -> None:
    scored = set(summary.rows["metric"])
    if view.metric is None and scored.isdisjoint(tables.criteria.values()):
        raise UsageError(NOT_SCORED)


def reported_values(folder: str | Path, experiment: str | None, view: View = DEFAULT_VIEW) -> pd.DataFrame:
    """Return the values under every rule; no rows if no trial is done yet. The errors are those of `render`."""
    tables = read_by_data(folder, experiment, select=view.select)
    summary = summarise(tables)
    if summary.rows.empty:
        return pd.DataFrame()
    _check_scored(summary, tables, view)
    return _values(summary, tables, view)


def _values(summary: Summary, tables: Tables, view: View) -> pd.DataFrame:
    rows = reported_rows(summary, tables, view)
    return rows.drop(columns=["order", "higher_is_better", "chosen_by_default"])


def _as_csv(summary: Summary, tables: Tables, view: View) -> str:
    return str(_values(summary, tables, view).to_csv(index=False)).rstrip("\n")


def _as_latex(shown: Iterable[Section], notes: Sequence[str]) -> str:
    parts = [LATEX_PACKAGES]
    for section in shown:
        legend = " ".join(filter(None, [section.legend, _marks(section), *section.coverage]))
        code = latex_table(section.table, f"{section.title}.", section.label, legend)
        comments = [note for note in section.notes if note not in section.coverage]
        parts.append("\n".join([*_comments(comments), code]))
    return "\n\n".join([*parts, *_comments(notes)])


def _marks(section: Section) -> str:
    """Return what bold and underlined numbers of a table in LaTeX are; empty for one row, which has none."""
    if len(section.table.labels) < 2:
        return ""
    return section.emphasis or "Bold and underlined: the best and the second best of each column."


def _comments(texts: Iterable[str]) -> list[str]:
    return [f"% {text}" for text in texts if text]


def _as_markdown(shown: Iterable[Section], notes: Sequence[str]) -> str:
    parts = []
    for section in shown:
        title = section.title.replace("*", "\\*")
        words = filter(None, [section.legend, section.emphasis])
        legend = " ".join(words).replace("*", "\\*")
        parts += [title, markdown_table(section.table), legend, *section.notes]
    return "\n\n".join(filter(None, [*parts, *notes]))


def _as_text(shown: Iterable[Section], notes: Sequence[str], location: str, width: int) -> str:
    parts = []
    for section in shown:
        parts.append(textwrap.fill(section.title, width))
        parts.append(text_table(section.table, width=width))
        for words in (section.legend, *section.notes):
            if words:
                parts.append(textwrap.fill(words, width))
    lines = [textwrap.fill(note, width) for note in notes]
    parts.append("\n".join([*lines, location]))
    return "\n\n".join(parts)


def failure_notes(trials: pd.DataFrame) -> list[str]:
    """Return a note on the trials that failed or diverged, with their errors."""
    failed = trials[trials["status"].isin(["failed", "diverged"])]
    failed = failed.fillna({"error": "no error recorded"})
    words = []
    for (status, error), group in failed.groupby(["status", "error"], sort=False):
        others = ""
        if len(group) > 1:
            others = f" and {len(group) - 1} more"
        first = group["trial"].iloc[0]
        words.append(f"{first}{others} {status} ({error})")
    if not words:
        return []
    shown = words[:_FAILURES_SHOWN]
    if len(words) > len(shown):
        shown.append(f"and {len(words) - len(shown)} other errors")
    return [f"Not finished: {'; '.join(shown)}."]


def restart_notes(folder: str | Path, experiment: str | None) -> list[str]:
    """Return a note on the trials that went back to a checkpoint because a process was lost, and how often."""
    events = read_events(folder, experiment)
    restarts = events.loc[events["event"] == "trial restarted", "trial"]
    counts = restarts.value_counts()
    words = []
    for trial, count in counts.head(_FAILURES_SHOWN).items():
        times = "1 time"
        if count != 1:
            times = f"{count} times"
        words.append(f"{trial} {times}")
    if not words:
        return []
    if len(counts) > len(words):
        words.append(f"and {len(counts) - len(words)} other trials")
    return [f"Restarted: {'; '.join(words)}."]


def _absent_experiments(summary: Summary, shown: Iterable[Section], view: View) -> list[str]:
    """Return a note on the experiments that have finished trials and no table."""
    has_table = {section.experiment for section in shown}
    names = sorted(set(summary.rows["experiment"]) - has_table)
    if not names:
        return []
    metric = view.metric or "values of their metric"
    what = " ".join(filter(None, [view.split, metric]))
    return [f"Experiments not shown, because they have no {what} at the model scored: {', '.join(names)}."]


def _parquet_location(folder: str | Path, tables: Tables) -> str:
    recorded = set(tables.trials["experiment"])
    names = sorted(recorded | set(tables.counts["experiment"]))
    place = str(folder)
    if not is_url(place):
        place = absolute(lasting(folder)).as_posix()
    name = "EXPERIMENT"
    if names:
        name = names[0]
    path = f"{join(place, name)}/metrics"
    return f"Parquet: pandas.read_parquet({path!r}), and likewise rounds and trials"  # repr: a name may hold a quote
