"""Selection, means and sds against numbers worked out by hand, and the wording of the report."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from helpers.commands import command
from helpers.score_rows import Row, add_rows, frame, row, trial_writer, write
from rayfed.core.errors import UsageError
from rayfed.core.round_record import SERVER, Event
from rayfed.reports.groups import group_trials
from rayfed.reports.page import write_page
from rayfed.reports.read import count_scores, read
from rayfed.reports.render import render
from rayfed.reports.selection import aggregate_clients, pick_rounds
from rayfed.reports.summary import View, summarise
from rayfed.reports.target import target_text

main = command("report")

Curve = list[tuple[float, float]]  # a (validation, test) pair a round, from round 1; NaN: not evaluated
NAN = float("nan")


def add_trial(
    folder: Path, name: str, curve: Curve, *, algorithm: str = "fedavg", seed: int = 0, status: str = "done", **config
) -> None:
    """Two clients, 0.1 above and below the mean, with 10 and 30 examples, of domains a and b."""
    rows = [
        row(number, client, domain, split, config.get("default_eval_point", "global"), "accuracy", mean + more, n)
        for number, pair in enumerate(curve, start=1)
        for split, mean in zip(("val", "test"), pair, strict=True)
        if mean == mean
        for client, domain, more, n in ((0, "a", -0.1, 10), (1, "b", 0.1, 30))
    ]
    add_rows(folder, name, rows, algorithm=algorithm, seed=seed, status=status, **config)


def value(rows: pd.DataFrame, rule: str, quantity: str = "mean", column: str = "mean", **where: object) -> float:
    found = rows[(rows["rule"] == rule) & (rows["quantity"] == quantity) & (rows["split"] == "test")]
    for key, wanted in where.items():
        found = found[found[key] == wanted]
    assert len(found) == 1
    return found.iloc[0][column]


def test_final_selected_and_oracle_pick_their_rounds_and_ties_go_to_the_earliest(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(0.2, 0.3), (0.6, 0.5), (0.6, 0.9), (0.4, 0.7)])
    chosen = pick_rounds(aggregate_clients(read(tmp_path).metrics), {"e": "accuracy"})
    test = chosen[(chosen["split"] == "test") & (chosen["quantity"] == "mean")].set_index("rule")
    assert dict(test["round"]) == {"final": 4, "selected": 2, "oracle": 3, "best5": 3}
    assert dict(test["value"]) == pytest.approx({"final": 0.7, "selected": 0.5, "oracle": 0.9, "best5": 0.6})


def test_what_was_not_measured_in_the_selected_round_has_no_selected_row(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(0.2, 0.3), (0.9, NAN), (0.4, 0.5)])
    rows = summarise(read(tmp_path)).rows.query("split == 'test'")
    assert set(rows["rule"]) == {"final", "oracle", "best5"}
    assert "at the last evaluated round" in render(tmp_path)


def test_the_files_of_a_trial_are_aggregated_as_one(tmp_path: Path) -> None:
    """Clients are in another file than the server's value, which they replace."""
    rows = [row(1, SERVER, "", "test", "global", "accuracy", 0.9, 10), *of_metric("accuracy", [], [0.1, 0.2, 0.3])]
    with trial_writer(tmp_path, segment_rows=1) as writer:
        for one in rows:
            write(writer, [one])
            writer.flush()
    tables = read(tmp_path)
    assert len(list(tmp_path.glob("e/metrics/*.parquet"))) == 4
    pd.testing.assert_frame_equal(tables.curves, aggregate_clients(tables.metrics))
    assert set(tables.curves["value"]) == {0.1, 0.2, 0.3}


@pytest.mark.parametrize("at_once", [1, 200_000])
def test_trials_that_are_aggregated_together_are_as_if_alone(tmp_path: Path, monkeypatch, at_once: int) -> None:
    """One trial has no value, one has many clients, and a copied experiment has the same names in its rows."""
    monkeypatch.setattr("rayfed.reports.read._ROWS_AT_ONCE", at_once)
    add_trial(tmp_path, "t", [(0.2, 0.3), (0.9, 0.4)])
    add_trial(tmp_path, "u", [(0.5, 0.6)], algorithm="fedprox", seed=1)
    add_rows(tmp_path, "nothing", [row(1, 0, "a", "test", "global", "accuracy", NAN, 10)])
    many = [row(1, client, "ab"[client % 2], "test", "global", "loss", client / 7, client + 1) for client in range(40)]
    add_rows(tmp_path, "many", many)
    shutil.copytree(tmp_path / "e", tmp_path / "copy")
    tables = read(tmp_path)
    curves, counts = [], []
    for scores in read(tmp_path).scores:
        rows = scores.rows().to_pandas()
        curves.append(aggregate_clients(rows))
        counts.append(count_scores(rows))
    assert len(curves) == 8
    pd.testing.assert_frame_equal(tables.curves, pd.concat(curves, ignore_index=True))
    pd.testing.assert_frame_equal(tables.counts, pd.concat(counts, ignore_index=True))


def of_metric(metric: str, val: list[float], test: list[float], point: str = "global") -> list[Row]:
    return [
        row(number, 0, "a", split, point, metric, value, 10)
        for split, values in (("val", val), ("test", test))
        for number, value in enumerate(values, start=1)
    ]


class TestOneModel:
    """All metrics are of the round, and of the hyperparameters, that validation accuracy picks."""

    @pytest.mark.parametrize(
        ("values", "shown", "criterion"),
        [
            ({"accuracy": [0.5, 0.9, 0.6], "ece": [0.3, 0.2, 0.1], "loss": [3, 2, 1]}, "ece", "accuracy"),
            ({"loss": [3, 1, 2], "mae": [1, 2, 3]}, "mae", "loss"),  # where there is no accuracy
        ],
    )
    def test_round(self, tmp_path: Path, values: dict[str, list[float]], shown: str, criterion: str) -> None:
        add_rows(tmp_path, "t", [one for name, of in values.items() for one in of_metric(name, of, of)])
        tables = read(tmp_path)
        found = pick_rounds(aggregate_clients(tables.metrics), tables.criteria).query("rule == 'selected'")
        assert set(found["round"]) == {2}
        words = render(tmp_path, view=View(metric=shown), width=200)
        assert re.search(rf"test {shown}.*, at the round with the best mean validation {criterion};", words)

    def test_hyperparameters(self, tmp_path: Path) -> None:
        accuracy, loss = {1.0: 0.9, 2.0: 0.6}, {1.0: 3.0, 2.0: 1.0}
        for mu in accuracy:
            rows = of_metric("accuracy", [accuracy[mu]], [0.5]) + of_metric("loss", [loss[mu]], [loss[mu]])
            add_rows(tmp_path, f"t{mu}", rows, algorithm__mu=mu)
        words = render(tmp_path, view=View(metric="loss"), width=200)
        assert "mu=1 †" in words
        assert "mu=2 †" not in words
        assert "†: the algorithm's hyperparameters with the best mean validation accuracy." in words

    def test_a_metric_that_some_seeds_have_in_the_selected_round_is_shown_as_final(self, tmp_path: Path) -> None:
        """`mdl` comes after the last round; of seed 1 alone is that the round with the best accuracy."""
        for seed, accuracy in enumerate(([0.9, 0.5], [0.5, 0.9])):
            mdl = row(2, SERVER, "", "test", "global", "mdl", 100.0 * (1 + seed), 10)
            add_rows(tmp_path, f"t{seed}", [*of_metric("accuracy", accuracy, accuracy), mdl], seed=seed)
        words = render(tmp_path, view=View(metric="mdl"), width=200)
        assert "at the last evaluated round" in words
        assert re.search(r"150\.0 ± 70\.7$", words, re.MULTILINE)


class TestSplitThatIsThere:
    """Without a wish, the first of test, ood and val that is there at the point where the algorithm is scored."""

    def test_test_comes_first_and_then_ood(self, tmp_path: Path) -> None:
        add_trial(tmp_path, "t", [(0.25, NAN)])
        with trial_writer(tmp_path, keep_through_round=9) as writer:
            write(writer, [row(1, SERVER, "x", "ood", "global", "accuracy", 0.5, 9)])
        assert "e: out-of-domain accuracy (split ood), %" in render(tmp_path)
        add_trial(tmp_path, "u", [(0.25, 0.5)], algorithm="dbe")
        words = render(tmp_path, width=200)
        assert "e: test accuracy, %" in words
        assert "Not shown, because they have no test accuracy at the model scored: fedavg." in words


class TestRoundsThatAreNotAlike:
    def test_evaluated_more_and_less_often(self, tmp_path: Path) -> None:
        for seed in (0, 1):
            add_trial(tmp_path, f"t{seed}", [(0.5, 0.5)], seed=seed, evaluate__every=5)
        assert "evaluate.every" not in render(tmp_path)
        add_trial(tmp_path, "t2", [(0.5, 0.5)], seed=2, evaluate__every=1)
        words = render(tmp_path, width=300)
        assert "e: trials differ in evaluate.every (1 and 5). Trials that are scored more often" in words

    @pytest.mark.parametrize("rule", ["final", "selected", "oracle", "best5"])
    @pytest.mark.parametrize("cohorts", [((0, 1), (0, 1)), ((0, 1), (1, 2))])
    def test_other_clients_in_other_rounds(self, tmp_path: Path, rule: str, cohorts) -> None:
        rows = [
            row(number, client, "a", split, "global", "accuracy", 0.5, 10)
            for number, cohort in enumerate(cohorts, start=1)
            for client in cohort
            for split in ("val", "test")
        ]
        add_rows(tmp_path, "t", rows)
        said = "e: rounds were scored on different clients (evaluate.clients=selected" in render(
            tmp_path, view=View(rule=rule), width=300
        )
        assert said == (rule != "final" and cohorts[0] != cohorts[1])


def test_means_over_clients(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(NAN, 0.5)])
    rows = summarise(read(tmp_path)).rows
    wanted = {"mean": 0.5, "weighted": (0.4 * 10 + 0.6 * 30) / 40, "worst": 0.4, "domain:a": 0.4, "domain:b": 0.6}
    assert {name: value(rows, "final", name) for name in wanted} == pytest.approx(wanted)
    assert set(rows["rule"]) == {"final", "oracle", "best5"}  # without validation, nothing is selected


def test_the_worst_loss_is_the_greatest_and_server_rows_count_only_alone() -> None:
    rows = [row(1, client, "", "test", "global", "loss", x, 1) for client, x in ((SERVER, 9.0), (0, 1.0), (1, 3.0))]
    rows += [row(1, SERVER, "sketch", "ood", "global", "accuracy", 0.25, 5)]
    curves = aggregate_clients(frame(rows))
    found = curves.set_index(["split", "quantity"])["value"]
    assert found["test", "mean"] == 2.0
    assert found["test", "worst"] == 3.0
    assert found["ood", "domain:sketch"] == 0.25


class TestDeclaredDirection:
    """`higher_is_better` as a metric declares it counts more than its name."""

    def test_the_best_and_the_worst_follow_the_declaration(self, tmp_path: Path) -> None:
        rows = [
            row(number, client, "a", "test", "global", "sharpness", value, 1, higher_is_better=False)
            for number, value in ((1, 2.0), (2, 5.0))
            for client, value in ((0, value), (1, value + 1))
        ]
        add_rows(tmp_path, "t", rows)
        found = summarise(read(tmp_path)).rows.query("rule == 'oracle'").set_index("quantity")["mean"]
        assert (found["mean"], found["worst"]) == (2.5, 3.0)
        tables = read(tmp_path)
        assert "is at most 2.5" in target_text(tables, 2.5, View(metric="sharpness"), width=999)


def test_mean_and_sd_over_seeds_of_the_trials_that_are_done(tmp_path: Path) -> None:
    for seed, test in enumerate((0.5, 0.6, 0.7)):
        add_trial(tmp_path, f"t{seed}", [(0.5, test)], seed=seed)
    add_trial(tmp_path, "bad", [(0.5, 0.0)], seed=3, status="failed")
    summary = summarise(read(tmp_path))
    assert value(summary.rows, "final") == pytest.approx(0.6)
    assert value(summary.rows, "final", column="sd") == pytest.approx(0.1)
    assert value(summary.rows, "final", column="seeds") == 3
    assert summary.notes == ["1 of 4 trials are not done and do not count: 1 failed."]


def test_hyperparameters_are_named_by_what_varies_and_sorted_as_numbers(tmp_path: Path) -> None:
    for number, mu in enumerate((10.0, 9.0, 0.5)):
        config = {"algorithm__mu": mu, "algorithm__fixed": 1, "local__lr": 0.1, "placement__hosts": number}
        add_trial(tmp_path, f"p{number}", [(0.5, 0.5)], algorithm="fedprox", **config)
    add_trial(tmp_path, "a", [(0.5, 0.5)], algorithm="fedavg", local__lr=0.2)
    table = group_trials(read(tmp_path).trials).sort_values("order")
    assert list(table["hyperparameters"]) == ["", "mu=0.5", "mu=9", "mu=10"]  # the rate varies in no method
    assert table["hyperparameters"].dtype == table["algorithm"].dtype  # pandas 3.0 adds no empty str and object


def test_the_chosen_hyperparameters_have_the_best_validation_and_not_the_best_test(tmp_path: Path) -> None:
    for seed in (0, 1):
        add_trial(tmp_path, f"x{seed}", [(0.7, 0.5)], seed=seed, algorithm__mu=1.0)
        add_trial(tmp_path, f"y{seed}", [(0.6, 0.8)], seed=seed, algorithm__mu=2.0)
    rows = summarise(read(tmp_path)).rows
    assert value(rows, "selected", column="chosen", hyperparameters="mu=1")
    assert not value(rows, "selected", column="chosen", hyperparameters="mu=2")


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ({"data.root": "/here", "data.download": False}, {"data.root": "/there", "data.download": True}, {""}),
        ({"data.file": "a.npz"}, {"data.file": "b.npz"}, {"data.file=a.npz", "data.file=b.npz"}),  # which data
        ({"metrics": {}}, {"metrics.ece.every": 2, "evaluate.initial": True, "evaluate.splits": ["test"]}, {""}),
        ({}, {"leave_out": "street"}, {"leave_out=none", "leave_out=each in turn"}),
    ],
)
def test_places_and_measurements_are_no_hyperparameters(tmp_path: Path, first, second, shown: set[str]) -> None:
    for seed, values in enumerate((first, second)):
        add_trial(tmp_path, f"t{seed}", [(0.5, 0.5)], seed=seed, **values)
    assert set(group_trials(read(tmp_path).trials)["hyperparameters"]) == shown


def test_a_repeated_seed_counts_once(tmp_path: Path) -> None:
    add_trial(tmp_path, "t0", [(NAN, 0.5)])
    add_trial(tmp_path, "t1", [(NAN, 0.7)])
    summary = summarise(read(tmp_path))
    assert value(summary.rows, "final") == pytest.approx(0.7)
    assert summary.notes == ["1 trial does not count, because a later one has the same hyperparameters and seed."]


def test_the_report_shows_percent_the_mark_the_points_and_the_failures(tmp_path: Path) -> None:
    add_trial(tmp_path, "x", [(0.7, 0.5)], algorithm__mu=1.0)
    add_trial(tmp_path, "y0", [(0.6, 0.8)], algorithm__mu=2.0)
    add_trial(tmp_path, "y1", [(0.6, 0.82)], algorithm__mu=2.0, seed=1)
    add_trial(tmp_path, "d", [(0.6, 0.8)], algorithm="dbe", default_eval_point="downloaded")
    add_trial(tmp_path, "z", [], seed=9, status="diverged", error="round 3, client 2: loss is nan", algorithm__mu=2.0)
    words = render(tmp_path, width=100)
    title = "e: test accuracy, %, at the round with the best mean validation accuracy; mean ± sd over 1 to 2 seeds"
    assert title in " ".join(words.split())
    assert "worst: the same as a in every row." in " ".join(words.split())
    row_x = next(line for line in words.splitlines() if "mu=1" in line)
    assert " ".join(row_x.split()) == "fedavg mu=1 40.00 60.00 50.00 1"
    row_y = next(line for line in words.splitlines() if "mu=2 †" in line)  # mu=1 is better at the only seed it has
    assert " ".join(row_y.split()) == "mu=2 † 71.00 ± 1.41 91.00 ± 1.41 81.00 ± 1.41 2"
    assert "nan" not in words.replace("loss is nan", "")
    assert "Model scored: global of fedavg; downloaded of dbe." in words.replace("\n", " ")
    assert "Not finished: z diverged (round 3, client 2: loss is nan)." in words
    assert f"pandas.read_parquet('{tmp_path.as_posix()}/e/metrics')" in words


def test_the_rounds_that_validation_chose_and_the_restarts_are_named(tmp_path: Path) -> None:
    add_trial(tmp_path, "x", [(0.6, 0.5), (0.7, 0.5), (0.5, 0.9)])
    add_trial(tmp_path, "y", [(0.7, 0.8), (0.6, 0.8)], seed=1)
    add_trial(tmp_path, "d", [(0.6, 0.8), (0.5, 0.8)], algorithm="dbe", default_eval_point="downloaded")
    for trial, seed, count in (("x", 0, 1), ("y", 1, 2)):
        with trial_writer(tmp_path, trial, seed=seed, keep_through_round=3) as writer:
            writer.add_events([Event(event="trial restarted")] * count + [Event(event="rounds added")])
    words = " ".join(render(tmp_path).split())
    assert "Rounds chosen: dbe 1, fedavg 1 to 2." in words
    assert "Restarted: y 2 times; x 1 time." in words
    assert "Rounds chosen" not in render(tmp_path, view=View(rule="final"))
    write_page(tmp_path, "e", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Rounds chosen: dbe 1, fedavg 1 to 2." in page
    assert '<p class="note">Restarted: y 2 times; x 1 time.</p>' in page


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_the_terminal(tmp_path: Path, width: int) -> None:
    add_trial(tmp_path, "x", [(0.7, 0.5)], algorithm__mu=1.0)
    add_trial(tmp_path, "y", [(0.7, 0.5)], algorithm__mu=2.0, local__optimizer="sgd_with_momentum", model__name="cnn")
    with trial_writer(tmp_path, "x", keep_through_round=1) as writer:
        rows = (row(1, 2 + i, f"domain_{i}", "test", "global", "accuracy", 0.5, 1) for i in range(12))
        write(writer, rows)
    table = render(tmp_path, width=width).split("Parquet:")[0]
    assert max(map(len, table.splitlines())) <= width
    assert all(f"domain_{i}" in table for i in range(12))


def test_oracle_is_labelled_and_final_is_the_default_without_validation(tmp_path: Path) -> None:
    add_trial(tmp_path, "t", [(NAN, 0.5), (NAN, 0.4)])
    assert "at the last evaluated round" in render(tmp_path)
    assert "ORACLE: " in render(tmp_path, view=View(rule="oracle"))
    with pytest.raises(UsageError, match="rule=orakle: did you mean oracle"):
        render(tmp_path, view=View(rule="orakle"))
    with pytest.raises(UsageError, match="rule=selected: known: best5, final, oracle; without validation"):
        render(tmp_path, view=View(rule="selected"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metric", "acuracy"], "metric=acuracy: did you mean accuracy?"),
        (["--point", "adapted"], "point=adapted: no accuracy there; known: global"),
        (["--split", "ood"], "split=ood: known: test, val"),
        (["--rule", "best"], "argument --rule: invalid choice"),
        (["--plot", "curves.gif"], "curves.gif: plots are PNG, PDF or SVG files; give a name that ends in .png, .pdf"),
        (["--plot", "c.png", "--kind", "bars"], "argument --kind: invalid choice"),
        (["--kind", "time"], "--kind time: describes a plot; give --plot FILE as well"),
        (["--compare", "fedavg"], "--compare: expected no name or two, got 1: fedavg"),
        (["--compare"], "compare: needs two methods or more with finished trials"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    add_trial(tmp_path, "t", [(0.5, 0.5)])
    assert main([str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rayfed: ")
    assert words in error
    assert error.count("\n") == 1


def test_the_caption_says_whether_the_mean_is_over_clients(tmp_path: Path) -> None:
    rows = [row(1, SERVER, domain, "test", "global", "frechet", x, 5) for domain, x in (("a", 1.0), ("b", 3.0))]
    rows += [row(1, 0, "a", "test", "global", "accuracy", 0.5, 5)]
    add_rows(tmp_path, "t", rows, default_eval_point="global")
    words = render(tmp_path, view=View(metric="frechet"))
    assert re.search(r"fedavg +1\.000 +3\.000 +2\.000$", words, re.M)  # a, b, AVG
    assert "worst: the same as b in every row." in words  # the greatest
    assert "AVG: mean over the server's values" in " ".join(words.split())
    assert "Means are over clients." in render(tmp_path)


class TestManyClients:
    """25 clients, each with its own domain, whose accuracies are 0.01, 0.02, ... 0.25 (losses: 1, 2, ... 25)."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        rows = [
            row(1, client, f"client-{client}", "test", "global", metric, unit * (client + 1), 5)
            for client in range(25)
            for metric, unit in (("accuracy", 0.01), ("loss", 1.0))
        ]
        add_rows(tmp_path, "t", rows, default_eval_point="global")
        return tmp_path

    def test_the_means_of_the_best_and_worst_three(self, folder: Path) -> None:
        """A tenth of 25 clients, rounded up, are three."""
        rows = summarise(read(folder)).rows
        accuracy, loss = (rows[rows["metric"] == metric] for metric in ("accuracy", "loss"))
        assert value(accuracy, "final", "best10") == pytest.approx(0.24)
        assert value(accuracy, "final", "worst10") == pytest.approx(0.02)
        assert value(loss, "final", "best10") == pytest.approx(2)
        assert value(loss, "final", "worst10") == pytest.approx(24)

    def test_they_stand_in_place_of_the_columns_of_domains(self, folder: Path) -> None:
        words = render(folder)
        assert re.search(r"^algorithm +AVG +best 10 % +worst 10 % +worst$", words, re.M)
        assert re.search(r"^fedavg +13\.00 +24\.00 +2\.00 +1\.00$", words, re.M)
        assert "The 25 domains have no columns here; --format csv has them." in " ".join(words.split())
        assert r"worst 10 \%" in render(folder, format="latex")
        lines = render(folder, format="csv").splitlines()
        assert len([line for line in lines if ",domain:client-" in line and ",final," in line]) == 25
