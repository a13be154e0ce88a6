"""Judge a claim by measured values: by those of each seed, or by means that were printed."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
from _tables import Claim

ONE_SEED = {True: "one seed, as claimed", False: "one seed, not as claimed"}
"""The answers of a single seed, which neither confirms nor refutes."""
ANSWERS = ("holds", "within one sd", "holds for some seeds", "does not hold", *ONE_SEED.values(), "not measured")


class Verdict(NamedTuple):
    """The answer to a claim (one of `ANSWERS`), the difference of its rows as text, and the number of seeds."""

    answer: str
    gap: str = ""
    seeds: int = 0


NOT_MEASURED = Verdict("not measured")


class Mean(NamedTuple):
    """A mean over `seeds`, of which `reached` have a finite value, and its sd, as printed.

    `off` and `sd_off` are the largest errors of the printed digits.
    """

    value: float
    off: float
    sd: float
    sd_off: float
    seeds: int
    reached: int


def by_column(judged: Iterable[tuple[Claim, str]]) -> list[str]:
    """Return a text per column, such as "AVG: A > B (+9.1±1.3), C (+2.0±0.5); D > C", from claims and differences."""
    columns: dict[str, dict[str, list[str]]] = {}
    for claim, gap in judged:
        less = claim.text.removeprefix(f"{claim.column}: {claim.more} > ")
        rows = columns.setdefault(claim.column, {})
        rows.setdefault(claim.more, []).append(f"{less}{f' ({gap})' * bool(gap)}")
    texts = []
    for column, rows in columns.items():
        compared = "; ".join(f"{more} > {', '.join(less)}" for more, less in rows.items())
        texts.append(f"{column}: {compared}")
    return texts


def verdict(claim: Claim, measured: pd.DataFrame) -> Verdict:
    """Judge `claim` by the differences between its rows at the same seed, and return their mean and sd."""
    by_row = measured[measured["column"] == claim.column].pivot(index="seed", columns="row", values="value")
    if not {claim.more, claim.less} <= set(by_row.columns):
        return NOT_MEASURED
    both = by_row[[claim.more, claim.less]].dropna()
    gaps = (both[claim.more] - both[claim.less]).round(12)
    gaps = gaps.fillna(0.0)  # infinity minus infinity: neither row reaches the target
    if not len(gaps):
        return NOT_MEASURED
    if len(gaps) == 1:
        gap = short(gaps.iloc[0], "+") if math.isfinite(gaps.iloc[0]) else ""
        return Verdict(_answer(gaps.iloc[0], None, claim.margin), gap, 1)
    if not all(map(math.isfinite, gaps)):  # a row that does not reach the target has no mean
        return _counted(int((gaps > claim.margin).sum()), len(gaps))
    gap = f"{short(gaps.mean(), '+')}±{short(gaps.std())}"
    return Verdict(_answer(gaps.mean(), gaps.std(), claim.margin), gap, len(gaps))


def verdict_of_means(claim: Claim, more: Mean, less: Mean) -> Verdict:
    """Judge `claim` by printed means of the same seeds; "not measured" if values that differ in the answer have them.

    The sd of the differences lies between the difference of both sds and their sum.
    """
    seeds = more.seeds
    if seeds != less.seeds:
        return NOT_MEASURED
    if seeds > 1 and {(more.reached, less.reached), (less.reached, more.reached)} & {(0, seeds)}:
        return _counted(seeds * (less.reached == seeds), seeds)
    if more.reached == less.reached == 0:
        return Verdict(_answer(0.0, 0.0 if seeds > 1 else None, claim.margin), "+0.0", seeds)
    if more.reached < seeds or less.reached < seeds:
        return NOT_MEASURED
    gap, off, sd_off = more.value - less.value, more.off + less.off, more.sd_off + less.sd_off
    sds = [None] if seeds == 1 else [max(0.0, abs(more.sd - less.sd) - sd_off), more.sd + less.sd + sd_off]
    answers = {_answer(bound, sd, claim.margin) for bound in (gap - off, gap + off) for sd in sds}
    return Verdict(answers.pop(), short(round(gap, 12), "+"), seeds) if len(answers) == 1 else NOT_MEASURED


def _answer(gap: float, sd: float | None, margin: float) -> str:
    """Return what a mean difference and the sd of the differences say; without an sd there is one seed."""
    if sd is None:
        return ONE_SEED[bool(gap > margin)]
    if abs(gap - margin) <= sd:
        return "within one sd"
    return "holds" if gap > margin else "does not hold"


def _counted(holding: int, seeds: int) -> Verdict:
    answer = {0: "does not hold", seeds: "holds"}.get(holding, "holds for some seeds")
    return Verdict(answer, f"{holding}/{seeds} seeds", seeds)


def short(value: float, sign: str = "") -> str:
    """Format with one decimal, as is usual for accuracies, or more where that would print zero."""
    return f"{value:{sign}.1f}" if value == 0 or abs(value) >= 0.1 else f"{value:{sign}.2g}"
