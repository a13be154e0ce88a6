"""Studies without a difference, and with one of two points: what the tests find, and that the report finds the same."""

import functools
import math
from pathlib import Path
from typing import Any

import null_studies
import numpy as np
import pytest

from rayfed.reports.comparison import compare
from rayfed.reports.read import read
from rayfed.reports.significance import RESAMPLED, TEST_ROWS
from rayfed.reports.summary import View

STUDIES = 200


@functools.cache
def found(kind: str, *, redrawn: bool) -> list[dict[str | None, Any]]:
    return list(null_studies.results(STUDIES, kind, "accuracy", 0, redrawn=redrawn))


def rates(studies: list[dict[str | None, Any]]) -> tuple[float, float, float]:
    """The rates for the mean, for a site, and for any site of a study after the correction."""
    return null_studies.rates([{site: one.chosen for site, one in study.items()} for study in studies])


class TestFalsePositives:
    @pytest.mark.parametrize("redrawn", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_of_two_methods_that_are_equally_good(self, redrawn: bool) -> None:
        mean, site, any_site = rates(found("equal", redrawn=redrawn))
        assert mean == pytest.approx(0.05, abs=0.03)
        assert site == pytest.approx(0.05, abs=0.03)
        assert any_site <= 0.08

    @pytest.mark.slow
    def test_of_two_names_of_one_method_on_one_split(self) -> None:
        mean, site, any_site = rates(found("same", redrawn=False))
        assert mean == pytest.approx(0.05, abs=0.03)
        assert site == pytest.approx(0.05, abs=0.03)
        assert any_site <= 0.08

    @pytest.mark.slow
    def test_of_two_names_of_one_method_on_redrawn_splits(self) -> None:
        """Nothing that two names of one method learn from a study is common to its splits, so the correction is more
        than is needed: by theory, p is below 0.05 in P(|t| > 2.776 sqrt(1 + 5/3)) = 1.1 % of cases."""
        mean, site, any_site = rates(found("same", redrawn=True))
        assert max(mean, site, any_site) <= 0.05

    def test_a_paired_t_test_over_seeds_finds_far_too_much(self) -> None:
        """Seeds that share a test set are no evidence about other patients."""
        before = [{site: one.before for site, one in study.items()} for study in found("equal", redrawn=False)]
        assert null_studies.rates(before)[0] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("redrawn", [False, True])
def test_of_auroc_at_a_hospital_that_lacks_a_class_at_some_splits(redrawn: bool) -> None:
    studies = list(null_studies.results(STUDIES, "equal", "auroc", 0, redrawn=redrawn, rare=True))
    mean, site, _ = rates(studies)
    assert mean == pytest.approx(0.05, abs=0.04)
    assert site == pytest.approx(0.05, abs=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("redrawn", [False, True])
def test_a_gain_of_two_points_is_found_as_often_as_theory_says(redrawn: bool) -> None:
    studies = found("gain", redrawn=redrawn)
    expected = null_studies.power(studies)
    allowed = 3 * math.sqrt(expected * (1 - expected) / STUDIES)
    assert rates(studies)[0] == pytest.approx(expected, abs=allowed)


@pytest.mark.parametrize("redrawn", [False, True])
@pytest.mark.parametrize(("metric", "rare"), [("accuracy", False), ("auroc", False), ("auroc", True)])
def test_the_report_finds_the_same(tmp_path: Path, metric: str, rare: bool, redrawn: bool) -> None:
    study = null_studies.simulated(np.random.default_rng(3), "equal", redrawn=redrawn, rare=rare)
    null_studies.write_study(tmp_path, study)
    expected = null_studies.tested_study(study, metric, redrawn=redrawn)
    tables = read(tmp_path)
    view = View(metric=metric)
    (mean,) = compare(tables, view, null_studies.METHODS).comparisons
    assert mean.tested.method == (RESAMPLED if redrawn else TEST_ROWS)
    assert mean.tested[1:] == pytest.approx(expected[None].chosen[1:], rel=1e-3, nan_ok=True)
    for site in compare(tables, view, null_studies.METHODS, by="domain").comparisons:
        assert site.tested[1:] == pytest.approx(expected[site.site].chosen[1:], rel=1e-3, nan_ok=True)
