"""Tests of significance on paired differences, effect sizes, and the correction for several tests.

All tests divide a mean difference by its standard error and look the quotient up in Student's t. They differ in what
the standard error covers:

- `PAIRED_T`: the seeds alone. What it finds holds for the split at hand and its test examples.
- `RESAMPLED`: seeds with a split each. Their training parts overlap, and so their differences are correlated; the
  correction takes the correlation to be the share of the test part (Nadeau and Bengio 2003, "Inference for the
  generalization error", section 4.2).
- `TEST_ROWS`: the seeds and the test examples that they share, as for several readers of the same cases (Obuchowski and
  Rockette 1995; degrees of freedom by Hillis 2007, "A comparison of denominator degrees of freedom methods for multiple
  observer ROC analysis").

Further sources: Wilcoxon (1945), "Individual comparisons by ranking methods"; Holm (1979), "A simple sequentially
rejective multiple test procedure"; Cohen (1988), "Statistical power analysis for the behavioral sciences", for d_z.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

PAIRED_T = "paired t"
RESAMPLED = "corrected resampled t"
TEST_ROWS = "seeds and test examples"
NOISE = 1e-12
"""Differences up to this are rounding errors of means."""
_LEVELS = {0.001: "***", 0.01: "**", 0.05: "*"}
_CONFIDENCE = 0.95


class Tested(NamedTuple):
    """The outcome of a test on paired differences.

    Attributes:
        method: `PAIRED_T`, `RESAMPLED` or `TEST_ROWS`.
        mean: The mean difference.
        low, high: Its 95 % confidence interval.
        p_value: The two-sided p-value. It is NaN if there is a difference, and no error to divide it by: accuracies on
            few examples often differ equally by chance.
    """

    method: str
    mean: float
    low: float
    high: float
    p_value: float


def paired_t(differences: Sequence[float] | np.ndarray) -> Tested:
    """Return Student's paired t test of n differences, with n - 1 degrees of freedom."""
    values = np.asarray(differences, float)
    variance = _variance(values) / len(values)
    return _tested(PAIRED_T, values, variance, len(values) - 1)


def corrected_resampled_t(differences: Sequence[float] | np.ndarray, test_ratio: float) -> Tested:
    """Return Nadeau and Bengio's corrected resampled t test of n differences, with n - 1 degrees of freedom.

    The variance of the mean is (1/n + `test_ratio`) times that of the differences (their Eq. 7), in place of 1/n times.

    Args:
        differences: A difference for each split.
        test_ratio: The size of the test part divided by that of the other parts.
    """
    values = np.asarray(differences, float)
    variance = _variance(values) * (1 / len(values) + test_ratio)
    return _tested(RESAMPLED, values, variance, len(values) - 1)


def over_seeds_and_rows(differences: Sequence[float] | np.ndarray, covariance: float) -> Tested:
    """Return the test of n differences by seed, all measured on the same test examples.

    Test examples that favour a method favour it at all seeds. So the variance of the mean is V = s²/n + c, with the
    variance s² of the differences and their covariance c, which another draw of the test examples would cause
    (Obuchowski and Rockette 1995, with seeds for readers). A negative c counts as 0. The degrees of freedom are
    V² / ((s²/n)² / (n - 1)) (Hillis 2007, Eq. 8).

    Args:
        differences: A difference for each seed.
        covariance: The mean covariance of the differences of two seeds, such as that of `bootstrap_covariance`. If it
            is NaN, there is neither an interval nor a p-value.
    """
    values = np.asarray(differences, float)
    if math.isnan(covariance):
        return Tested(TEST_ROWS, float(values.mean()), math.nan, math.nan, math.nan)
    of_seeds = _variance(values) / len(values)
    variance = of_seeds + max(covariance, 0.0)
    degrees = math.inf
    if of_seeds > 0:
        degrees = variance**2 / (of_seeds**2 / (len(values) - 1))
    return _tested(TEST_ROWS, values, variance, degrees)


def bootstrap_covariance(replicates: np.ndarray) -> float:
    """Return the mean covariance of two columns of `replicates` [draws, n]: the differences of n seeds by draw.

    A draw of test examples is the same for all seeds. Draws in which a difference is not defined are left out; without
    any other, the covariance is NaN.
    """
    defined = ~np.isnan(replicates).any(axis=1)
    seeds: int = replicates.shape[1]
    if seeds < 2:
        return 0.0
    if defined.sum() < 2:
        return math.nan
    covariances = np.cov(replicates[defined].T)
    of_pairs = float(covariances.sum() - np.trace(covariances))
    return of_pairs / (seeds * (seeds - 1))


def _variance(values: np.ndarray) -> float:
    """Return the variance of differences, and 0 if only rounding errors tell them apart."""
    largest = max(1.0, float(np.abs(values).max()))
    if np.ptp(values) <= NOISE * largest:
        return 0.0
    return float(values.var(ddof=1))


def _tested(method: str, values: np.ndarray, variance: float, degrees: float) -> Tested:
    from scipy import stats

    mean = float(values.mean())
    error = math.sqrt(variance)
    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, degrees))
    if error > 0:
        t = abs(mean) / error
        p_value = 2 * float(stats.t.sf(t, degrees))
    elif abs(mean) <= NOISE:
        p_value = 1.0
    else:
        p_value = math.nan
    half_width = quantile * error
    return Tested(method, mean, mean - half_width, mean + half_width, p_value)


def wilcoxon(differences: Sequence[float] | np.ndarray) -> float:
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


def cohens_dz(differences: Sequence[float] | np.ndarray) -> float:
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
