"""Tests of significance on paired differences, effect sizes, and the correction for several tests.

Sources: Wilcoxon (1945), "Individual comparisons by ranking methods"; Holm (1979), "A simple sequentially rejective
multiple test procedure"; Cohen (1988), "Statistical power analysis for the behavioral sciences", for d_z.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

NOISE = 1e-12
"""Differences up to this are rounding errors of means."""
_LEVELS = {0.001: "***", 0.01: "**", 0.05: "*"}


def paired_t(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's paired t test.

    It is 1 if all differences are 0. It is NaN if they all have another value, because the test then has no error to
    divide by; accuracies on few examples often differ equally by chance.
    """
    from scipy import stats

    values = np.asarray(differences, float)
    largest = max(1.0, float(np.abs(values).max()))
    if np.ptp(values) > NOISE * largest:
        return float(stats.ttest_1samp(values, 0.0).pvalue)
    if abs(float(values[0])) <= NOISE:
        return 1.0
    return math.nan


def wilcoxon(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test; pairs without a difference are left out.

    With n pairs it is at least 2^(1 - n): 0.25 for three pairs, and above 0.05 for up to five. It is exact for up to
    twelve pairs, ties included.
    """
    from scipy import stats

    values = np.round(np.asarray(differences, float), 12)  # so that differences tie in spite of rounding errors
    values = values[values != 0]
    if not values.size:
        return 1.0
    return float(stats.wilcoxon(values).pvalue)


def cohens_dz(differences: Sequence[float]) -> float:
    """Return the mean difference divided by the standard deviation of the differences; NaN if that is 0."""
    values = np.asarray(differences, float)
    sd = float(values.std(ddof=1))
    if sd <= NOISE:
        return math.nan
    return float(values.mean()) / sd


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction for their number, in which NaN does not count; it stays NaN."""
    ranked = pd.Series(p_values).dropna().sort_values()
    factors = np.arange(len(ranked), 0, -1)
    corrected = (ranked * factors).cummax().clip(upper=1.0)
    return list(corrected.reindex(range(len(p_values))))


def stars(p_value: float) -> str:
    """Return *** below 0.001, ** below 0.01, * below 0.05, and nothing otherwise."""
    for level, mark in _LEVELS.items():
        if p_value < level:
            return mark
    return ""
