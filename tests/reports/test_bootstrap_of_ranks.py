"""Bootstrap replicates of AUROC where a class has few examples: their spread, and where there are none."""

import math

import numpy as np
import pytest
from scipy import stats

from rayfed.reports.bootstrap import DRAWS, Part, paired, replicated
from rayfed.reports.significance import bootstrap_covariance, over_seeds_and_rows


def part(ill: int, healthy: int, seed: int = 0) -> Part:
    random = np.random.default_rng(seed)
    labels = np.array([1] * ill + [0] * healthy, np.float32)
    scores = random.normal(size=len(labels)) + labels
    return Part("a", np.stack([-scores, scores], axis=1).astype(np.float32), labels)


def delong(one: Part) -> float:
    """DeLong, DeLong and Clarke-Pearson 1988: the variance of AUROC by placements, with n - 1 in the variances."""
    scores = one.outputs[:, 1].astype(float)
    ill, healthy = scores[one.labels == 1], scores[one.labels == 0]
    wins = (ill[:, None] > healthy).astype(float)
    return float(wins.mean(1).var(ddof=1) / len(ill) + wins.mean(0).var(ddof=1) / len(healthy))


@pytest.mark.parametrize(("ill", "healthy"), [(60, 60), (5, 400), (400, 8)])
def test_replicates_vary_as_delong_says(ill: int, healthy: int) -> None:
    one = part(ill, healthy)
    found = replicated({0: one}, "auroc", {})
    assert found is not None
    assert len(found[0].replicates) == DRAWS
    spread = np.nanvar(found[0].replicates, ddof=1)
    assert spread == pytest.approx(delong(one), rel=0.3)
    plain = replicated({0: one}, "accuracy", {})
    assert plain is not None
    assert not plain[0].is_lone


def test_the_score_itself_does_not_change() -> None:
    one = part(7, 50)
    found = replicated({0: one}, "auroc", {})
    assert found is not None
    scores = one.outputs[:, 1]
    expected = stats.mannwhitneyu(scores[one.labels == 1], scores[one.labels == 0]).statistic / (7 * 50)
    assert found[0].score == pytest.approx(expected)


def test_one_example_of_a_class_leaves_no_test() -> None:
    first, second = (replicated({0: part(1, 30, seed)}, "auroc", {}) for seed in (1, 2))
    assert first is not None
    assert second is not None
    assert first[0].is_lone
    pair = paired(first, second)
    assert pair is not None
    difference, draws = pair
    assert difference == pytest.approx(second[0].score - first[0].score)
    assert np.isnan(draws).all()
    covariance = bootstrap_covariance(np.stack([draws, draws], axis=1))
    assert math.isnan(covariance)
    tested = over_seeds_and_rows([0.1, 0.2], covariance)
    assert tested.mean == pytest.approx(0.15)
    assert all(map(math.isnan, tested[2:]))


def clients_of(count: int, seed: int) -> dict[int, Part]:
    """Clients of whom the first has one ill patient."""
    parts = {0: part(1, 30, seed)}
    for number in range(1, count):
        parts[number] = part(20, 30, seed + number)
    return parts


@pytest.mark.parametrize(("clients", "is_tested"), [(4, False), (10, True)])
def test_of_many_clients_one_such_does_not_count(clients: int, is_tested: bool) -> None:
    parts = [
        {number: part(1 if not number else 20, 30, seed + number) for number in range(clients)} for seed in (1, 50)
    ]
    first, second = (replicated(one, "auroc", {}) for one in parts)
    assert first is not None
    assert second is not None
    pair = paired(first, second)
    assert pair is not None
    assert np.isfinite(pair[1]).any() == is_tested
