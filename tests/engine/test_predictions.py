"""The predictions for test examples, which are recorded where they are few: on hosts, after a resume, and in scores."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import rayfed
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.reports.bootstrap import parts_of, replicated

VALUES = {
    "data": {"name": "mini_digits", "domains": ["plain", "font"], "per_domain": 120},
    "model": {"name": "mlp", "hidden": [8]},
    "rounds": 2,
}
METRICS = ("auroc", "average_precision", "f1", "balanced_accuracy", "ece")


def predictions(results: Path) -> pd.DataFrame:
    return pd.read_parquet(results / "run" / "predictions").sort_values(["round", "client"], ignore_index=True)


def test_scores_follow_from_them(here: Path) -> None:
    """Of several classes; those of two are scored many draws at once."""
    pairs = {"metrics": dict.fromkeys(METRICS, True)}
    result = rayfed.run({**VALUES, **pairs}, keep_state=False)
    rows = predictions(here / "results")
    assert rows[["round", "client", "split", "point", "kind"]].drop_duplicates().to_numpy().tolist() == [
        [number, client, "test", "global", "classes"] for number in (1, 2) for client in (0, 1)
    ]
    recorded = result.metrics.query("split == 'test' and round == 2").set_index(["metric", "client"])["value"]
    parts = parts_of(rows[rows["round"] == 2])
    for metric in ("accuracy", *METRICS):
        found = replicated(parts, metric, {})
        for client, one in found.items():
            assert one.score == pytest.approx(recorded[metric, client], abs=1e-6)
    assert replicated(parts, "loss", {}) is None
    assert replicated(parts, "drift", {}) is None


def test_replicates_are_scores_of_the_drawn_examples() -> None:
    random = np.random.default_rng(0)
    outputs = random.normal(size=(40, 2)).astype(np.float32)
    labels = random.integers(0, 2, 40)
    frame = pd.DataFrame(
        [{"client": 3, "domain": "a", "kind": "classes", "n": 40, "outputs": outputs.ravel(), "labels": labels}]
    )
    parts = parts_of(frame)
    accuracy = replicated(parts, "accuracy", {})[3].replicates
    correct = outputs.argmax(1) == labels
    assert accuracy.mean() == pytest.approx(correct.mean(), abs=0.01)
    assert accuracy.std() == pytest.approx(np.sqrt(correct.mean() * (1 - correct.mean()) / 40), rel=0.1)
    at_once, one_by_one = (replicated(parts, "auroc", {})[3].replicates, replicated(parts, "f1", {})[3].replicates)
    assert len(at_once) == 1000
    assert len(one_by_one) == 200


def test_a_single_class_leaves_a_score_undefined() -> None:
    frame = pd.DataFrame(
        [{"client": 0, "domain": "a", "kind": "classes", "n": 3, "outputs": [0.0] * 6, "labels": [1.0] * 3}]
    )
    assert np.isnan(replicated(parts_of(frame), "auroc", {})[0].score)


def test_hosts_and_more_rounds_change_no_number(here: Path) -> None:
    """A trial that goes on keeps the rows of the rounds that it has done."""
    rayfed.run({**VALUES, "rounds": 1, "checkpoint.every": 1, "results": "again"})
    rayfed.run({**VALUES, "resume": True, "checkpoint.every": 1, "results": "again"})
    rayfed.run({**VALUES, "results": "once"})
    again, once = (predictions(here / folder) for folder in ("again", "once"))
    assert again["outputs"].map(list).tolist() == once["outputs"].map(list).tolist()
    assert len(once) == 4


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({}, True),
        ({"evaluate.predictions": False}, False),
        ({"evaluate.splits": ["val"]}, True),
        ({"data.per_domain": 324, "data.domains": []}, True),
        ({"data": {"name": "synthetic", "clients": 100}}, False),  # 10 outputs for each of some ten thousand examples
        ({"data": {"name": "synthetic", "clients": 100}, "evaluate.predictions": True}, True),
    ],
)
def test_they_are_recorded_where_they_are_few_or_asked_for(more: dict, kept: bool) -> None:
    plan = make_plan(Config.read({**VALUES, **more, "model.name": "mlp"}))
    assert plan.evaluation.keep_predictions == kept


def test_they_do_not_make_another_trial() -> None:
    names = {make_plan(Config.read({**VALUES, "evaluate.predictions": asked})).trial for asked in (None, True, False)}
    assert len(names) == 1


def test_numbers_and_several_labels(here: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 3)).astype(np.float32)
    numbers = (x @ [1.0, 2.0, 3.0]).astype(np.float32)[:, None]
    several = (x > 0).astype(np.float32)
    for labels, loss, metric, name in ((numbers, "mse", "mae", "n"), (several, "bce_with_logits", "f1", "s")):
        clients = [{"train": (x[:40], labels[:40]), "test": (x[40:], labels[40:])}]
        values = {"loss.name": loss, "rounds": 1, "results": name}
        width = labels.shape[1]
        result = rayfed.run(values, clients=clients, model=lambda width=width: _linear(width))
        recorded = result.metrics.query("split == 'test'").set_index("metric")["value"]
        found = replicated(parts_of(predictions(here / name)), metric, {})
        assert found[0].score == pytest.approx(recorded[metric], rel=1e-5)


def _linear(width: int):
    import torch

    return torch.nn.Linear(3, width)
