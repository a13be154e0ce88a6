"""Notes on data with which a study may go wrong, and what the plan and the messages say."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from helpers.commands import command
from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.run_summary import notes, run_summary
from rayfed.experiments.space import configurations, read_space
from rayfed.experiments.sweep import plan_sweep

MODEL = {"model": {"name": "mlp", "hidden": [4]}, "local.batch_size": 8}


@pytest.fixture
def table(tmp_path: Path) -> dict:
    """Two hospitals; b has two healthy patients of 80, so that its validation part of six is of one class."""
    random = np.random.default_rng(0)
    age = random.normal(50, 9, 160)
    frame = pd.DataFrame({"age": age, "chol": 200 * age, "sex": [0, 1] * 80})
    frame["hospital"] = ["a"] * 80 + ["b"] * 80
    frame["ill"] = [number % 2 if number < 80 else int(number > 81) for number in range(160)]
    frame.to_csv(tmp_path / "heart.csv", index=False)
    data = {"name": "csv", "file": str(tmp_path / "heart.csv"), "features": ["age", "chol", "sex"], "label": "ill"}
    return {"data": {**data, "client": "hospital"}, **MODEL}


def notes_of(values: dict, **more) -> list[str]:
    return notes(make_plan(Config.read(values, more)))


class TestNotes:
    def test_sites_whose_parts_have_one_class(self, table: dict) -> None:
        found = notes_of(table, **{"select.metric": "auroc"})
        assert found[0] == (
            "auroc: the val examples of b (6) are of one class; where a value is not defined, the client has no say in "
            "the choice of rounds and hyperparameters"
        )
        assert not any("auroc" in note for note in notes_of(table))

    def test_columns_of_other_scales(self, table: dict) -> None:
        assert notes_of(table) == [
            "chol is about 200 times as large as age; standardise columns, as with data.standardize=global"
        ]
        assert notes_of(table, **{"data.standardize": "client"}) == []

    def test_labels_that_name_the_clients(self, table: dict, tmp_path: Path) -> None:
        more = {"data.label": "hospital", "data.features": ["age", "sex"]}
        assert notes_of(table, **more) == [
            "each client has a class of its own and no other; is the label the name of the client?"
        ]

    def test_nothing_is_said_of_images(self) -> None:
        assert notes_of(MODEL) == []


class TestSweeps:
    def summary(self, table: dict, *more: dict) -> str:
        space = read_space({"seeds": [0, 1, 2], "experiment": "e", **table}, *more)
        return plan_sweep(space, configurations(space)).summary()

    def test_seeds_that_share_a_split_are_told_of_it_and_of_the_size_of_the_test_set(self, table: dict, here) -> None:
        arms = {"arms": [{"algorithm.name": "fedavg"}, {"algorithm.name": "solo"}]}
        lines = self.summary(table, arms).splitlines()
        assert lines[1] == (
            "note: heart: 3 seeds share one test set of 40 examples; partition.redraw=true draws a split for each seed"
        )
        assert sum("chol is about" in line for line in lines) == 1  # once, and not for each method

    def test_seeds_with_splits_of_their_own(self, table: dict, here) -> None:
        text = self.summary(table, {"partition.redraw": True, "select.metric": "auroc"})
        assert "note: heart: each of 3 seeds draws a split of its own, and each chooses for itself" in text
        assert "note: seed 1: auroc: the val examples of b (6) are of one class" in text

    def test_a_grid_over_the_seed_of_the_partition_is_refused(self, table: dict) -> None:
        with pytest.raises(
            UsageError, match=r"partition\.seed: a grid of splits would look like a hyperparameter; give"
        ):
            read_space({**table, "partition.seed": {"grid": [0, 1]}})


class TestPlans:
    @pytest.mark.parametrize(
        ("algorithm", "policy"),
        [
            ("fedavg", "averaged by the server, running statistics included"),
            ("fedbn", "left with the client, running statistics included"),
        ],
    )
    def test_say_what_the_method_does_with_batch_norm(self, algorithm: str, policy: str) -> None:
        values = {"algorithm.name": algorithm, "model": {"name": "digits_cnn", "width": 0.125}}
        text = run_summary(make_plan(Config.read(values)))
        assert f"batch norm  5 layers, {policy}" in text

    def test_number_the_words_of_labels(self, table: dict, capsys) -> None:
        text = run_summary(make_plan(Config.read(table, {"data.label": "hospital", "data.client": None})))
        assert "2 classes (0 a, 1 b)" in text
        data = [f"data.{key}={value}" for key, value in table["data"].items() if key not in ("features", "label")]
        arguments = [*data, "data.features=[age]", "data.label=hospital"]
        assert command("partition")(arguments) == 0
        assert "2 classes (0 a, 1 b)" in capsys.readouterr().out


class TestMessages:
    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"lr": 0.1}, "lr: no such key; did you mean local.lr?"),
            ({"batch-size": 8}, "batch-size: no such key; did you mean local.batch_size?"),
            ({"alpha": 0.1, "partition.name": "dirichlet"}, "alpha: no such key; did you mean partition.alpha?"),
            ({"mu": 1, "algorithm.name": "fedprox"}, "mu: no such key; did you mean algorithm.mu?"),
            ({"algorithm": {"name": "ditto", "lambda": 1}}, "algorithm.lambda: no such key; λ is algorithm.mu"),
            ({"algorithm": {"name": "pfedme", "lambda": 1}}, "algorithm.lambda: no such key; λ is algorithm.lam"),
            ({"lambda": 1, "algorithm.name": "ditto"}, "lambda: no such key; did you mean algorithm.mu (λ)?"),
            ({"clientz": 3}, "clientz: no such key; "),
        ],
    )
    def test_of_unknown_keys(self, values: dict, words: str) -> None:
        with pytest.raises(UsageError) as refused:
            Config.read(values)
        assert str(refused.value).startswith(words)

    def test_of_a_metric_that_returns_a_number(self, tmp_path: Path, monkeypatch) -> None:
        (tmp_path / "own_metric.py").write_text(
            "from rayfed.metrics.base import OfPredictions\n\n\n"
            "class Share(OfPredictions):\n    def measure(self, logits, y):\n        return 0.5\n\n\n"
            "class Numbers(OfPredictions):\n    def measure(self, logits, y):\n        return [0.5]\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        file = tmp_path / "own_metric.py"
        for name, line in (("Share", 5), ("Numbers", 10)):
            with pytest.raises(UsageError) as refused:
                make_plan(Config.read({**MODEL, f"metrics.own_metric:{name}": True}))
            assert str(refused.value) == (
                f"metrics.own_metric:{name}: {name}.measure ({file}, line {line}) returned float; "
                'return a list of values, such as [Value("name", number, len(y))] with rayfed.metrics.base.Value'
            )
