"""The papers' tables: every file is whole and consistent, the columns are worked out rightly, and the command runs."""

import importlib
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import rayfed.experiments.checks.inputs
import rayfed.experiments.first_examples
import rayfed.experiments.plan
from helpers import stand_in_data
from helpers.commands import run_trials
from helpers.published_data import FASHION, needs
from rayfed.algorithms import vhl
from rayfed.core.errors import UsageError
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.config import Config, Local
from rayfed.experiments.plan import make_plan
from rayfed.experiments.sources import from_file, merged
from rayfed.models.base import build_model
from rayfed.reports.read import Tables

HOME = Path(__file__).parents[2] / "benchmarks" / "papers"
NAMES = sorted(path.stem for path in HOME.glob("*.yaml"))


@pytest.fixture(autouse=True)
def _folder_of_scripts(monkeypatch):
    """As Python does for a script: its own folder comes first."""
    monkeypatch.setattr(sys, "path", [str(HOME), *sys.path])


@pytest.fixture
def papers():
    return importlib.import_module("_tables")


@pytest.fixture
def command():
    return importlib.import_module("run")


def fake_table(papers, **content):
    row = {"arm": {"algorithm.name": "fedavg"}, "published": {"a": 50.0}}
    other = {"arm": {"algorithm.name": "scaffold"}, "published": {"a": [60.0, 1.0]}}
    values = {
        "title": "T",
        "paper": "P",
        "setting": "S.",
        "columns": {"a": {"split": "test", "over": "mean", "rounds": "last"}},
        "rows": {"one": row, "two": other},
        "claims": ["a: two > one + 5"],
        "small": {"note": "N.", "seeds": [0, 1]},
        "full": {"note": "N."},
    } | content
    return papers.PaperTable("t", values, tuple(papers._claim("t", values, text) for text in values["claims"]))


def lines(rows):
    columns = ["row", "seed", "column", "value"]
    return pd.DataFrame(rows, columns=columns)


extreme_examples = rayfed.experiments.first_examples.extreme_examples
context_of = Blueprint.context


def virtual_zeros(shape, classes, count):
    """VHL's virtual data without the network that generates it."""
    return torch.zeros(1).expand(count, *shape), torch.arange(count) % classes


class Made:
    """What plans were made of lately, by what was asked for, and the folder of its files."""

    def __init__(self, folder):
        self.folder, self.populations, self.networks, self.read = folder, {}, {}, {}
        self.last_context = None

    def population(self, config, make):
        return self._kept(self.populations, 40, (config.data, config.partition, config.leave_out), make)

    def network(self, *asked, **named):
        return self._kept(self.networks, 3, asked, lambda: build_model(*asked, **named))

    def context(self, blueprint, *asked):
        """A plan asks twice for the same context, and copying a ResNet takes most of the time of planning."""
        (last, *given), context = self.last_context or ((None,), None)
        if last is not blueprint or any(a is not b for a, b in zip(given, asked, strict=True)):
            context = context_of(blueprint, *asked)
            self.last_context = (blueprint, *asked), context
        return context

    def extreme_examples(self, population):
        """Read the texts once: those of a stand-in are all alike."""
        part = population.clients[0].train
        if id(part) not in self.read:
            self.read[id(part)] = part, extreme_examples(population)  # held, so that no other part gets its id
        return self.read[id(part)][1]

    def _kept(self, there, most, asked, make):
        key = repr(asked)
        if key not in there:
            there[key] = make()
        if len(there) > most:
            del there[next(iter(there))]
        return there[key]


@pytest.fixture(scope="module")
def made_for_all(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("stand_ins"))


@pytest.fixture
def made(made_for_all, monkeypatch):
    """With stand-ins for all data that is not embedded."""
    stand_in_data.install(monkeypatch, made_for_all.folder)
    monkeypatch.setenv("RAYFED_DATA", str(made_for_all.folder))
    monkeypatch.setattr(rayfed.experiments.plan_model, "build_model", made_for_all.network)
    monkeypatch.setattr(rayfed.experiments.checks.inputs, "extreme_examples", made_for_all.extreme_examples)
    monkeypatch.setattr(vhl, "virtual_data", virtual_zeros)
    monkeypatch.setattr(Blueprint, "context", lambda plan, *asked: made_for_all.context(plan, *asked))
    monkeypatch.chdir(made_for_all.folder)
    return made_for_all


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [pytest.param("full", marks=pytest.mark.slow), "small"])
def test_configurations_are_valid_and_differ(name, scale, papers, made, monkeypatch):
    table = papers.read_table(name)
    monkeypatch.setattr(papers, "_capped", lambda path, cap: path)
    if isinstance(table.content[scale], str):
        with pytest.raises(UsageError, match=f"^{name} has no {scale} form: .*[.]$"):
            table.space(scale, {})
        return
    space = table.space(scale, {})
    configs = [Config.read(values) for values in space.trials()]
    trees = [config.tree() for config in configs]
    assert len(trees) == len(space.seeds) * len(table.cells(scale))
    assert all(trees.count(tree) == 1 for tree in trees)
    assert len(space.seeds) >= 3
    assert {tree["experiment"] for tree in trees} == {f"{name}_{scale}"}
    assert table.content[scale]["note"].endswith(".")
    for (row, setting), config in zip(table.cells(scale), configs, strict=False):
        plan = planned(config, made)
        for column, rule in table.columns_of(scale).items():
            if "split" in rule and rule.get("setting") in (None, setting) and column in table.rows[row]["published"]:
                assert measured(rule, plan), f"{row}, {column}"


def planned(config, made):
    """The plan of a trial, on the data that is here or on a stand-in for it; `UsageError` where it is refused."""
    population = made.population(config, lambda: make_plan(config).population)
    return make_plan(config, population=population)


def measured(rule, plan):
    """Whether the plan scores what a column asks for: a point or a split too few would leave the column empty."""
    splits = {*plan.evaluation.splits, *(test.split for test in plan.population.tests)}
    point = rule.get("point", plan.evaluation.points[0])
    if rule.get("unseen_clients"):
        return rule["split"] in splits and plan.population.unseen_clients > 0 and point in ("downloaded", "adapted")
    return rule["split"] in splits and point in plan.evaluation.points


@pytest.mark.parametrize("name", NAMES)
def test_claims_are_what_the_paper_printed(name, papers):
    """The order, that is: margins are for other data. Rows that the paper did not print are left out."""
    table = papers.read_table(name)
    assert table.claims
    for claim in table.claims:
        more, less = (table.published(row, claim.column) for row in (claim.more, claim.less))
        assert more is None or less is None or more[0] > less[0] + min(claim.margin, 0), claim.text
    compared = any(table.published(c.more, c.column) and table.published(c.less, c.column) for c in table.claims)
    assert compared or name in WITHOUT_NUMBERS


FIGURES = {"adcol_figure2a", "adcol_figure2b", "adcol_figure7", "feddebias_bias", "feddebias_figure5"}
WITHOUT_NUMBERS = {"adcol_extreme_skew", *FIGURES}  # and a setting of our own


@pytest.mark.parametrize(("scale", "examples"), [("full", 7438), ("small", 360)])
def test_adcol_sends_a_record_once_where_a_table_names_an_epsilon(scale, examples, papers):
    """So the epsilon that is recorded at the end is the row's own."""
    table = papers.read_table("adcol_table17")
    for row, arm in table.arms(scale).items():
        if arm["algorithm"]["name"] != "local_dp_adcol":
            continue
        (values,) = table.space(scale, {}, [row]).arms[0]
        config = Config.read(values)
        sent = config.algorithm.upload_size(examples)
        assert config.rounds * sent <= examples
        server = {"passes": torch.tensor([config.rounds * sent / examples] * 5, dtype=torch.float64)}
        assert config.algorithm.privacy_spent(None, server).epsilon == float(row.removeprefix("ADCOL, "))


def test_columns_are_worked_out_by_hand(papers):
    table = fake_table(
        papers,
        columns={
            "mean": {"split": "test", "over": "mean", "rounds": "last"},
            "weighted": {"split": "test", "over": "weighted", "rounds": "best"},
            "worst": {"split": "test", "over": "worst", "rounds": "best5"},
            "x": {"split": "test", "over": {"domain": "x"}, "rounds": "last"},
            "ood": {"split": "ood", "over": "mean", "rounds": "last"},
        },
        rows={"one": {"arm": {"algorithm.name": "fedavg"}, "published": {"mean": 1}}},
        claims=[],
    )
    space = table.space("small", {"seeds": [3]})
    trial = papers.trial_name(Config.read(merged(space.arms[0][0], {"seed": 3})))
    x = dict(enumerate([0.1, 0.9, 0.5, 0.6, 0.7, 0.8, 0.2], start=1))  # by round; y is 0.3 throughout
    point = {"trial": trial, "metric": "accuracy", "point": "global", "split": "test"}
    rows = [point | {"round": r, "domain": "x", "value": v, "n": 30} for r, v in x.items()]
    rows += [point | {"round": r, "domain": "y", "value": 0.3, "n": 10} for r in x]
    rows += [point | {"round": 7, "domain": "x", "value": 1.0, "n": 9, **other} for other in NOT_COUNTED]
    trials = pd.DataFrame([{"trial": trial, "status": "done", "default_eval_point": "global"}])
    found = papers.measure(table, "small", space, tables_of(pd.DataFrame(rows), NO_ROUNDS, trials))
    by_column = found.set_index("column")["value"]
    assert set(found["seed"]) == {3}
    assert by_column["mean"] == pytest.approx(25)
    assert by_column["weighted"] == pytest.approx(100 * (0.9 * 30 + 0.3 * 10) / 40)
    assert by_column["worst"] == pytest.approx(30)  # the lower of 0.3 and x: five rounds at 0.3, then 0.2 and 0.1
    assert by_column["x"] == pytest.approx(20)
    assert "ood" not in by_column


NO_ROUNDS = pd.DataFrame({"trial": []})


def tables_of(metrics, rounds, trials):
    """Return tables with these rows of `metrics`, which no file holds."""
    tables = Tables([], rounds, trials, places={})
    tables.metrics = metrics
    return tables


NOT_COUNTED = ({"metric": "loss"}, {"point": "trained"}, {"split": "val"}, {"trial": "another"})


def test_settings_are_measured_apart_and_only_where_the_paper_has_a_number(papers):
    columns = {s: {"split": "test", "over": "mean", "rounds": "last", "setting": s} for s in ("few", "many", "huge")}
    rows = {
        "one": {"arm": {"algorithm.name": "fedavg"}, "published": {"few": 1, "many": 2}},
        "two": {"arm": {"algorithm.name": "scaffold"}, "published": {"many": 3}},
        "ours": {"arm": {"algorithm.name": "fedprox"}, "published": {}},
    }
    small = {"note": "N.", "seeds": [5], "rounds": 9, "settings": {"few": {"local.epochs": 2}, "many": {"rounds": 4}}}
    table = fake_table(papers, columns=columns, rows=rows, claims=["many: two > one"], small=small)
    space = table.space("small", {"local.lr": 0.5})
    trees = [values for (values,) in space.arms]
    assert [(tree["algorithm"]["name"], tree["rounds"], tree["local"]) for tree in trees] == [
        ("fedavg", 9, {"epochs": 2, "lr": 0.5}),
        ("fedavg", 4, {"lr": 0.5}),
        ("scaffold", 4, {"lr": 0.5}),
        ("fedprox", 9, {"epochs": 2, "lr": 0.5}),
        ("fedprox", 4, {"lr": 0.5}),
    ]
    ids = [papers.trial_name(Config.read(merged(tree, {"seed": 5}))) for tree in trees]
    point = {"round": 9, "metric": "accuracy", "point": "global", "split": "test", "domain": "x", "n": 1}
    metrics = pd.DataFrame([{"trial": name, "value": i / 10} | point for i, name in enumerate(ids)])
    trials = pd.DataFrame([{"trial": name, "status": "done", "default_eval_point": "global"} for name in ids])
    found = papers.measure(table, "small", space, tables_of(metrics, NO_ROUNDS, trials))
    assert found[["row", "column", "value"]].values.tolist() == [
        ["one", "few", 0], ["one", "many", 10], ["two", "many", 20], ["ours", "few", 30], ["ours", "many", 40]
    ]  # fmt: skip


def trials_of_two_rows(papers, columns, **content):
    """A table of the rows one (seeds 0 and 1) and two (seed 0), with rounds of 3 MB down and 1 MB up after a setup."""
    table = fake_table(papers, columns=columns, claims=[], **content)
    space = table.space("small", {})
    curves = {("one", 0): [40, 50, 60], ("one", 1): [40, 42, 44], ("two", 0): [10, 60, 70]}
    metrics, rounds, trials = [], [], []
    for seed in (0, 1):
        for row, (values,) in zip(("one", "two"), space.arms, strict=True):
            trial = papers.trial_name(Config.read(merged(values, {"seed": seed})))
            point = {"trial": trial, "point": "global", "split": "test", "domain": "x", "n": 1, "metric": "accuracy"}
            for number, value in enumerate(curves.get((row, seed), ()), start=1):
                metrics.append(point | {"round": number, "value": value / 100})
            for number in range(4):
                sent = {"bytes_down": 3_000_000, "bytes_up": 1_000_000} if number else {"bytes_down": 5_000_000}
                rounds.append({"trial": trial, "round": number, "bytes_up": 0, "seconds_total": 900.0} | sent)
            if (row, seed) in curves:
                trials.append({"trial": trial, "status": "done", "default_eval_point": "global"})
    tables = tables_of(pd.DataFrame(metrics), pd.DataFrame(rounds), pd.DataFrame(trials))
    found = papers.measure(table, "small", space, tables)
    return found.set_index(["column", "row", "seed"])["value"]


ACCURACY = {"split": "test", "over": "mean", "rounds": "last"}


def test_rounds_bytes_and_speed_ups_by_hand(papers):
    found = trials_of_two_rows(
        papers,
        {
            "a": ACCURACY,
            "rounds": {"reach": "a", "target": 50, "unit": "rounds"},
            "MB": {"reach": "a", "target": 50, "unit": "MB"},
            "faster": {"fewer": "rounds", "than": "two"},
            "up": {"sent": "up", "unit": "MB"},
            "both": {"sent": "both", "unit": "GB"},
            "hours": {"spent": "hours"},
            "each": {"spent": "minutes a round"},
            "best": {"best_of": "a", "unit": "rounds"},
            "until": {"best_of": "a", "unit": "minutes"},
        },
    )
    assert found["rounds"].to_dict() == {("one", 0): 2, ("two", 0): 2, ("one", 1): math.inf}
    assert found["MB"].to_dict() == {("one", 0): 13, ("two", 0): 13, ("one", 1): math.inf}  # 5 + 2 x 4
    assert found["faster"].to_dict() == {("one", 0): 1, ("two", 0): 1}  # of seed 1 there is no row two
    assert set(found["up"]) == {1}
    assert set(found["both"]) == {0.004}
    assert set(found["hours"]) == {1}
    assert set(found["each"]) == {15}
    assert found["best"].to_dict() == {("one", 0): 3, ("two", 0): 3, ("one", 1): 3}
    assert set(found["until"]) == {60}


def test_a_target_may_be_the_lowest_end_of_some_rows_and_differ_in_the_small_form(papers):
    column = {"reach": "a", "target": 99, "unit": "rounds", "small": {"target": ["one", "two"]}}
    found = trials_of_two_rows(papers, {"a": ACCURACY, "rounds": column, "not here": ACCURACY | {"small": False}})
    assert found["rounds"].to_dict() == {("one", 0): 3, ("two", 0): 2, ("one", 1): math.inf}  # (60 + 44) / 2 = 52
    assert "not here" not in found


def test_a_row_that_never_comes_to_the_target_is_shown_and_judged(papers, command):
    table = fake_table(papers, columns={"a": {"spent": "hours"}}, claims=["a: two > one"])
    found = lines(
        [("one", 0, "a", 4.0), ("one", 1, "a", math.inf), ("two", 0, "a", math.inf), ("two", 1, "a", math.inf)]
    )
    shown = command.render(table, "small", found, "the command", markdown=True)
    assert "| one | 4 [1/2] (50) |" in shown
    assert "| two | never (60±1) |" in shown
    assert "- **Holds for some seeds.** a: two > one (1/2 seeds)." in shown


@pytest.mark.parametrize(
    ("values", "judged"),
    [
        ([50, 52, 60, 64], ("holds", "+11.0±1.4", 2)),
        ([50, 52, 52, 54], ("does not hold", "+2.0±0.0", 2)),
        ([50, 52, 52, 64], ("within one sd", "+7.0±7.1", 2)),
        ([50, None, 70, 64], ("one seed, as claimed", "+20.0", 1)),
        ([50, None, 54, 64], ("one seed, not as claimed", "+4.0", 1)),
        ([50, 52, None, None], ("not measured", "", 0)),
    ],
)
def test_claims_compare_rows_at_the_same_seed(values, judged, papers, command):
    claim = papers.Claim("a: two > one + 5", "a", "two", "one", 5.0)
    rows = [("one", 0), ("one", 1), ("two", 0), ("two", 1)]
    found = lines([(*row, "a", value) for row, value in zip(rows, values, strict=True) if value is not None])
    assert command.verdict(claim, found) == judged


OPEN = ("not measured", "", 0)


@pytest.mark.parametrize(
    ("more", "less", "judged"),
    [
        ((70, 0.05, 1, 0.05, 3, 3), (50, 0.05, 1, 0.05, 3, 3), ("holds", "+20.0", 3)),  # 20 - 5 > 1 + 1
        ((50, 0.05, 1, 0.05, 3, 3), (50, 0.05, 1, 0.05, 3, 3), ("does not hold", "+0.0", 3)),
        ((57, 0.05, 1, 0.05, 3, 3), (50, 0.05, 1, 0.05, 3, 3), OPEN),  # the sd of the differences is between 0 and 2
        ((57, 0.05, 5, 0.05, 3, 3), (50, 0.05, 1, 0.05, 3, 3), ("within one sd", "+7.0", 3)),  # between 4 and 6
        ((60, 0.05, 0, 0, 1, 1), (50, 0.05, 0, 0, 1, 1), ("one seed, as claimed", "+10.0", 1)),
        ((54, 0.05, 0, 0, 1, 1), (50, 0.05, 0, 0, 1, 1), ("one seed, not as claimed", "+4.0", 1)),
        ((55, 0.05, 0, 0, 1, 1), (50, 0.05, 0, 0, 1, 1), OPEN),  # 4.9 to 5.1
        ((60, 0.05, 0, 0, 1, 1), (50, 0.05, 1, 0.05, 3, 3), OPEN),
        ((math.inf, 0, 0, 0, 3, 0), (12, 0.5, 1, 0.05, 3, 3), ("holds", "3/3 seeds", 3)),
        ((12, 0.5, 1, 0.05, 3, 3), (math.inf, 0, 0, 0, 3, 0), ("does not hold", "0/3 seeds", 3)),
        ((math.inf, 0, 0, 0, 3, 0), (math.inf, 0, 0, 0, 3, 0), ("does not hold", "+0.0", 3)),
        ((30, 0.5, 1, 0.05, 3, 2), (12, 0.5, 1, 0.05, 3, 3), OPEN),
    ],
)
def test_printed_means_decide_where_any_seeds_with_these_would(more, less, judged, papers):
    verdicts = importlib.import_module("_verdicts")
    claim = papers.Claim("a: two > one + 5", "a", "two", "one", 5.0)
    assert verdicts.verdict_of_means(claim, verdicts.Mean(*more), verdicts.Mean(*less)) == judged


MEANS = "table,form,row,column,mean,sd,reached,seeds,source,configuration\n"
PRINTED = "table,form,claim,answer,gap,seeds,configuration\n"


@pytest.fixture
def stored(papers, monkeypatch, tmp_path):
    module = importlib.import_module("_stored")
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    (tmp_path / "means.csv").write_text(MEANS)
    (tmp_path / "printed.csv").write_text(PRINTED)
    return module


def test_values_are_stored_by_row_and_seed_and_later_ones_replace_them(papers, stored, command, monkeypatch, capsys):
    table = fake_table(papers)
    stored.store(table, "small", lines([("one", 0, "a", 40.0), ("two", 0, "a", 70.0)]))
    assert stored.store(table, "small", lines([("one", 0, "a", 41.5), ("one", 1, "a", 42.0)])) == "t_small.csv"
    values, left_out = stored.load(table, "small")
    assert values[["row", "seed", "value"]].values.tolist() == [["one", 0, 41.5], ["one", 1, 42.0], ["two", 0, 70.0]]
    assert left_out == []
    monkeypatch.setattr(command, "read_table", lambda name: table)
    monkeypatch.setattr(command, "run_sweep", None)
    assert command.main(["t", "--small", "--stored", "--markdown"]) == 0
    assert "| two | 70.0 (60.00±1.00) |" in capsys.readouterr().out


def test_curves_are_stored_by_round_and_left_out_where_the_configuration_is_another(papers, stored, monkeypatch):
    columns = importlib.import_module("_columns")
    scores = pd.DataFrame(
        [
            (1, "test", "accuracy", "global", 0.25),
            (1, "test", "accuracy", "global", 0.5),
            (3, "test", "accuracy", "global", 1.0),
        ],
        columns=["round", "split", "metric", "point", "value"],
    )
    trial = columns.Trial(scores, pd.DataFrame(), "global")
    table = fake_table(papers)
    rules = table.columns | {"best": {"split": "test", "over": "mean", "rounds": "best"}}
    curves = columns.curves(rules, {("one", None, 0): trial})
    assert curves.values.tolist() == [["one", 0, "a", 1, 37.5], ["one", 0, "a", 3, 100.0]]
    assert stored.store_curves(table, "small", curves) == "curves/t_small.csv"
    stored.store_curves(table, "small", curves.assign(value=curves["value"] / 3))
    assert stored.load_curves(table, "small")[["round", "value"]].values.tolist() == [[1, 12.5], [3, 33.333]]
    other = fake_table(papers, small={"note": "N.", "seeds": [0, 1], "rounds": 7})
    assert stored.load_curves(other, "small").empty


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, {"one", "two"}),
        ({"small": {"note": "Other words.", "seeds": [0, 1, 2], "metrics.drift": True}}, {"one", "two"}),
        ({"small": {"note": "N.", "seeds": [0, 1], "rounds": 7}}, set()),
        ({"columns": {"a": {"split": "test", "over": "mean", "rounds": "best"}}}, set()),
        ({"rows": {"one": {"arm": {"algorithm.name": "fedprox"}, "published": {"a": 50.0}}}}, {"two"}),
    ],
)
def test_values_of_another_configuration_or_version_are_left_out_and_named(changes, kept, papers, stored, monkeypatch):
    before = fake_table(papers)
    stored.store(before, "small", lines([("one", 0, "a", 40.0), ("two", 0, "a", 70.0)]))
    rows = before.content["rows"] | changes.get("rows", {})
    now = fake_table(papers, **changes | {"rows": rows})
    values, left_out = stored.load(now, "small")
    assert set(values["row"]) == kept
    missing = [row for row in ("one", "two") if row not in kept]
    assert left_out == [f"t_small.csv: {row} (a) is of another configuration or version" for row in missing]
    monkeypatch.setattr(stored.rayfed, "__version__", "0.0.9")
    assert stored.load(now, "small")[0].empty


def test_a_changed_default_makes_values_older(papers, stored, monkeypatch):
    table = fake_table(papers)
    given = fake_table(papers, small={"note": "N.", "seeds": [0, 1], "local.lr": Local().lr})
    hashes = stored.configurations(table, "small")
    assert stored.configurations(given, "small") == hashes
    monkeypatch.setitem(Local.__init__.__kwdefaults__, "lr", 0.02)
    later = stored.configurations(table, "small")
    assert set(later) == set(hashes)
    assert not set(later.values()) & set(hashes.values())


def test_the_contents_of_a_partition_count(papers, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "HOME", tmp_path)
    partition = {"name": "file", "file": "clients.parquet"}
    table, hashes = fake_table(papers, small={"note": "N.", "seeds": [0], "partition": partition}), []
    for content in ("19 clients", "20 clients", "19 clients"):
        (tmp_path / "clients.parquet").write_text(content)
        hashes.append(stored.configurations(table, "small"))
    assert hashes[0] == hashes[2] != hashes[1]


def shown(index, table):
    judged = index.judged(table, "small")
    return index.markdown(["t", *index.counts(judged), index.against(judged)])


def test_the_index_counts_every_claim_and_says_what_one_seed_shows(papers, stored):
    index = importlib.import_module("index")
    claims = ["a: two > one + 5", "a: one > two", "a: two > three"]
    three = {"arm": {"algorithm.name": "fedprox"}, "published": {}}
    table = fake_table(papers, claims=claims, rows=fake_table(papers).content["rows"] | {"three": three})
    values = [(row, seed, "a", value) for row, value in (("one", 40.0), ("two", 70.0)) for seed in (0, 1)]
    stored.store(table, "small", lines([values[0], values[2]]))
    assert shown(index, table) == "| t ||| 1 of 2 | 1 ||| one seed: a: one > two (-30.0) |"
    stored.store(table, "small", lines(values))
    assert shown(index, table) == "| t | 1 ||| 1 ||| a: one > two (-30.0±0.0) |"
    text = index.with_table(f"before {index.BEGIN} old {index.END} after", "| new |")
    assert text == f"before {index.BEGIN}\n\n| new |\n\n{index.END} after"


def test_values_come_before_means_and_means_before_printed_verdicts(papers, stored, tmp_path):
    """And older ones of any kind after all that are of the present configuration."""
    index, table = importlib.import_module("index"), fake_table(papers)
    hashes = stored.configurations(table, "small")
    digest = stored.of_claim(table.claims[0], hashes)
    judged = lambda: index.judged(table, "small")[0][1:]  # noqa: E731
    (tmp_path / "printed.csv").write_text(f"{PRINTED}t,small,a: two > one + 5,does not hold,+2.0±0.1,3,0123abcd\n")
    assert judged() == (("does not hold", "+2.0±0.1", 3), "transcribed", True)
    (tmp_path / "printed.csv").write_text(f"{PRINTED}t,small,a: two > one + 5,within one sd,+5.1±0.4,3,{digest}\n")
    assert judged() == (("within one sd", "+5.1±0.4", 3), "transcribed", False)

    def write_means(two, *configurations):
        pairs = zip(("one", "two"), ("50.0,0.3", two), configurations, strict=True)
        of_rows = [f"t,small,{row},a,{numbers},3,3,a page,{configuration}\n" for row, numbers, configuration in pairs]
        (tmp_path / "means.csv").write_text(MEANS + "".join(of_rows))

    write_means("70.0,0.2", "19 clients", "19 clients")
    assert judged() == (("within one sd", "+5.1±0.4", 3), "transcribed", False)
    write_means("55.1,0.2", hashes["one", "a"], hashes["two", "a"])  # the sd of the differences may be 0.1, and 0.5
    assert judged() == (("within one sd", "+5.1±0.4", 3), "transcribed", False)
    write_means("70.0,0.2", hashes["one", "a"], hashes["two", "a"])
    assert judged() == (("holds", "+5.1±0.4", 3), "means", False)
    stored.store(table, "small", lines([("one", 0, "a", 40.0), ("two", 0, "a", 41.0)]))
    assert judged()[1] == "means"  # of three seeds
    stored.store(table, "small", lines([(row, seed, "a", 40.0) for row in ("one", "two") for seed in (0, 1, 2)]))
    assert judged() == (("does not hold", "+0.0±0.0", 3), "values", False)


@pytest.fixture(scope="module")
def claims():
    """The list of all claims, as data frame."""
    return pd.read_csv(HOME.parents[1] / "docs" / "fidelity" / "claims.csv", keep_default_na=False)


def test_one_command_makes_the_page_and_the_list(command, tmp_path, monkeypatch):
    index = importlib.import_module("index")
    page, of_claims = (path.read_text(encoding="utf-8") for path in (index.PAGE, index.LIST))
    for name, path in (("PAGE", tmp_path / "index.md"), ("LIST", tmp_path / "claims.csv")):
        monkeypatch.setattr(index, name, path)
    for paper in index.PAPERS.values():
        (tmp_path / paper).write_text((HOME.parents[1] / "docs" / "fidelity" / paper).read_text(encoding="utf-8"))
    index.PAGE.write_text(f"{page.partition(index.BEGIN)[0]}{index.BEGIN}{index.END}{page.partition(index.END)[2]}")
    monkeypatch.setattr(sys, "argv", ["index.py"])
    assert index.main() == 0
    assert index.PAGE.read_text(encoding="utf-8") == page
    assert index.LIST.read_text(encoding="utf-8") == of_claims


def test_the_list_has_every_claim_of_every_table(claims):
    listed = claims.groupby("table")["claim"].agg(set).to_dict()
    assert listed == {name: set(from_file(HOME / f"{name}.yaml")["claims"]) for name in NAMES}


def test_a_single_seed_never_holds(claims):
    one = claims[claims["seeds"].astype(str) == "1"]
    assert len(one) > 10
    assert set(one["answer"]) <= {"one seed, as claimed", "one seed, not as claimed"}
    assert set(claims.loc[claims["answer"].isin(["holds", "does not hold"]), "seeds"].astype(int)) == {3}


def test_printed_verdicts_do_not_contradict_printed_means(papers):
    """The differences are those of the means but for rounding, and so are the answers that the means leave open."""
    stored, verdicts, compared = (*map(importlib.import_module, ("_stored", "_verdicts")), 0)
    printed = pd.read_csv(HOME / "measured" / "printed.csv", keep_default_na=False)
    for name, of_table in printed.groupby("table"):
        table = papers.read_table(name)
        means = {
            cell: mean for part in stored.printed_means(table, "small", {}).values() for cell, mean in part.items()
        }
        by_text = {claim.text: claim for claim in table.claims}
        for line in of_table.itertuples():
            claim = by_text[line.claim]
            more, less = (means.get((row, claim.column)) for row in (claim.more, claim.less))
            gap = re.fullmatch(r"([+-][\d.]+)(?:±[\d.]+)?", line.gap)
            if more and less and more.seeds == less.seeds and gap:
                compared += 1
                assert abs(more.value - less.value - float(gap[1])) < more.off + less.off + 0.051, line
                found = verdicts.verdict_of_means(claim, more, less).answer
                assert found in (line.answer, "not measured"), line
    assert compared > 100


def test_measured_numbers_stand_beside_published_ones(papers, command):
    found = lines([("one", 0, "a", 40.0), ("one", 1, "a", 42.0), ("two", 0, "a", 70.0)])
    shown = command.render(fake_table(papers), "small", found, "the command", markdown=True)
    assert "| one | 41.0±1.4 (50.00) |\n| two | 70.0 (60.00±1.00) |" in shown
    assert "Seeds 0, 1." in shown
    assert shown.endswith("\n    the command")
    shown = command.render(fake_table(papers), "small", found, "the command", markdown=False)
    assert re.search(r"^one +a +50.00 +41.0±1.4 +-9.0$", shown, re.MULTILINE)


@pytest.mark.usefixtures("here")  # into which the cut copy goes
def test_a_capped_partition_keeps_that_many_of_every_client(papers):
    partition = {"name": "file", "file": "fashion_mnist_dir0.1_20clients.parquet"}
    small = {"cap": {"train": 100, "test": 30}, "data.name": "fashion_mnist", "partition": partition}
    values = fake_table(papers, small=small).space("small", {}).arms[0][0]
    cut, whole = pd.read_parquet(values["partition"]["file"]), pd.read_parquet(HOME / partition["file"])
    sizes, before = (pd.crosstab(table["client"], table["split"]) for table in (cut, whole))
    assert before.sum(axis="columns").nlargest(2).to_dict() == {12: 8551, 11: 6803}  # as the authors count
    assert sizes["train"].tolist() == before["train"].clip(upper=100).tolist()
    assert sizes["test"].tolist() == before["test"].clip(upper=30).tolist()
    assert len(cut.merge(whole)) == len(cut) == len(cut.drop_duplicates())


def published_split():
    """Thirty images of three clients, and those that are published: all but client 12's for training."""
    random = np.random.default_rng(0)
    images = random.permutation(30).astype(np.uint8)[:, None, None, None]
    labels, client, is_test = np.arange(30) % 10, random.permutation(np.arange(30) % 3) * 6, np.arange(30) % 4 == 0
    kept = random.permutation(np.flatnonzero((client != 12) | is_test))
    arrays = {"images": images[kept, 0], "labels": labels[kept], "client": client[kept], "is_test": is_test[kept]}
    return images, labels, client, is_test, arrays


def test_the_client_whose_training_part_is_missing_has_what_nobody_else_has():
    images, labels, client, is_test, published = published_split()
    holder, tests = importlib.import_module("fashion_split").holders(images, labels, published)
    assert holder.tolist() == client.tolist()
    assert tests.tolist() == is_test.tolist()


@needs("FashionMNIST/raw")
@needs("fashion_mnist_dir0.1_20clients.npz")
def test_the_split_of_fashion_mnist_follows_from_the_published_files(tmp_path):
    assert importlib.import_module("fashion_split").main([str(FASHION), str(tmp_path / f"{FASHION.stem}.parquet")]) == 0
    again, kept = (pd.read_parquet(folder / f"{FASHION.stem}.parquet") for folder in (tmp_path, HOME))
    pd.testing.assert_frame_equal(again, kept)


def test_a_table_is_measured_and_printed(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_sweep", run_trials)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "RAYFED_DATA", str(tmp_path))
    tiny = ["rounds=1", "seeds=[0]", "data.per_domain=60", "model.width=0.1", "local.epochs=1"]
    rows = ["--rows", "SOLO", "--rows", "ADCOL*"]
    assert command.main(["adcol_table1", "--small", "--markdown", *rows, *tiny, "local.batch_size=8"]) == 0
    out = capsys.readouterr().out
    (here,) = re.findall(r"^\| ADCOL \| ([\d.]+) \(80.20±0.50\) \|", out, re.MULTILINE)
    assert 0 <= float(here) <= 100
    assert re.search(r"AVG: ADCOL > [^;]*SOLO \(", out)
    assert "| FedAvg | – (78.60±0.60) |" in out
    assert re.search(r"\*\*Not measured\.\*\* AVG: .*ADCOL > [^;]*FedAvg[,;.]", out)
    assert "    python benchmarks/papers/run.py adcol_table1 --small --rows SOLO --rows 'ADCOL*' rounds=1" in out
