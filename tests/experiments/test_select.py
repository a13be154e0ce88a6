"""`select.metric`: one metric chooses rounds, hyperparameters and models; compared with choices made by hand."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import rayfed
from helpers.score_rows import row
from rayfed.core.errors import UsageError
from rayfed.core.round_record import BestRound, Record, Selection
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.metrics.base import OfPredictions, Value
from rayfed.reports.render import render
from rayfed.reports.summary import View

QUICK = {
    "data": {"domains": ["plain", "font"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"batch_size": 8, "lr": 0.3},
    "rounds": 6,
}


@dataclass(frozen=True, kw_only=True)
class Margin(OfPredictions):
    """The mean margin of class 3, which a client without examples of it does not have."""

    def measure(self, logits, y):
        of_class = logits[y == 3]
        yield Value("margin", float(of_class[:, 3].mean()) if len(of_class) else math.nan, len(y))


@dataclass(frozen=True, kw_only=True)
class Never(OfPredictions):
    def measure(self, logits, y):
        yield Value("never", math.nan, len(y))


@dataclass(frozen=True, kw_only=True)
class Both(OfPredictions):
    def measure(self, logits, y):
        return [Value("first", 0.0, len(y)), Value("second_error", 0.0, len(y))]


OWN = "test_select:Margin"


def means(result, metric, split="val"):
    """Return the mean of a metric over clients by round."""
    rows = result.metrics.query("metric == @metric and split == @split and client >= 0")
    return rows.groupby("round")["value"].mean()


def run(tmp_path, **values):
    return rayfed.run({**QUICK, "results": str(tmp_path), **values})


class TestChoice:
    @pytest.mark.parametrize(
        ("metric", "best"), [("ece", "idxmin"), ("loss", "idxmin"), ("accuracy_class_9", "idxmax")]
    )
    def test_the_round_is_the_best_one_of_the_metric(self, tmp_path, metric, best):
        more = {"metrics.class_accuracy": True} if "class" in metric else {}
        result = run(tmp_path, **{"select.metric": metric, **more})
        chosen = getattr(means(result, metric), best)()
        rows = rayfed.read_results(str(tmp_path))
        assert rows.criteria == {"run": metric}
        text = render(tmp_path, width=200)
        assert f"test {metric}" in text
        assert f"test {metric} {means(result, metric, 'test').iloc[-1]:.4f} after round" in repr(result)
        assert f"at the round with the best mean validation {metric}" in text
        assert f"test accuracy, %, at the round with the best mean validation {metric}" in render(
            tmp_path, view=View(metric="accuracy"), width=200
        )
        value = means(result, metric, "test")[chosen]
        assert (f"{100 * value:.2f}" if metric != "loss" else f"{value:.4g}") in text

    def test_a_metric_that_is_undefined_for_a_client_counts_for_the_others(self, tmp_path):
        split = {"partition": {"name": "dirichlet", "clients": 4, "alpha": 0.2, "validation": 0.3}}
        result = run(tmp_path, **split, **{"select.metric": OWN, "select.mode": "min"})
        values = result.metrics.query("metric == 'margin' and split == 'val'")
        assert values["value"].isna().any()
        assert not values["higher_is_better"].any()  # as select.mode says
        assert result.trials[["selection_metric", "selection_mode"]].values.tolist() == [["margin", "min"]]
        lowest = means(result, "margin").idxmin()
        expected = means(result, "margin", "test")[lowest]
        assert f"{expected:.4g}"[:5] in render(tmp_path, width=200)

    def test_early_stopping_goes_by_it(self, tmp_path):
        whole = means(run(tmp_path / "whole", **{"rounds": 12, "metrics.ece": True}), "ece").tolist()
        best, waited, stop = math.inf, 0, None
        for round, value in enumerate(whole, 1):
            best, waited = (value, 0) if value < best else (best, waited + 1)
            stop = stop or (round if waited == 2 else None)
        assert stop is not None, "the test needs a curve that rises"
        given = {"rounds": 12, "select.metric": "ece", "early_stopping.patience": 2}
        stopped = run(tmp_path / "stopped", **given)
        assert stopped.rounds["round"].max() == stop
        assert stopped.trials["stop_reason"][0].startswith("validation ece (global)")

    def test_hyperparameters_go_by_it(self, tmp_path):
        swept = rayfed.sweep(
            {**QUICK, "results": str(tmp_path), "experiment": "s", "seeds": [0], "select.metric": "ece"}
            | {
                "search.max_concurrent": 1,
                "rounds": 3,
                "arms": [{"algorithm.name": "fedavg", "local.lr": {"grid": [0.01, 0.3, 1.0]}}],
            }
        )
        values = swept.metrics.query("metric == 'ece' and split == 'val' and client >= 0")
        best = values.groupby(["trial", "round"])["value"].mean().groupby("trial").min().idxmin()
        lr = swept.trials.set_index("trial").loc[best, "local.lr"]
        assert f"local.lr={lr:g} †" in swept.report(width=150).replace("lr=0.30", "lr=0.3")

    def test_another_metric_may_choose_afterwards(self, tmp_path):
        result = run(tmp_path, **{"metrics.ece": True})
        assert "best mean validation accuracy" in result.report(metric="ece")
        text = result.report(select="ece", width=150)
        assert "test ece, %, at the round with the best mean validation ece" in text
        assert f"{100 * means(result, 'ece', 'test')[means(result, 'ece').idxmin()]:.2f}" in text
        with pytest.raises(UsageError, match="select=auroc: no such metric on validation data"):
            result.report(select="auroc")


class TestBestRound:
    def record(self, round, *values):
        scores = [row(round, k, "", "val", "global", "accuracy", value, 1).score for k, value in enumerate(values)]
        return Record(stage="round", round=round, cohort=1, scores=scores)

    @pytest.mark.parametrize(
        ("values", "higher", "lower"),
        [
            ([0.1, 0.3, 0.2], 2, 1),
            ([0.3, 0.3, 0.1, 0.1], 1, 3),  # the earliest wins a tie
            ([math.nan, 0.3, math.nan], 2, 2),
            ([0.3, 0.1 + 0.2], 1, 1),  # differ in the last bit only
        ],
    )
    def test_by_hand(self, values, higher, lower):
        for is_higher, expected in ((True, higher), (False, lower)):
            best = BestRound(Selection(higher_is_better=is_higher))
            for round, value in enumerate(values, 1):
                best.add(self.record(round, value))
                again = BestRound(Selection(higher_is_better=is_higher))
                again.restore(best.state())
                best = again
            assert best.round == expected


NOT_MEASURED = "predictions have no such score"


class TestPlan:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"select.metric": "ece", "partition.validation": 0.0}, "select.metric=ece: needs validation scores"),
            ({"select.metric": "loss", "evaluate.splits": ["test"]}, "select.metric=loss: needs validation scores"),
            ({"select.metric": "ec"}, f"select.metric=ec: {NOT_MEASURED}; did you mean ece?"),
            (
                {"select.metric": "drift"},
                f"select.metric=drift: {NOT_MEASURED}; known: accuracy, auroc, average_precision, balanced_accuracy, "
                "class_accuracy, dice, ece, f1, loss, mean_iou, perplexity",
            ),
            ({"select.metric": "test_select:Never"}, f"select.metric=test_select:Never: {NOT_MEASURED}; known: "),
            ({"select.metric": "test_select:Both"}, f"select.metric=test_select:Both: {NOT_MEASURED}; known: "),
            ({"select.metric": "ece", "metrics.ece": False}, f"select.metric=ece: {NOT_MEASURED}; known: "),
            ({"select.metric": "ece", "select.mode": "max"}, "select.mode=max: ece declares that lower is better"),
            ({"early_stopping.patience": 2, "partition.validation": 0.0}, "early_stopping.patience=2: needs"),
        ],
    )
    def test_what_cannot_choose_is_refused(self, values, message):
        with pytest.raises(UsageError) as error:
            make_plan(Config.read({**QUICK, **values}))
        assert str(error.value).startswith(message)

    @pytest.mark.parametrize(
        ("metric", "labels", "lack"),
        [
            ("auroc", ([0, 0], [1, 1]), "2 have one class only (class 0 at 1, class 1 at 1)"),
            ("f1", ([0, 0], [0]), "2 have one class only (class 0 at 2)"),
            ("average_precision", ([0, 0], [0]), "2 have one class only (class 0 at 2)"),
            ("torchmetrics:classification.BinaryAUROC", ([1], [1, 1]), "2 have one class only (class 1 at 2)"),
            (OWN, ([1], [0, 1]), "1 have one class only (class 0 at 1, class 1 at 2)"),
        ],
    )
    def test_a_metric_without_values_says_why(self, metric, labels, lack):
        rng = np.random.default_rng(0)

        def client(val):
            y = np.array([*val, 0, 1, 0, 1])
            x = rng.normal(size=(len(y), 3))
            return {"train": (x, y), "val": (x[: len(val)], y[: len(val)]), "test": (x, y)}

        config = Config.read({"select.metric": metric})
        model = lambda: torch.nn.Linear(3, 5 if metric == OWN else 2)  # noqa: E731
        with pytest.raises(UsageError) as error:
            make_plan(
                config, Given(clients=list(map(client, labels)), model=model, num_classes=5 if metric == OWN else 2)
            )
        start = f"select.metric={metric}: has no value on any client's validation data: of 2 clients with such data, "
        assert str(error.value) == f"{start}{lack}; give clients more validation examples, or choose by loss"

    def test_numbers_that_are_all_equal_have_no_r2(self):
        x, y = np.ones((4, 3)), np.array([0.5, 2.5, 1.0, 4.0])
        client = {"train": (x, y), "val": (x, np.full(4, 2.5)), "test": (x, y)}
        config = Config.read({"select.metric": "r2", "loss.name": "mse", "model.name": "mlp"})
        with pytest.raises(UsageError, match="data: of 2 clients with such data, 2 have equal labels only; give"):
            make_plan(config, Given(clients=[client, client]))

    @pytest.mark.parametrize(
        ("values", "metric", "mode"),
        [
            ({}, "accuracy", "max"),
            ({"select.metric": "loss"}, "loss", "min"),
            ({"select.metric": "ece"}, "ece", "min"),
            ({"select.metric": OWN}, "margin", "max"),
            ({"select.metric": OWN, "select.mode": "min"}, "margin", "min"),
            ({"select.metric": "margin", f"metrics.{OWN}": True}, "margin", "max"),
            ({"select.metric": "second_error", "metrics.test_select:Both": True}, "second_error", "min"),  # by its name
        ],
    )
    def test_what_chooses_is_recorded(self, values, metric, mode):
        row = make_plan(Config.read({**QUICK, **values})).values()
        assert (row["selection_metric"], row["selection_mode"]) == (metric, mode)
