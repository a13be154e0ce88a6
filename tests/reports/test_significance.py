"""Tests of significance against values by hand and scipy, and the comparison of all pairs."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from small_results import add

from helpers.commands import command
from helpers.score_rows import add_rows, row
from rayfed.reports.comparison import compare
from rayfed.reports.pairs import stars_against
from rayfed.reports.read import read
from rayfed.reports.significance import (
    bootstrap_covariance,
    cohens_dz,
    corrected_resampled_t,
    holm,
    over_seeds_and_rows,
    paired_t,
    stars,
    wilcoxon,
)
from rayfed.reports.summary import View

main = command("report")
ACCURACY = View(metric="accuracy")


class TestPairedT:
    def test_against_a_table_of_t(self) -> None:
        # mean 2, sd 1, so t = 2 / (1 / sqrt 3) = 3.4641 with 2 degrees of freedom: p = 1 - t / sqrt(t² + 2) = 0.0742
        assert paired_t([1.0, 2.0, 3.0]).p_value == pytest.approx(1 - math.sqrt(12) / math.sqrt(14))

    def test_without_spread(self) -> None:
        assert paired_t([0.0, 0.0]).p_value == 1
        assert math.isnan(paired_t([0.1, 0.1, 0.1]).p_value)  # no error to divide by, and no reason to be certain


class TestResampled:
    """Differences 1, 2, 3, 6: mean 3, variance 14/3, and a third as many test examples as others."""

    def test_by_hand_and_scipy(self) -> None:
        found = corrected_resampled_t([1.0, 2.0, 3.0, 6.0], 1 / 3)
        error = math.sqrt((1 / 4 + 1 / 3) * 14 / 3)
        assert found.p_value == pytest.approx(2 * stats.t.sf(3 / error, 3))
        assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 3, 3, error))
        assert found.method == "corrected resampled t"

    def test_without_a_correction_it_is_the_paired_t_test(self) -> None:
        of_scipy = stats.ttest_1samp([1.0, 2.0, 3.0, 6.0], 0)
        for found in (corrected_resampled_t([1.0, 2.0, 3.0, 6.0], 0.0), paired_t([1.0, 2.0, 3.0, 6.0])):
            assert found.p_value == pytest.approx(of_scipy.pvalue)
            assert (found.low, found.high) == pytest.approx(tuple(of_scipy.confidence_interval()))


class TestSeedsAndRows:
    def test_by_hand_and_scipy(self) -> None:
        # s²/n = 14/12, c = 1: V = 13/6, and V² / ((14/12)² / 3) = 10.347 degrees of freedom
        found = over_seeds_and_rows([1.0, 2.0, 3.0, 6.0], 1.0)
        assert found.p_value == pytest.approx(2 * stats.t.sf(3 / math.sqrt(13 / 6), 3 * (13 / 14) ** 2 * 4))
        assert over_seeds_and_rows([1.0, 2.0, 3.0, 6.0], -1.0)[1:] == pytest.approx(paired_t([1.0, 2.0, 3.0, 6.0])[1:])

    def test_seeds_that_agree_leave_the_examples(self) -> None:
        assert over_seeds_and_rows([2.0, 2.0, 2.0], 1.0).p_value == pytest.approx(2 * stats.norm.sf(2.0))
        assert math.isnan(over_seeds_and_rows([2.0, 2.0, 2.0], 0.0).p_value)

    def test_the_bootstrap_finds_what_an_analysis_of_variance_finds(self) -> None:
        """Of n examples and k seeds, the covariance of two seeds' means is (MS examples - MS rest) / (k n)."""
        random = np.random.default_rng(0)
        n, k = 400, 5
        values = random.normal(size=(n, 1)) + random.normal(size=(1, k)) / 10 + random.normal(size=(n, k))
        rows, columns = values.mean(1, keepdims=True), values.mean(0, keepdims=True)
        of_rows = k * ((rows - values.mean()) ** 2).sum() / (n - 1)
        rest = ((values - rows - columns + values.mean()) ** 2).sum() / ((n - 1) * (k - 1))
        draws = random.integers(0, n, (4000, n))
        replicates = values[draws].mean(1)
        assert bootstrap_covariance(replicates) == pytest.approx((of_rows - rest) / (k * n), rel=0.1)

    def test_draws_that_leave_a_score_undefined_do_not_count(self) -> None:
        replicates = np.array([[1.0, 2.0], [3.0, 5.0], [math.nan, 7.0]])
        assert bootstrap_covariance(replicates) == pytest.approx(3.0)  # of (1, 3) and (2, 5)


class TestWilcoxon:
    def test_three_of_a_kind_are_one_in_four(self) -> None:
        assert wilcoxon([0.1, 0.2, 0.3]) == 0.25  # of 2³ signs, all plus and all minus
        assert wilcoxon([0.0, 0.0]) == 1

    def test_ties_are_exact(self) -> None:
        """|d| = 1, 1, 2 has the ranks 1.5, 1.5, 3: W+ = 1.5, whose distance 1.5 from 3 six of eight signs reach."""
        assert wilcoxon([1.0, -1.0, -2.0]) == 0.75
        assert wilcoxon([0.3, 0.1 + 0.2, -0.5]) == wilcoxon([0.3, 0.3, -0.5])


def test_holm_as_worked_out_by_hand() -> None:
    # 0.01 x 4; 0.02 x 3; max(0.06, 0.03 x 2); max(0.06, 0.05)
    assert holm([0.05, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, math.nan, 0.6])[::2] == pytest.approx([1.0, 1.0])
    assert math.isnan(holm([0.9, math.nan])[1])


def test_effect_size_and_stars() -> None:
    assert cohens_dz([1.0, 2.0, 3.0]) == 2
    assert math.isnan(cohens_dz([1.0, 1.0]))
    assert [stars(p) for p in (0.0009, 0.009, 0.049, 0.05, math.nan)] == ["***", "**", "*", "", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of fedprox, validation prefers mu=1; dbe beats fedavg by 20 points, give or take one, on five seeds."""
    home = tmp_path_factory.mktemp("pairs")
    for seed in range(5):
        noise = 0.01 * (-1) ** seed
        add(home, f"a{seed}", "fedavg", seed, 0.5 + noise, partition_hash=f"h{seed}")
        add(home, f"b{seed}", "dbe", seed, 0.7 + 0.005 * seed, partition_hash=f"h{seed}")
        for mu in (0.1, 1.0):
            mean = 0.4 + mu / 10 + noise / 2
            add(home, f"p{mu}{seed}", "fedprox", seed, mean, partition_hash=f"h{seed}", **{"algorithm.mu": mu})
    return home


class TestAllPairs:
    def test_each_method_once_with_its_chosen_hyperparameters(self, folder: Path) -> None:
        pairs = compare(read(folder), ACCURACY)
        names = [f"{pair.first} {pair.second}" for pair in pairs.comparisons]
        assert names == ["fedprox fedavg", "fedprox dbe", "fedavg dbe"]
        differences = pairs.comparisons[2].differences
        assert differences.tolist() == pytest.approx([0.19, 0.215, 0.2, 0.225, 0.21])
        raw = [stats.ttest_1samp(pair.differences, 0).pvalue for pair in pairs.comparisons]
        order = sorted(range(3), key=raw.__getitem__)
        corrected = [pairs.comparisons[index].p_value for index in order]
        assert corrected[0] == pytest.approx(3 * raw[order[0]])
        assert corrected[2] == pytest.approx(max(raw[order[2]], 2 * raw[order[1]], 3 * raw[order[0]]))
        assert set(stars_against(pairs).marks) == {pairs.comparisons[0].orders[0], pairs.comparisons[2].orders[0]}
        assert stars_against(pairs).against == "dbe"

    def test_as_printed(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
        monkeypatch.setenv("COLUMNS", "300")
        assert main([str(folder), "--compare"]) == 0
        words = " ".join(capsys.readouterr().out.split())
        interval = stats.ttest_1samp([0.19, 0.215, 0.2, 0.225, 0.21], 0).confidence_interval()
        low, high = 100 * interval.low, 100 * interval.high
        assert f"dbe − fedavg +20.80 {low:+.2f} to {high:+.2f}" in words
        assert "e: all pairs, test accuracy, percentage points, mean over clients, at the round with the best" in words
        assert "with 5 pairs it is at least 0.062 before the correction." in words
        assert "differs from dbe with p below 0.05, 0.01, 0.001 (paired t, Holm-corrected for 3 comparisons)." in words
        assert "52.20 ± 1.10***" in words
        assert "mean ± sd over 5 seeds, 5 partitions" in words

    def test_other_partitions_are_not_paired(self, tmp_path: Path) -> None:
        for seed in range(3):
            add(tmp_path, f"a{seed}", "fedavg", seed, 0.5 + seed / 10, partition_hash=f"h{seed}")
            add(tmp_path, f"b{seed}", "dbe", seed, 0.6 + seed / 20, partition_hash=f"h{seed}")
            add(tmp_path, f"c{seed}", "solo", seed, 0.7, partition_hash="other")
        pairs = compare(read(tmp_path), ACCURACY)
        assert [(pair.first, pair.second) for pair in pairs.comparisons] == [("fedavg", "dbe")]
        assert "solo − fedavg is missing: partition_hash is h0 for fedavg and other" in " ".join(pairs.notes)


class TestRowsOfOnePatient:
    """They are not independent, so a bootstrap over the rows of one test set would be too certain."""

    def pairs(self, folder: Path, partition: str):
        for seed in range(3):
            own = {"partition_hash": partition.format(seed), "data.group": "patient", "test_drawn": True}
            sizes = {"examples_train": 60, "examples_val": 0, "examples_test": 20}
            add(folder, f"a{seed}", "fedavg", seed, 0.5 + seed / 10, **own, **sizes)
            add(folder, f"b{seed}", "dbe", seed, 0.6 + seed / 20, **own, **sizes)
        return compare(read(folder), ACCURACY)

    def test_one_test_set_allows_no_test(self, tmp_path: Path) -> None:
        pairs = self.pairs(tmp_path, "same")
        assert math.isnan(pairs.comparisons[0].p_value)
        assert pairs.notes == [
            "There is no test of means over clients: rows of one patient (data.group) depend on each other; with "
            "partition.redraw=true there is one."
        ]

    def test_redrawn_splits_do(self, tmp_path: Path) -> None:
        pairs = self.pairs(tmp_path, "h{}")
        expected = corrected_resampled_t(pairs.comparisons[0].differences, 1 / 3)
        assert pairs.comparisons[0].p_value == pytest.approx(expected.p_value)
        assert pairs.notes == []


class TestBaseline:
    def test_each_is_compared_with_it(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
        monkeypatch.setenv("COLUMNS", "300")
        pairs = compare(read(folder), ACCURACY, baseline="fedavg")
        assert [(pair.first, pair.second) for pair in pairs.comparisons] == [("fedavg", "fedprox"), ("fedavg", "dbe")]
        raw = [stats.ttest_1samp(pair.differences, 0).pvalue for pair in pairs.comparisons]
        assert [pair.p_value for pair in pairs.comparisons] == pytest.approx(holm(raw))
        assert main([str(folder), "--baseline", "fedavg", "--html", str(folder / "page.html")]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert "e: all against fedavg, test accuracy" in words
        assert "*, **, ***: differs from fedavg with p below 0.05, 0.01, 0.001" in words
        assert "Holm-corrected for 2 comparisons" in words
        assert "p against fedavg" in (folder / "page.html").read_text()

    def test_one_that_is_not_there_is_refused(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments, words in (
            (("--baseline", "fedavgg"), "baseline: no trials of fedavgg are done; did you mean fedavg?"),
            (("--baseline", "fedavg", "--compare", "dbe", "fedprox"), "--baseline fedavg: compares all with it"),
        ):
            assert main([str(folder), *arguments]) == 2
            error = capsys.readouterr().err
            assert words in error
            assert error.count("\n") == 1


class TestSites:
    """dbe beats fedavg by 20 points in both domains, and by 30 at client 1 of b with ten times the noise."""

    def test_by_domain_and_by_client(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
        monkeypatch.setenv("COLUMNS", "300")
        for by, sites in (("domain", ["a", "b"]), ("client", [0, 1])):
            pairs = compare(read(folder), ACCURACY, ("fedavg", "dbe"), by=by)
            assert [pair.site for pair in pairs.comparisons] == sites
            for pair in pairs.comparisons:
                assert pair.differences.tolist() == pytest.approx([0.19, 0.215, 0.2, 0.225, 0.21])
            raw = [stats.ttest_1samp(pair.differences, 0).pvalue for pair in pairs.comparisons]
            assert [pair.p_value for pair in pairs.comparisons] == pytest.approx([2 * p for p in raw])
        assert main([str(folder), "--baseline", "fedavg", "--by", "domain"]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert "e: all against fedavg, test accuracy, percentage points, by domain, at the round" in words
        assert "dbe − fedavg a +20.80" in words
        assert "Holm-corrected for 4 comparisons" in words

    def test_one_site_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for seed in range(2):
            for algorithm in ("fedavg", "dbe"):
                rows = [row(1, 0, "a", "test", "global", "accuracy", 0.5 + seed / 10, 10)]
                add_rows(tmp_path, f"{algorithm}{seed}", rows, algorithm=algorithm, seed=seed)
        for by, only in (("domain", "a"), ("client", "0")):
            assert main([str(tmp_path), "--compare", "--by", by]) == 2
            error = capsys.readouterr().err
            assert f"by={by}: the results have one {by} with test accuracy ({only}); leave --by out" in error
            assert error.count("\n") == 1
