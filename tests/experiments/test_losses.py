"""Losses by name: torch's, and functions and classes of the user's own."""

import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rayfed
from rayfed import UsageError
from rayfed.losses.base import build_loss

OUTPUTS = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.0, -2.0], [0.1, 0.2, 0.3]])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_losses.py").write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        import torch.nn.functional as F
        from torch import nn
        from rayfed.core.options import option

        def focal(outputs, y, *, gamma=2.0):
            losses = F.cross_entropy(outputs, y, reduction="none")
            return ((1 - (-losses).exp()) ** gamma * losses).mean()

        @dataclass(frozen=True, kw_only=True)
        class Scaled:
            factor: float = option(1.0, above=0, help="factor")

            def __call__(self, outputs, y):
                return self.factor * F.cross_entropy(outputs, y)

        class Smooth(nn.CrossEntropyLoss):
            def __init__(self, smoothing=0.1):
                super().__init__(label_smoothing=smoothing)

        number = 3
        """)
    )


def clients(classes=3):
    rng = np.random.default_rng(0)
    made = []
    for shift in range(2):
        x = rng.normal(shift, 1, (40, 4)).astype(np.float32)
        y = (x.sum(1) > 4 * shift).astype(int) + (classes > 2) * (x[:, 0] > 1 + shift)
        made.append({"train": (x[:25], y[:25]), "val": (x[25:30], y[25:30]), "test": (x[30:], y[30:])})
    return made


def run(values, *, classes=3, **more):
    quick = {"model": {"name": "mlp", "hidden": [5]}, "rounds": 2, "local.lr": 0.1}
    return rayfed.run(quick | values, clients=clients(classes), quiet=True, **more)


@pytest.mark.parametrize(
    ("name", "options", "y", "expected"),
    [
        (
            "cross_entropy",
            {"weight": [1, 2, 3]},
            [0, 1, 2],
            lambda y: F.cross_entropy(OUTPUTS, y, torch.tensor([1.0, 2, 3])),
        ),
        (
            "bce_with_logits",
            {"pos_weight": 3},
            [[0, 1, 1]] * 3,
            lambda y: F.binary_cross_entropy_with_logits(OUTPUTS, y.float(), pos_weight=torch.tensor(3.0)),
        ),
        ("mse", {}, [[1, 2, 3]] * 3, lambda y: F.mse_loss(OUTPUTS, y.float())),
        ("l1", {}, [[1, 2, 3]] * 3, lambda y: F.l1_loss(OUTPUTS, y.float())),
        ("smooth_l1", {"beta": 0.5}, [[1, 2, 3]] * 3, lambda y: F.smooth_l1_loss(OUTPUTS, y.float(), beta=0.5)),
        ("own_losses:Scaled", {"factor": 3}, [0, 1, 2], lambda y: 3 * F.cross_entropy(OUTPUTS, y)),
        (
            "own_losses:Smooth",
            {"smoothing": 0.2},
            [0, 1, 2],
            lambda y: F.cross_entropy(OUTPUTS, y, label_smoothing=0.2),
        ),
    ],
)
def test_values_are_those_of_torch(name, options, y, expected):
    y = torch.tensor(y)
    torch.testing.assert_close(build_loss(name, options)(OUTPUTS, y), expected(y))


def test_one_logit_tells_two_classes_apart():
    result = run({"loss.name": "bce_with_logits", "metrics.auroc": True, "rounds": 15}, classes=2)
    assert result.model()(torch.zeros(1, 4)).shape == (1, 1)
    scores = result.metrics.query("round == 15 and split == 'test'")
    assert set(scores["metric"]) == {"accuracy", "loss", "auroc"}
    for number, client in enumerate(clients(2)):
        x, y = client["test"]
        right = np.mean((result.model()(torch.from_numpy(x)) > 0)[:, 0].numpy() == y)
        assert scores.query(f"metric == 'accuracy' and client == {number}")["value"].item() == pytest.approx(right)
    assert result.trials["loss.name"].tolist() == ["bce_with_logits"]


def test_regression_has_errors_and_no_accuracy():
    part = np.ones((6, 4), np.float32), np.linspace(0, 1, 6).astype(np.float32)
    given = [{"train": part, "test": part}] * 2
    result = rayfed.run({"loss.name": "mse", "model.name": "mlp", "local.batch_size": 3}, clients=given, quiet=True)
    assert set(result.metrics["metric"]) == {"loss", "mae", "rmse", "r2"}


def test_a_loss_of_ones_own_runs_resumes_sweeps_and_is_loaded_without_giving_it_again():
    chosen = {"loss.name": "own_losses:focal", "loss.gamma": 3}
    result = run(chosen, experiment="own")
    other = run({"loss.name": "own_losses:focal"}, experiment="own")
    plain = run({}, experiment="own")
    assert len({result.trial, other.trial, plain.trial}) == 3
    again = rayfed.load("results", "own", result.trial, clients=clients())
    for name, value in result.server["weights"].items():
        assert torch.equal(again.server["weights"][name], value)
    longer = run(chosen | {"rounds": 4, "resume": True}, experiment="own")
    straight = run(chosen | {"rounds": 4}, experiment="straight")
    for name, value in straight.server["weights"].items():
        assert torch.equal(longer.server["weights"][name], value)
    space = {
        "experiment": "swept",
        "model": {"name": "mlp", "hidden": [5]},
        "rounds": 1,
        "search.max_concurrent": 1,
        "arms": [{"loss.name": "own_losses:focal", "loss.gamma": {"grid": [1, 2]}}, {"loss.name": "cross_entropy"}],
    }
    swept = rayfed.sweep(space, clients=clients(), quiet=True)
    assert swept.trials["status"].tolist() == ["done"] * 3
    assert sorted(swept.trials["loss.name"]) == ["cross_entropy", *["own_losses:focal"] * 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss.name": "cross_entropie"}, "loss.name=cross_entropie: did you mean cross_entropy?"),
        ({"loss.name": "bce_with_logits"}, "loss.name=bce_with_logits has one logit for 3 classes"),
        ({"loss.name": "own_losses:focal", "loss.beta": 1}, "loss.name=own_losses:focal: is called with .*'beta'"),
        ({"loss.name": "own_losses:Smooth", "loss.beta": 1}, "loss.name=own_losses:Smooth: is made with .*'beta'"),
    ],
)
def test_what_cannot_be_is_one_line(values, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        run(values)


def test_a_loss_that_does_not_fit_the_labels_is_one_line():
    with pytest.raises(UsageError, match=r"^loss: fails on outputs torch.float32 \[2, 1\] and labels torch.int64 \["):
        run({}, model=lambda: torch.nn.Linear(4, 1), loss=F.binary_cross_entropy_with_logits)
    with pytest.raises(UsageError, match=r"^loss.name=mse: loss= is given in place of loss.\*"):
        run({"loss.name": "mse"}, loss=F.cross_entropy)
