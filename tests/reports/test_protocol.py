"""Unseen clients, left-out domains, the best five rounds, targets and paired comparisons, by hand-computed frames."""

import csv
import io
import itertools
from pathlib import Path

import pandas as pd
import pytest

import rayfed
from helpers.commands import command
from helpers.score_rows import Row, frame, row, trial_writer, write
from rayfed.core.round_record import SERVER, Record
from rayfed.records.round_report import RoundReport
from rayfed.records.trials import record_trial
from rayfed.reports.page import page_html
from rayfed.reports.read import read
from rayfed.reports.render import render
from rayfed.reports.sections import sections
from rayfed.reports.selection import aggregate_clients, pick_rounds
from rayfed.reports.summary import View, summarise
from rayfed.reports.target import rounds_to_target

main = command("report")


def add(folder: Path, name: str, rows: list[Row], *, algorithm: str = "fedavg", seed: int = 0, **config) -> None:
    values = {key.replace("__", "."): value for key, value in config.items()}
    record_trial(folder, "e", name, {"algorithm": algorithm, "seed": seed, "status": "done", **values})
    with trial_writer(folder, name, algorithm=algorithm, seed=seed) as writer:
        setup = Record(round=0, stage="setup", cohort=2, bytes_down={"x": 5 * 10**8})
        writer.add(RoundReport.of(setup))
        for number in range(1, max(number for number, _ in rows) + 1):
            sizes, scores = {"weights": 10**9}, [score for at, score in rows if at == number]
            clocked = {"clock_seconds": 2.5 * number} if algorithm == "fedasync" else {}
            sent = {"bytes_down": sizes, "bytes_up": sizes}
            record = Record(round=number, stage="round", cohort=2, scores=scores, **sent, **clocked)
            writer.add(RoundReport.of(record))


def curve(means: list[float], *, spread: float = 0.1) -> list[Row]:
    """Two clients, `spread` below and above each round's mean."""
    return [
        row(number, client, "ab"[client], "test", "global", "accuracy", mean + sign * spread, 10)
        for number, mean in enumerate(means, start=1)
        for client, sign in ((0, -1), (1, 1))
    ]


def told(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([str(folder), *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


class TestBestFive:
    def test_it_is_labelled(self, tmp_path, capsys) -> None:
        add(tmp_path, "t", curve([0.5, 0.7]))
        words = told(tmp_path, capsys, "--rule", "best5")
        assert "BEST FIVE: the mean of each column's five best rounds, chosen on this very split as an oracle" in words
        assert "60.00" in words

    def test_each_quantity_has_its_own_five_best_rounds(self) -> None:
        # means .1 .9 .5 .7 .8 .6: the five best have mean .7; client 0 is worst but in round 2, where client 1 has 0
        rows = [*curve([0.1, 0.9, 0.5, 0.7, 0.8, 0.6])]
        rows = [r.with_(value=1.8 * r.score.client) if r.round == 2 else r for r in rows]
        picked = pick_rounds(aggregate_clients(frame(rows)), {"e": "accuracy"})
        found = picked.query("rule == 'best5'").set_index("quantity")["value"]
        assert found["mean"] == pytest.approx(0.7)  # .9 .8 .7 .6 .5
        assert found["worst"] == pytest.approx((0.7 + 0.6 + 0.5 + 0.4 + 0.0) / 5)  # round 2's 0 and round 1's 0 alike
        assert found["domain:b"] == pytest.approx((1.8 + 0.9 + 0.8 + 0.7 + 0.6) / 5)

    def test_of_a_loss_the_lowest(self) -> None:
        rows = [row(n, 0, "a", "test", "global", "loss", x, 1) for n, x in enumerate((9, 1, 2, 3, 4, 5), start=1)]
        found = pick_rounds(aggregate_clients(frame(rows)), {"e": "accuracy"})
        assert set(found.query("rule == 'best5'")["value"]) == {3.0}


class TestUnseenClients:
    def test_they_are_never_mixed_with_participants_and_have_tables_of_their_own(self, tmp_path, capsys) -> None:
        new = {"downloaded": 0.2, "adapted": 0.9}
        rows = [*curve([0.5]), *(row(1, 2, "a", "test", p, "accuracy", v, 5, unseen=True) for p, v in new.items())]
        add(tmp_path, "t", [*rows, row(1, 3, "a", "test", "global", "accuracy", 0.0, 5, unseen=True)])
        means = summarise(read(tmp_path)).rows.query("quantity == 'mean' and rule == 'final'")
        means = {(r["unseen"], r["point"]): r["mean"] for _, r in means.iterrows()}
        wanted = {(False, "global"): 0.5, (True, "global"): 0.0, (True, "downloaded"): 0.2, (True, "adapted"): 0.9}
        assert means == pytest.approx(wanted)
        add(tmp_path, "t", rows, default_eval_point="global")
        words = told(tmp_path, capsys)
        assert "e: unseen clients, with the downloaded model: test accuracy, %" in words
        assert "e: unseen clients, after evaluate.adapt_epochs local epochs: test accuracy, %" in words
        assert "90.00" in words


class TestLeftOutDomains:
    def ood(self, domain: str, value: float) -> list[Row]:
        return [row(1, SERVER, domain, "ood", "global", "accuracy", value, 9)]

    def test_one_domain_each_is_one_group(self, tmp_path, capsys) -> None:
        for seed, values in enumerate(((0.2, 0.6), (0.4, 0.6))):
            for domain, value in zip("ab", values, strict=True):
                config = {"seed": seed, "leave_out": domain, "default_eval_point": "global"}
                add(tmp_path, f"{domain}{seed}", self.ood(domain, value), **config)
        summary = summarise(read(tmp_path))
        rows = summary.rows.query("rule == 'final'").set_index("quantity")
        assert rows["mean"].to_dict() == pytest.approx(
            {"mean": 0.45, "weighted": 0.45, "worst": 0.3, "domain:a": 0.3, "domain:b": 0.6}
        )  # worst: of seed 0 it is 0.2, of seed 1 0.4
        assert rows.loc["mean", "sd"] == pytest.approx(0.1 / 2**0.5)  # of 0.4 and 0.5
        assert set(rows["seeds"]) == {2}
        assert set(rows["hyperparameters"]) == {""}
        assert summary.notes == []
        words = told(tmp_path, capsys, "--split", "ood")
        assert "fedavg 30.00 ± 14.14 60.00 ± 0.00 45.00 ± 7.07 AVG:" in words
        assert "mean ± sd over 2 seeds" in words
        assert "worst: the same as a in every row." in words

    def test_what_is_missing_is_said(self, tmp_path) -> None:
        for algorithm, domain in (("fedavg", "a"), ("fedavg", "b"), ("fedprox", "a")):
            add(tmp_path, algorithm + domain, self.ood(domain, 0.5), algorithm=algorithm, leave_out=domain)
        assert summarise(read(tmp_path)).notes == [
            "e fedprox: means are over 1 of 2 pairs of seed and left-out domain."
        ]

    def test_the_global_model_is_shown_or_else_the_mean_over_the_clients_models(self, tmp_path, capsys) -> None:
        add(tmp_path, "t", self.ood("a", 0.25), leave_out="a", default_eval_point="downloaded")
        words = told(tmp_path, capsys, "--split", "ood")
        assert "1 seed algorithm a ──────────────── fedavg 25.00 Values are the server's. Model" in words
        of_clients = [row(1, i, "a", "ood", "downloaded", "accuracy", value, 9) for i, value in enumerate((0.5, 0.75))]
        add(tmp_path, "u", of_clients, algorithm="fedbn", leave_out="a", default_eval_point="downloaded")
        words = told(tmp_path, capsys, "--split", "ood")
        assert "fedavg 25.00" in words
        assert "fedbn 62.50" in words
        assert "Model scored: global of fedavg; downloaded of fedbn." in words


class TestTarget:
    def test_first_round_and_bytes_until_its_end(self, tmp_path) -> None:
        add(tmp_path, "t", curve([0.3, 0.8, 0.7, 0.9]))
        add(tmp_path, "u", curve([0.3, 0.5]), seed=1)
        tables = read(tmp_path)
        means = aggregate_clients(tables.metrics).query("quantity == 'mean'")
        found = rounds_to_target(means, tables, 0.75).set_index("trial")
        assert found.loc["t", "round"] == 2
        assert found.loc["t", "gigabytes"] == pytest.approx(0.5 + 2 * 2)  # setup, then a gigabyte down and one up
        assert found.loc["u"].isna()[["round", "gigabytes"]].all()

    def test_the_table_says_never_and_how_many(self, tmp_path, capsys) -> None:
        add(tmp_path, "t", curve([0.3, 0.8]), algorithm__mu=1.0)
        add(tmp_path, "u", curve([0.8, 0.8]), seed=1, algorithm__mu=1.0)
        add(tmp_path, "v", curve([0.3, 0.7]), seed=2, algorithm__mu=1.0)
        add(tmp_path, "w", curve([0.3, 0.7]), algorithm__mu=2.0)
        words = told(tmp_path, capsys, "--target", "0.75")
        assert "whose test accuracy, mean over clients, is at least 0.75, and GB" in words
        assert "fedavg mu=1 1.5 ± 0.7 3.500 ± 1.414 2 of 3" in words
        assert "mu=2 never never 0 of 1" in words

    def test_the_time_on_the_clock_has_a_column_where_there_is_a_clock(self, tmp_path, capsys) -> None:
        add(tmp_path, "t", curve([0.3, 0.8]), algorithm="fedasync")
        add(tmp_path, "u", curve([0.8, 0.8]), algorithm="fedasync", seed=1)
        words = told(tmp_path, capsys, "--target", "0.75")
        assert "rounds GB clock reached" in words
        assert "fedasync 1.5 ± 0.7 3.500 ± 1.414 3.8 ± 1.8 2 of 2" in words

    def test_without_a_clock_nothing_is_drawn_over_it(self, tmp_path, capsys) -> None:
        add(tmp_path, "t", curve([0.3, 0.8]))
        words = refused(tmp_path, capsys, "--plot", str(tmp_path / "a.svg"), "--kind", "clock")
        assert "plot: no trial ran on a simulated clock; clock.step_seconds gives one" in words


class TestComparison:
    def three(self, folder: Path) -> None:
        for seed, (a, b) in enumerate(((0.5, 0.6), (0.6, 0.8), (0.7, 0.75))):
            add(folder, f"a{seed}", curve([a]), seed=seed, partition_hash=f"h{seed}")
            add(folder, f"b{seed}", curve([b]), algorithm="dbe", seed=seed, partition_hash=f"h{seed}")

    def test_over_seeds(self, tmp_path, capsys) -> None:
        # differences 10, 20, 5: mean 11.667, sd 7.638, t(0.975, 2) = 4.3027, so ± 4.3027 * 7.638 / sqrt(3) = 18.97
        self.three(tmp_path)
        add(tmp_path, "b3", curve([0.5]), algorithm="dbe", seed=3)
        words = told(tmp_path, capsys, "--compare", "fedavg", "dbe")
        assert "e: one pair, test accuracy, percentage points, mean over clients, at the last evaluated round" in words
        assert "dbe − fedavg +11.67 -7.31 to +30.64" in words
        assert "Differences by seed: +10.00 (0), +20.00 (1), +5.00 (2)." in words
        assert "only the seeds that both have count; left out: 3." in words
        csv_of_pair = told(tmp_path, capsys, "--compare", "fedavg", "dbe", "--format", "csv")
        assert '"dbe − fedavg","+11.67","-7.31 to +30.64"' in csv_of_pair

    def test_other_seeds_other_clients_and_names_that_do_not_fit_are_refused(self, tmp_path, capsys) -> None:
        def words(*names: str) -> str:
            return refused(tmp_path, capsys, "--compare", *names)

        add(tmp_path, "a", curve([0.5]), seed=0, partition_hash="x")
        add(tmp_path, "b", curve([0.5]), algorithm="dbe", seed=1, partition_hash="y")
        seeds = "compare: fedavg has seeds 0 and dbe has seeds 1; a paired comparison needs two seeds or more"
        assert seeds in words("fedavg", "dbe")
        for seed in (0, 1):
            add(tmp_path, f"a{seed}", curve([0.5]), seed=seed, partition_hash="x")
            add(tmp_path, f"b{seed}", curve([0.5]), algorithm="dbe", seed=seed, partition_hash="y")
        clients = "compare: partition_hash is x for fedavg and y for dbe at seed 0; pairs need the same clients"
        assert clients in words("fedavg", "dbe")
        assert "compare: no trials of dba are done; did you mean dbe?" in words("fedavg", "dba")

    def test_other_data_is_told_by_the_configuration(self, tmp_path, capsys) -> None:
        """The hash names rows; data.* says what stands in them, except where the files lie."""
        same = {"partition_hash": "h", "data__root": "/here", "partition__file": "a"}
        for seed in (0, 1):
            add(tmp_path, f"a{seed}", curve([0.5]), seed=seed, **same, data__colours="rgb")
            other = same | {"data__root": "/there", "partition__file": "/b"}
            add(tmp_path, f"b{seed}", curve([0.5]), algorithm="dbe", seed=seed, **other, data__colours="grey")
        words = refused(tmp_path, capsys, "--compare", "fedavg", "dbe")
        assert "data.colours is rgb for fedavg and grey for dbe at seed 0; pairs need the same clients" in words
        for seed in (0, 1):
            add(tmp_path, f"b{seed}", curve([0.5]), algorithm="dbe", seed=seed, **other, data__colours="rgb")
        assert "dbe − fedavg +0.00" in told(tmp_path, capsys, "--compare", "fedavg", "dbe")

    def test_hyperparameters_are_those_chosen_at_the_point_that_is_shown(self, tmp_path, capsys) -> None:
        """Validation prefers mu=2 at `trained` and mu=1 at `global`."""
        best = {"global": {1.0: 0.9, 2.0: 0.5}, "trained": {1.0: 0.5, 2.0: 0.9}}
        for seed, mu in itertools.product((0, 1), best["global"]):
            rows = [
                row(1, client, "a", split, point, "accuracy", mean[mu] + 0.01 * client, 10)
                for point, mean in best.items()
                for split in ("val", "test")
                for client in (0, 1)
            ]
            values = {"algorithm__mu": mu, "default_eval_point": "global"}
            add(tmp_path, f"t{mu}{seed}", rows, algorithm="fedprox", seed=seed, **values)
        others = [r.with_(split=split) for r in curve([0.6], spread=0.02) for split in ("val", "test")]
        for seed in (0, 1):
            both = [*others, *(r.with_(point="trained") for r in others)]
            add(tmp_path, f"a{seed}", both, seed=seed, default_eval_point="global")
        assert "+30.50" in told(tmp_path, capsys, "--compare", "fedavg", "fedprox")
        assert "+30.50" in told(tmp_path, capsys, "--compare", "fedavg", "fedprox", "--point", "trained")


class TestPointsThatDependOnHyperparameters:
    """DBE without its bias is scored as a global model, and with it as the clients download it."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for prbm, point, val, test in ((False, "global", 0.4, 0.5), (True, "downloaded", 0.6, 0.7)):
            for seed in (0, 1):
                rows = [
                    row(1, client, "ab"[client], split, point, "accuracy", mean + 0.02 * client + 0.01 * seed, 10)
                    for split, mean in (("val", val), ("test", test))
                    for client in (0, 1)
                ]
                points = ("downloaded", "adapted")
                unseen = [row(1, 2, "a", "test", at, "accuracy", 0.3, 10, unseen=True) for at in points]
                ood = row(1, SERVER, "c", "ood", "global", "accuracy", 0.1, 10)
                values = {"algorithm__prbm": prbm, "default_eval_point": point}
                add(tmp_path, f"dbe{prbm}{seed}", [*rows, *unseen, ood], algorithm="dbe", seed=seed, **values)
        others = [r.with_(split=split) for r in curve([0.6]) for split in ("val", "test")]
        for seed in (0, 1):
            add(tmp_path, f"a{seed}", others, seed=seed, default_eval_point="global")
        return tmp_path

    def test_all_are_shown_each_at_its_own_and_validation_chooses_among_them(self, folder, capsys) -> None:
        words = told(folder, capsys)
        assert "dbe prbm=false 50.50 ± 0.71 52.50 ± 0.71 51.50 ± 0.71 prbm=true † 70.50 ± 0.71 72.50 ± 0.71" in words
        assert "Model scored: global of dbe (prbm=false), fedavg; downloaded of dbe (prbm=true)." in words

    def test_of_unseen_clients_and_left_out_domains_the_same_are_chosen(self, folder) -> None:
        main_table, downloaded, adapted, ood = sections(read(folder), summarise(read(folder)), View())
        assert main_table.table.chosen == [False, True, False]
        assert [part.table.chosen for part in (downloaded, adapted, ood)] == [[False, True]] * 3
        assert downloaded.legend.startswith("†: the algorithm's hyperparameters with the best mean validation accuracy")

    def test_the_csv_has_the_rows_of_all_tables(self, folder) -> None:
        rows = pd.read_csv(io.StringIO(render(folder, format="csv")))
        rows = rows.query("algorithm == 'dbe' and quantity == 'mean' and rule == 'final'")
        tables = rows.groupby(["split", "unseen", "point"])["mean"].agg(list).map(lambda means: [*map(float, means)])
        assert tables.to_dict() == {
            ("test", False, "global"): [pytest.approx(0.515)],
            ("test", False, "downloaded"): [pytest.approx(0.715)],
            ("test", True, "downloaded"): [0.3, 0.3],
            ("test", True, "adapted"): [0.3, 0.3],
            ("ood", False, "global"): [0.1, 0.1],
        }
        of_test = pd.read_csv(io.StringIO(render(folder, None, View(split="test"), format="csv")))
        assert set(of_test["split"]) == {"test"}

    def test_pairs_are_with_the_chosen_ones(self, folder, capsys) -> None:
        assert "dbe − fedavg +11.50" in told(folder, capsys, "--compare")
        assert "dbe prbm=false" in told(folder, capsys, "--target", "0.5").partition("first evaluated round")[2]


class TestDomainsWithFewerSeeds:
    """The only client of domain b took no part at seed 1, since it was set aside."""

    def test_a_sentence_says_so_and_csv_has_the_number_of_each_cell(self, tmp_path, capsys) -> None:
        for seed in (0, 1):
            rows = [r for r in curve([0.6]) if seed == 0 or r.score.domain == "a"]
            add(tmp_path, f"t{seed}", rows, seed=seed)
        words = told(tmp_path, capsys)
        assert "mean ± sd over 2 seeds" in words
        assert "Columns with values of fewer seeds: b 1." in words
        assert main([str(tmp_path), "--format", "csv"]) == 0
        lines = csv.DictReader(io.StringIO(capsys.readouterr().out))
        seeds = {line["quantity"]: line["seeds"] for line in lines if line["rule"] == "final"}
        assert (seeds["domain:a"], seeds["domain:b"], seeds["mean"]) == ("2", "1", "2")


class TestTies:
    """Two rounds with the mean 0.5, which the last bits of sums make 0.49999999999999994 and 0.5000000000000001."""

    LOW, HIGH = (0.2, 0.6, 0.7), (0.3, 0.4, 0.8)

    def rows(self, *rounds: tuple[float, ...], splits: tuple[str, ...] = ("val", "test")) -> list[Row]:
        return [
            row(number, client, "a", split, "global", "accuracy", value, 10)
            for number, values in enumerate(rounds, start=1)
            for split in splits
            for client, value in enumerate(values)
        ]

    def test_what_only_rounding_tells_apart_is_a_tie_and_the_earliest_wins(self) -> None:
        for rounds in ((self.LOW, self.HIGH), (self.HIGH, self.LOW)):
            picked = pick_rounds(aggregate_clients(frame(self.rows(*rounds))), {"e": "accuracy"})
            picked = picked[(picked["split"] == "test") & (picked["quantity"] == "mean")].set_index("rule")["round"]
            assert dict(picked) == {"final": 2, "selected": 1, "oracle": 1, "best5": 1}


class TestSeveralExperiments:
    """In e two methods can be compared; f has one only, and no value of the metric drift."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for seed, (algorithm, mean) in itertools.product((0, 1), (("fedavg", 0.5), ("dbe", 0.6))):
            rows = curve([mean])
            rows += [r.with_(metric="drift") for r in rows]
            add(tmp_path, f"{algorithm}{seed}", rows, algorithm=algorithm, seed=seed)
        record_trial(tmp_path, "f", "t", {"algorithm": "fedavg", "seed": 0, "status": "done"})
        with trial_writer(tmp_path, experiment="f") as writer:
            write(writer, curve([0.7]))
        return tmp_path

    def test_those_that_can_be_compared_are(self, folder, capsys) -> None:
        words = told(folder, capsys, "--compare")
        assert "e: all pairs, test accuracy, percentage points, mean over clients, at the last evaluated round" in words
        assert "f: no pairs; needs two methods or more with finished trials." in words
        words = told(folder, capsys, "--compare", "--format", "latex")
        assert "% f: no pairs; needs" in words
        assert "% e: all pairs, test accuracy" in words
        assert "no pairs" not in told(folder, capsys, "--compare", "--format", "csv")
        assert "needs two methods" in refused(folder, capsys, "--compare", "--experiment", "f")


class TestValuesThatAreNoNumbers:
    def test_a_note_counts_those_that_means_leave_out(self, tmp_path, capsys) -> None:
        rows = [r.with_(value=float("nan")) if r.round == 2 else r for r in curve([0.5, 0.6])]
        add(tmp_path, "t", rows)
        add(tmp_path, "u", curve([0.7]), algorithm="dbe")
        words = told(tmp_path, capsys, "--rule", "final")
        assert "fedavg 40.00 60.00 50.00" in words  # of round 1
        note = "e: 2 of 6 values of test accuracy are NaN (of fedavg). Means leave them out, and rounds in which"
        assert note in words

    def test_a_report_without_any_number_says_why_it_shows_none(self, tmp_path, capsys) -> None:
        rows = [r.with_(value=float("nan")) for r in curve([0.5, 0.6])]
        add(tmp_path, "t", rows)
        reason = "1 trial is done, and all values of their metrics are NaN (accuracy)."
        assert reason in told(tmp_path, capsys)
        assert reason in page_html(tmp_path)

    def test_a_report_on_trials_without_scores_says_so(self, tmp_path, capsys) -> None:
        record_trial(tmp_path, "e", "t", {"algorithm": "fedavg", "seed": 0, "status": "done"})
        assert "1 trial is done, and no model was scored; clients need test" in told(tmp_path, capsys)


def test_where_labels_are_no_classes_the_loss_is_shown(tmp_path, capsys) -> None:
    for seed, (algorithm, mean) in itertools.product((0, 1), (("fedavg", 2.0), ("dbe", 1.0))):
        rows = [r.with_(metric="loss", higher_is_better=False) for r in curve([mean])]
        add(tmp_path, f"{algorithm}{seed}", rows, algorithm=algorithm, seed=seed)
    words = told(tmp_path, capsys, "--compare", "--plot", str(tmp_path / "p.png"), "--target", "1.5")
    assert words.startswith("e: test loss, at the last evaluated round; mean ± sd over 2 seeds")
    assert "e: all pairs, test loss" in words
    assert rayfed.report(tmp_path).startswith("e: test loss")
    add(tmp_path, "u", curve([0.5]))
    assert rayfed.report(tmp_path).startswith("e: test accuracy")
