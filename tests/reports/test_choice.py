"""Which hyperparameters validation chooses, what is marked, how rows are called, and which rows share a table."""

from pathlib import Path

import pytest

from helpers.commands import command
from helpers.score_rows import add_rows, row
from rayfed.reports.choice import BY_SEED
from rayfed.reports.groups import experiments_by_data, group_trials
from rayfed.reports.read import read, read_by_data
from rayfed.reports.render import render
from rayfed.reports.sections import sections
from rayfed.reports.summary import View, summarise

main = command("report")
DRAWN = {"test_drawn": True, "examples_train": 60, "examples_val": 15, "examples_test": 25}


def add(folder: Path, name: str, val: float, test: float, algorithm: str = "fedavg", seed: int = 0, **values) -> None:
    """Add a trial of one round with two clients, 5 points below and above the means `val` and `test`."""
    rows = []
    for split, mean in (("val", val), ("test", test)):
        for client, sign in ((0, -1), (1, 1)):
            rows.append(row(1, client, "ab"[client], split, "global", "accuracy", mean + 0.05 * sign, 20))
    given = {"default_eval_point": "global", **values}
    add_rows(folder, name, rows, algorithm=algorithm, seed=seed, **given)


def told(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([str(folder), *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def chosen(folder: Path) -> list[str]:
    rows = summarise(read(folder)).rows
    return sorted(set(rows.loc[rows["chosen"], "hyperparameters"]))


class TestSeeds:
    def test_a_configuration_with_an_easy_seed_alone_is_not_chosen(self, tmp_path: Path, capsys) -> None:
        """Seed 1 is easier: mu=1 has it alone and 0.893, and mu=2 has both, with the mean 0.844."""
        add(tmp_path, "x1", 0.893, 0.8, seed=1, algorithm__mu=1.0)
        add(tmp_path, "y0", 0.800, 0.8, seed=0, algorithm__mu=2.0)
        add(tmp_path, "y1", 0.888, 0.8, seed=1, algorithm__mu=2.0)
        add(tmp_path, "z0", 0.790, 0.8, seed=0, algorithm__mu=3.0)
        add(tmp_path, "z1", 0.880, 0.8, seed=1, algorithm__mu=3.0)
        assert chosen(tmp_path) == ["mu=2"]
        words = told(tmp_path, capsys)
        note = "e: of fedavg, 2 of 3 hyperparameters take part in the choice, those with the seeds 0, 1; the others"
        assert note in words

    def test_without_a_common_set_of_seeds_none_is_chosen(self, tmp_path: Path, capsys) -> None:
        add(tmp_path, "x", 0.9, 0.8, seed=1, algorithm__mu=1.0)
        add(tmp_path, "y", 0.8, 0.8, seed=0, algorithm__mu=2.0)
        assert chosen(tmp_path) == []
        assert "no hyperparameters of fedavg are chosen, because the seeds that have finished differ" in told(
            tmp_path, capsys
        )


class TestSplitsOfEachSeed:
    """mu=1 is best on the validation data of seed 0, mu=2 on those of seed 1, and mu=2 as a mean."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        validation = {(1.0, 0): 0.8, (2.0, 0): 0.7, (1.0, 1): 0.6, (2.0, 1): 0.9}
        test = {(1.0, 0): 0.5, (2.0, 0): 0.6, (1.0, 1): 0.7, (2.0, 1): 0.65}
        for (mu, seed), val in validation.items():
            split = f"h{seed}"
            add(tmp_path, f"t{mu}{seed}", val, test[mu, seed], "fedprox", seed, partition_hash=split, **DRAWN,
                algorithm__mu=mu)  # fmt: skip
            add(tmp_path, f"a{seed}", 0.5, 0.55 + seed / 10, seed=seed, partition_hash=split, **DRAWN)
        return tmp_path

    def test_each_seed_chooses_for_itself(self, folder: Path, capsys) -> None:
        rows = summarise(read(folder)).rows
        by_seed = rows[(rows["hyperparameters"] == BY_SEED) & (rows["split"] == "test") & (rows["rule"] == "final")]
        assert by_seed.set_index("quantity").loc["mean", "mean"] == pytest.approx((0.5 + 0.65) / 2)
        assert set(rows.loc[rows["chosen"] & (rows["algorithm"] == "fedprox"), "hyperparameters"]) == {BY_SEED}
        words = told(folder, capsys)
        assert f"{BY_SEED} † 52.50" in words
        assert "†: those with the best validation accuracy at each seed. Seeds choose for themselves" in words
        assert f"e: fedprox, {BY_SEED}: mu=1 at seeds 0; mu=2 at seeds 1." in words
        assert "Each of the 2 seeds has a split of its own: ± is over splits and training." in words

    def test_these_are_compared(self, folder: Path, capsys) -> None:
        words = told(folder, capsys, "--compare", "fedavg", "fedprox")
        assert "Differences by seed: -5.00 (0), +0.00 (1)." in words
        assert "corrected resampled t test (Nadeau and Bengio 2003), because each seed has a split of its own" in words

    def test_a_dataset_with_tests_of_its_own_has_one_choice(self, tmp_path: Path) -> None:
        """No test example is a validation example of another seed."""
        for mu, seed in ((1.0, 0), (1.0, 1), (2.0, 0), (2.0, 1)):
            values = {"partition_hash": f"h{seed}", **DRAWN, "test_drawn": False}
            add(tmp_path, f"t{mu}{seed}", 0.5 + mu / 10, 0.5, seed=seed, **values, algorithm__mu=mu)
        assert chosen(tmp_path) == ["mu=2"]


def test_kept_splits_are_told_with_the_size_of_the_test_set(tmp_path: Path, capsys) -> None:
    for seed in range(5):
        add(
            tmp_path, f"t{seed}", 0.5, 0.5 + seed / 100, seed=seed, partition_hash="h", **DRAWN | {"examples_test": 187}
        )
    assert "The 5 seeds share one split and its test set of 187 examples: ± is over training alone." in told(
        tmp_path, capsys
    )


class TestMarks:
    """fedprox mu=2 has the best test score, and validation chose mu=1."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for seed in (0, 1):
            add(tmp_path, f"a{seed}", 0.6, 0.60 + seed / 100, seed=seed, local__lr=0.1)
            add(tmp_path, f"s{seed}", 0.5, 0.50 + seed / 100, "solo", seed, local__lr=0.1)
            for mu, val, test in ((1.0, 0.7, 0.65), (2.0, 0.6, 0.9), (3.0, 0.6, 0.9)):
                add(tmp_path, f"p{mu}{seed}", val, test, "fedprox", seed, algorithm__mu=mu, local__lr=0.2)
        return tmp_path

    def test_the_best_is_one_that_validation_chose(self, folder: Path, capsys) -> None:
        text = render(folder, format="markdown")
        assert "| fedprox mu=1 † | **60.00 ± 0.00** | **70.00 ± 0.00** | **65.00 ± 0.00** |" in text
        assert "| fedprox mu=2 | 85.00 ± 0.00 | 95.00 ± 0.00 | 90.00 ± 0.00 |" in text
        assert "Bold and underlined: the best and the second best among the rows that validation chose." in text
        latex = render(folder, format="latex")
        assert r"\underline{60.50 $\pm$ 0.71}" in latex  # fedavg's mean, the second best of the chosen
        assert r"\textbf{90.00" not in latex
        assert (
            latex.index(r"\end{tabular}") < latex.index("Bold and underlined: the best") < latex.index(r"\end{table}")
        )

    def test_only_chosen_rows_in_every_form(self, folder: Path, capsys) -> None:
        page = folder / "page.html"
        for more in ((), ("--format", "latex"), ("--format", "markdown"), ("--format", "csv"), ("--target", "0.6")):
            words = told(folder, capsys, "--chosen", *more)
            assert "mu=1" in words
            assert "mu=2" not in words
        assert "Hyperparameters: those of each algorithm with the best mean validation accuracy." in told(
            folder, capsys, "--chosen"
        )
        told(folder, capsys, "--chosen", "--html", str(page))
        rows = [line for line in page.read_text().splitlines() if "<tr data-method=" in line]
        assert any("fedprox mu=1" in line for line in rows)
        assert not any("mu=2" in line for line in rows)

    def test_labels_have_no_keys_of_other_methods_and_a_note_says_how_methods_differ(
        self, folder: Path, capsys
    ) -> None:
        assert set(group_trials(read(folder).trials)["hyperparameters"]) == {"", "mu=1", "mu=2", "mu=3"}
        assert "e: methods differ in local.lr (0.1: fedavg, solo; 0.2: fedprox)." in told(folder, capsys)

    def test_a_choice_at_the_edge_is_told(self, folder: Path, capsys) -> None:
        words = told(folder, capsys)
        assert "Chosen at the edge of what was tried: mu=1, the lowest of 3 values (fedprox)." in words

    def test_the_page_marks_the_best_of_the_chosen(self, folder: Path, capsys) -> None:
        page = folder / "page.html"
        told(folder, capsys, "--html", str(page))
        text = page.read_text()
        row_of = {
            name: text.partition(f'<tr data-method="fedprox mu={name}"')[2].partition("</tr>")[0] for name in "12"
        }
        assert 'class="best"' in row_of["1"]
        assert 'class="best"' not in row_of["2"]


class TestDifferentData:
    """Trials with other labels, files or concentrations are trials of other experiments."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for seed, alpha in ((0, 0.1), (1, 0.1), (0, 10.0), (1, 10.0)):
            for algorithm, test in (("fedavg", 0.5), ("solo", 0.4)):
                values = {
                    "partition__alpha": alpha,
                    "partition_hash": f"h{alpha}{seed}",
                    "default_eval_point": "global",
                }
                add(tmp_path, f"{algorithm}{alpha}{seed}", 0.5, test + alpha / 100, algorithm, seed, **values)
        return tmp_path

    def test_have_tables_of_their_own(self, folder: Path, capsys) -> None:
        words = told(folder, capsys)
        assert "e (partition.alpha=0.1): test accuracy, %" in words
        assert "e (partition.alpha=10): test accuracy, %" in words
        assert set(group_trials(read_by_data(folder).trials)["hyperparameters"]) == {""}
        alone = told(folder, capsys, "--experiment", "e (partition.alpha=10)")
        assert "60.00" in alone
        assert "partition.alpha=0.1" not in alone
        assert list(read(folder).trials["experiment"].unique()) == ["e"]

    def test_are_compared_one_by_one(self, folder: Path, capsys) -> None:
        words = told(folder, capsys, "--compare", "solo", "fedavg")
        assert words.count("fedavg − solo +10.00") == 2
        assert "e (partition.alpha=0.1): one pair" in words

    def test_and_so_have_pages_and_plots(self, folder: Path, capsys) -> None:
        page = folder / "page.html"
        told(folder, capsys, "--html", str(page))
        assert page.read_text().count("<article data-experiment=") == 2
        told(folder, capsys, "--experiment", "e (partition.alpha=10)", "--plot", str(folder / "a.svg"))

    def test_an_unknown_one_is_refused(self, folder: Path, capsys) -> None:
        assert main([str(folder), "--experiment", "e (partition.alpha=1)"]) == 2
        error = capsys.readouterr().err
        assert "experiment=e (partition.alpha=1): no such experiment" in error
        assert error.count("\n") == 1

    def test_labels_and_files_are_data_and_the_way_of_standardising_is_not(self, tmp_path: Path) -> None:
        for number, (label, file) in enumerate((("ill", "a.csv"), ("hospital", "a.csv"), ("ill", "b.csv"))):
            values = {"data__label": label, "data__file": file, "data__standardize": ["client", "global"][number % 2]}
            add(tmp_path, f"t{number}", 0.5, 0.5, **values)
        assert sorted(experiments_by_data(read(tmp_path).trials)) == [
            "e (data.label=hospital, data.file=a.csv)",
            "e (data.label=ill, data.file=a.csv)",
            "e (data.label=ill, data.file=b.csv)",
        ]


def test_a_section_without_alternatives_has_no_word_on_marks(tmp_path: Path) -> None:
    add(tmp_path, "t", 0.5, 0.5)
    (section,) = sections(read(tmp_path), summarise(read(tmp_path)), View())
    assert section.emphasis == ""
    assert "†" not in section.legend


class TestUndefinedMetrics:
    """Client 1 has examples of one class, so it has no AUROC; at seed 1 nor has client 0 in validation."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for seed in (0, 1):
            rows = []
            for split in ("val", "test"):
                for client in (0, 1, 2):
                    rows.append(row(1, client, "abc"[client], split, "global", "accuracy", 0.5, 20))
                    if client != 1 and (client, seed, split) != (0, 1, "val"):
                        rows.append(row(1, client, "abc"[client], split, "global", "auroc", 0.6 + client / 10, 20))
            values = {"default_eval_point": "global", "selection_metric": "auroc", "selection_mode": "max"}
            add_rows(tmp_path, f"t{seed}", rows, seed=seed, **values)
        return tmp_path

    def test_the_mean_says_over_which_clients_it_is(self, folder: Path, capsys) -> None:
        words = told(folder, capsys)
        assert "AVG and worst of test auroc are over 2 of 3 clients, without b." in words
        latex = told(folder, capsys, "--metric", "auroc", "--format", "latex")
        legend = latex[latex.index("parbox") : latex.index("end{table}")]
        assert "AVG and worst of test auroc are over 2 of 3 clients, without b." in legend
        assert "Validation auroc, which chooses, is over 1 to 2 of 3 clients." in words
        assert "are over" not in told(folder, capsys, "--metric", "accuracy")
