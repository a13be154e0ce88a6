"""Selection, means and sds against numbers worked out by hand, and the wording of the report."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from rayfed import report
from rayfed.errors import UsageError
from rayfed.results.metric_names import is_share, lower_is_better
from rayfed.results.read import read
from rayfed.results.selection import by_round, picked
from rayfed.results.settings import settings
from rayfed.results.summary import summarise
from rayfed.results.tables import SERVER, MetricRow
from rayfed.results.trials import record_trial
from rayfed.results.writer import TrialWriter

Curve = list[tuple[float, float]]  # a (validation, test) pair a round, from round 1; NaN: not evaluated
NAN = float("nan")


def add_trial(
    folder: Path, name: str, curve: Curve, *, algorithm: str = "fedavg", seed: int = 0, status: str = "done", **config
) -> None:
    """Two clients, 0.1 above and below the mean, with 10 and 30 examples, of domains a and b."""
    values = {key.replace("__", "."): value for key, value in config.items()}
    record_trial(folder, "e", name, {"algorithm": algorithm, "seed": seed, "status": status, **values})
    point = values.get("scored", "global")
    with TrialWriter(folder, "e", name, algorithm, seed) as writer:
        for number, pair in enumerate(curve, start=1):
            for split, mean in zip(("val", "test"), pair, strict=True):
                if mean == mean:
                    rows = ((0, "a", mean - 0.1, 10), (1, "b", mean + 0.1, 30))
                    writer.add_metrics(
                        MetricRow(number, client, domain, split, point, "accuracy", value, n)
                        for client, domain, value, n in rows
                    )


def value(rows: pd.DataFrame, rule: str, quantity: str = "mean", column: str = "mean", **where: object) -> float:
    found = rows[(rows["rule"] == rule) & (rows["quantity"] == quantity) & (rows["split"] == "test")]
    for key, wanted in where.items():
        found = found[found[key] == wanted]
    assert len(found) == 1
    return found.iloc[0][column]


def test_final_selected_and_oracle_pick_their_rounds_and_ties_go_to_the_earliest(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(0.2, 0.3), (0.6, 0.5), (0.6, 0.9), (0.4, 0.7)])
    chosen = picked(by_round(read(tmp_path).metrics))
    test = chosen[(chosen["split"] == "test") & (chosen["quantity"] == "mean")].set_index("rule")
    assert dict(test["round"]) == {"final": 4, "selected": 2, "oracle": 3, "best5": 3}
    assert dict(test["value"]) == pytest.approx({"final": 0.7, "selected": 0.5, "oracle": 0.9, "best5": 0.6})


def test_selected_uses_only_rounds_where_both_splits_were_evaluated(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(0.2, 0.3), (0.9, NAN), (0.4, 0.5)])
    assert value(summarise(read(tmp_path)).rows, "selected") == pytest.approx(0.5)


def test_without_validation_there_is_no_selected_row(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(NAN, 0.3)])
    assert set(summarise(read(tmp_path)).rows["rule"]) == {"final", "oracle", "best5"}


def test_means_over_clients(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(NAN, 0.5)])
    rows = summarise(read(tmp_path)).rows
    wanted = {"mean": 0.5, "weighted": (0.4 * 10 + 0.6 * 30) / 40, "worst": 0.4, "domain:a": 0.4, "domain:b": 0.6}
    assert {name: value(rows, "final", name) for name in wanted} == pytest.approx(wanted)


def test_the_worst_loss_is_the_greatest_and_server_rows_count_only_alone() -> None:
    rows = [
        MetricRow(1, client, "", "test", "global", "loss", x, 1) for client, x in ((SERVER, 9.0), (0, 1.0), (1, 3.0))
    ]
    rows += [MetricRow(1, SERVER, "sketch", "ood", "global", "accuracy", 0.25, 5)]
    curves = by_round(pd.DataFrame(rows).assign(experiment="e", trial="t"))
    found = curves.set_index(["split", "quantity"])["value"]
    assert found["test", "mean"] == 2.0
    assert found["test", "worst"] == 3.0
    assert found["ood", "domain:sketch"] == 0.25


@pytest.mark.parametrize(
    ("metric", "lower", "share"),
    [
        ("accuracy", False, True),
        ("accuracy_class_3", False, True),
        ("accuracy_balanced", False, True),
        ("test_loss", True, False),
        ("ece", True, True),
        ("mdl", True, False),
        ("mdl@logits", True, False),
        ("frechet_mean@features.accuracy", True, False),
        ("client_probe@logits", True, True),
        ("drift_relative", True, False),
        ("gradient_norm_mean_square", True, False),
        ("discriminator_accuracy", False, True),
    ],
)
def test_what_names_of_metrics_tell(metric: str, lower: bool, share: bool) -> None:
    assert (lower_is_better(metric), is_share(metric)) == (lower, share)


def test_mean_and_sd_over_seeds_of_the_trials_that_are_done(tmp_path: Path) -> None:
    for seed, test in enumerate((0.5, 0.6, 0.7)):
        add_trial(tmp_path, f"t{seed}", [(0.5, test)], seed=seed)
    add_trial(tmp_path, "bad", [(0.5, 0.0)], seed=3, status="failed")
    summary = summarise(read(tmp_path))
    assert value(summary.rows, "final") == pytest.approx(0.6)
    assert value(summary.rows, "final", column="sd") == pytest.approx(0.1)
    assert value(summary.rows, "final", column="seeds") == 3
    assert summary.notes == ["1 of 4 trials do not count, because not done: 1 failed."]


def test_settings_are_named_by_what_varies_and_sorted_as_numbers(tmp_path: Path) -> None:
    for number, mu in enumerate((10.0, 9.0, 0.5)):
        config = {"algorithm__mu": mu, "algorithm__fixed": 1, "local__lr": 0.1, "placement__hosts": number}
        add_trial(tmp_path, f"p{number}", [(0.5, 0.5)], algorithm="fedprox", **config)
    add_trial(tmp_path, "a", [(0.5, 0.5)], algorithm="fedavg", local__lr=0.2)
    table = settings(read(tmp_path).trials).sort_values("order")
    wanted = ["local.lr=0.2", *(f"mu={mu}, local.lr=0.1" for mu in ("0.5", "9", "10"))]
    assert list(table["setting"]) == wanted


def test_the_chosen_setting_has_the_best_validation_and_not_the_best_test(tmp_path: Path) -> None:
    for seed in (0, 1):
        add_trial(tmp_path, f"x{seed}", [(0.7, 0.5)], seed=seed, algorithm__mu=1.0)
        add_trial(tmp_path, f"y{seed}", [(0.6, 0.8)], seed=seed, algorithm__mu=2.0)
    rows = summarise(read(tmp_path)).rows
    assert value(rows, "selected", column="chosen", setting="mu=1")
    assert not value(rows, "selected", column="chosen", setting="mu=2")


def test_a_repeated_seed_counts_once(tmp_path: Path) -> None:
    add_trial(tmp_path, "t0", [(NAN, 0.5)])
    add_trial(tmp_path, "t1", [(NAN, 0.7)])
    summary = summarise(read(tmp_path))
    assert value(summary.rows, "final") == pytest.approx(0.7)
    assert summary.notes == ["1 trials repeat the setting and seed of a later one and do not count."]


def test_the_report_shows_percent_the_mark_the_points_and_the_failures(tmp_path: Path) -> None:
    add_trial(tmp_path, "x", [(0.7, 0.5)], algorithm__mu=1.0)
    add_trial(tmp_path, "y0", [(0.6, 0.8)], algorithm__mu=2.0)
    add_trial(tmp_path, "y1", [(0.6, 0.82)], algorithm__mu=2.0, seed=1)
    add_trial(tmp_path, "d", [(0.6, 0.8)], algorithm="dbe", scored="downloaded")
    add_trial(tmp_path, "z", [], seed=9, status="diverged", error="round 3, client 2: loss is nan", algorithm__mu=2.0)
    words = report.render(tmp_path, width=100)
    assert "e: test accuracy, %, at the round with the best validation mean; mean ± sd over seeds" in words
    row_x = next(line for line in words.splitlines() if "mu=1 *" in line)
    assert " ".join(row_x.split()) == "fedavg mu=1 * 40.00 ± - 60.00 ± - 50.00 ± - 40.00 ± - 1"
    row_y = next(line for line in words.splitlines() if "mu=2" in line)
    assert " ".join(row_y.split()) == "mu=2 71.00 ± 1.41 91.00 ± 1.41 81.00 ± 1.41 71.00 ± 1.41 2"
    assert "nan" not in words.replace("loss is nan", "")
    assert "Model scored: global of fedavg; downloaded of dbe." in words.replace("\n", " ")
    assert "Not finished: z diverged (round 3, client 2: loss is nan)." in words
    assert f'pandas.read_parquet("{tmp_path.as_posix()}/e/metrics")' in words


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_the_terminal(tmp_path: Path, width: int) -> None:
    add_trial(tmp_path, "x", [(0.7, 0.5)], algorithm__mu=1.0)
    add_trial(tmp_path, "y", [(0.7, 0.5)], algorithm__mu=2.0, local__optimizer="sgd_with_momentum", model__name="cnn")
    with TrialWriter(tmp_path, "e", "x", "fedavg", 0, keep_through_round=1) as writer:
        rows = (MetricRow(1, 2 + i, f"domain_{i}", "test", "global", "accuracy", 0.5, 1) for i in range(12))
        writer.add_metrics(rows)
    table = report.render(tmp_path, width=width).split("Parquet:")[0]
    assert max(map(len, table.splitlines())) <= width
    assert all(f"domain_{i}" in table for i in range(12))


def test_oracle_is_labelled_and_final_is_the_default_without_validation(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(NAN, 0.5), (NAN, 0.4)])
    assert "at the last evaluated round" in report.render(tmp_path)
    assert "ORACLE: " in report.render(tmp_path, rule="oracle")
    with pytest.raises(UsageError, match="rule=selected: no validation split"):
        report.render(tmp_path, rule="selected")


def test_nothing_done_yet_is_said(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(0.5, 0.5)], status="running")
    assert report.render(tmp_path).startswith("No trial is done yet.\n1 of 1 trials do not count")
    record_trial(tmp_path, "fresh", "t", {"algorithm": "fedavg", "seed": 0})
    assert report.render(tmp_path, "fresh").startswith("No trial is done yet.")


def test_the_plot_and_the_csv_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(9):
        add_trial(tmp_path, f"t{number}", [(0.5, 0.5), (0.6, 0.6)], algorithm__mu=float(number))
    png, csv = tmp_path / "curves.png", tmp_path / "table.csv"
    assert report.main([str(tmp_path), "--plot", str(png), "--csv", str(csv)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert {"setting", "algorithm.mu", "mean", "sd", "seeds", "chosen"} <= set(pd.read_csv(csv).columns)
    assert "Plot: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metric", "acuracy"], "metric=acuracy: did you mean accuracy?"),
        (["--point", "adapted"], "point=adapted: no test accuracy there; known: global"),
        (["--split", "ood"], "split=ood: known: test, val"),
        (["--rule", "best"], "argument --rule: invalid choice"),
        (["--plot", "curves.pdf"], "curves.pdf: the plot is a PNG"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    add_trial(tmp_path, "t", [(0.5, 0.5)])
    assert report.main([str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_the_report_starts_without_torch_ray_or_matplotlib() -> None:
    code = "import sys, rayfed.report; print({'torch', 'ray', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_caption_says_whether_the_mean_is_over_clients(tmp_path: Path) -> None:
    rows = [MetricRow(1, SERVER, domain, "test", "global", "frechet", x, 5) for domain, x in (("a", 1.0), ("b", 3.0))]
    rows += [MetricRow(1, 0, "a", "test", "global", "accuracy", 0.5, 5)]
    record_trial(tmp_path, "e", "t", {"algorithm": "fedavg", "seed": 0, "status": "done", "scored": "global"})
    with TrialWriter(tmp_path, "e", "t", "fedavg", 0) as writer:
        writer.add_metrics(rows)
    words = report.render(tmp_path, metric="frechet")
    assert re.search(r"1\.000 ± - +3\.000 ± - +2\.000 ± - +3\.000 ± -", words)  # a, b, AVG, and the worst: the greatest
    assert "mean over the server's values" in " ".join(words.split())
    assert "AVG: mean over clients." in report.render(tmp_path)
