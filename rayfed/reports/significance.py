"""Tests of paired differences: Student's t and Wilcoxon's signed ranks, Holm's correction, and an effect size.

Sources: Wilcoxon (1945), "Individual comparisons by ranking methods"; Holm (1979), "A simple sequentially rejective
multiple test procedure"; Cohen (1988), "Statistical power analysis for the behavioral sciences", for d_z.
"""

import math
from collections.abc import Sequence

import numpy as np

EXACT_PAIRS = 12
"""Up to this many pairs, Wilcoxon's test goes through all signs, so that ties and zeros are exact, too."""
NOISE = 1e-12
"""Differences up to this are rounding errors of means, and count as none."""
LEVELS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))


def paired_t(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's paired t test.

    It is 1 if all differences are 0, and NaN if they are equal otherwise, because the test then has no error to divide
    by (accuracies on few examples often differ equally by chance).
    """
    from scipy import stats

    values = np.asarray(differences, float)
    if np.ptp(values) <= NOISE * max(1.0, float(np.abs(values).max())):
        return 1.0 if abs(float(values[0])) <= NOISE else math.nan
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def wilcoxon(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test; pairs without a difference are left out.

    With n pairs it cannot be below 2^(1 - n): 0.25 for three pairs, and above 0.05 up to five.
    """
    from scipy import stats

    values = np.round(np.asarray(differences, float), 12)  # what floating-point noise tells apart is tied
    values = values[values != 0]
    if not len(values):
        return 1.0
    if len(values) > EXACT_PAIRS:
        return float(stats.wilcoxon(values).pvalue)
    ranks = stats.rankdata(np.abs(values))
    signs = (np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1  # of all 2^n equally likely outcomes
    sums, middle = signs @ ranks, ranks.sum() / 2
    observed = abs(float(ranks[values > 0].sum()) - middle)
    return float((np.abs(sums - middle) >= observed - 1e-9).mean())


def cohens_dz(differences: Sequence[float]) -> float:
    """Return the mean difference divided by the standard deviation of the differences; NaN if that is 0."""
    values = np.asarray(differences, float)
    sd = float(values.std(ddof=1))
    return float(values.mean()) / sd if sd > NOISE else math.nan


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction for their number; NaN stays NaN and does not count."""
    order = sorted((index for index, p in enumerate(p_values) if not math.isnan(p)), key=lambda index: p_values[index])
    corrected = [math.nan] * len(p_values)
    largest = 0.0
    for position, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - position) * p_values[index]))
        corrected[index] = largest
    return corrected


def stars(p_value: float) -> str:
    """Return *** below 0.001, ** below 0.01, * below 0.05, and nothing otherwise."""
    return next((mark for level, mark in LEVELS if p_value < level), "")


def p_value_text(p_value: float) -> str:
    """Return a p-value with four decimals, and "-" where there is none."""
    if math.isnan(p_value):
        return "-"
    return "<0.0001" if p_value < 0.0001 else f"{p_value:.4f}"
