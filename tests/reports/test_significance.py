"""Tests of significance against values by hand and scipy, and the comparison of all pairs."""

import math
from pathlib import Path

import pytest
from scipy import stats
from small_results import add

from helpers.commands import command
from rayfed.reports.comparison import compare
from rayfed.reports.pairs import stars_against_best
from rayfed.reports.read import read
from rayfed.reports.significance import cohens_dz, holm, paired_t, stars, wilcoxon
from rayfed.reports.summary import View

main = command("report")
ACCURACY = View(metric="accuracy")


class TestPairedT:
    def test_against_a_table_of_t(self) -> None:
        # mean 2, sd 1, so t = 2 / (1 / sqrt 3) = 3.4641 with 2 degrees of freedom: p = 1 - t / sqrt(t² + 2) = 0.0742
        assert paired_t([1.0, 2.0, 3.0]) == pytest.approx(1 - math.sqrt(12) / math.sqrt(14))

    def test_without_spread(self) -> None:
        assert paired_t([0.0, 0.0]) == 1
        assert math.isnan(paired_t([0.1, 0.1, 0.1]))  # no error to divide by, and no reason to be certain


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
        corrected = [pairs.comparisons[index].p_t for index in order]
        assert corrected[0] == pytest.approx(3 * raw[order[0]])
        assert corrected[2] == pytest.approx(max(raw[order[2]], 2 * raw[order[1]], 3 * raw[order[0]]))
        assert set(stars_against_best(pairs).marks) == {pairs.comparisons[0].orders[0], pairs.comparisons[2].orders[0]}
        assert stars_against_best(pairs).best == "dbe"

    def test_as_printed(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
        monkeypatch.setenv("COLUMNS", "300")
        assert main([str(folder), "--compare"]) == 0
        words = " ".join(capsys.readouterr().out.split())
        interval = stats.ttest_1samp([0.19, 0.215, 0.2, 0.225, 0.21], 0).confidence_interval()
        low, high = 100 * interval.low, 100 * interval.high
        assert f"dbe − fedavg +20.80 {low:+.2f} to {high:+.2f}" in words
        assert "e: all pairs, test accuracy, percentage points, mean over clients, at the round with the best" in words
        assert "With 5 pairs, Wilcoxon's p is at least 0.062 before the correction." in words
        assert "differs from dbe with p below 0.05, 0.01, 0.001 (paired t, Holm-corrected for all pairs)." in words
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
