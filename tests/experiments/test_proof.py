"""The proof finds an engine that trains otherwise than PyTorch, and every packaged network passes it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rayfed
from rayfed.core import network
from rayfed.core.modules import copied
from rayfed.core.optim import SGD, Adam
from rayfed.experiments import proof
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.plan_model import UsersModel
from rayfed.experiments.proof import prove_training, takes_plain_steps, why_not_at_once
from rayfed.models.base import build_model

pytestmark = pytest.mark.usefixtures("here")


def clients(shape=(6,), classes=3, integers=None, size=24):
    rng = np.random.default_rng(0)

    def part():
        if integers is None:
            x = rng.normal(size=(size, *shape)).astype(np.float32)
        else:
            x = rng.integers(0, integers, (size, *shape))
        return x, np.arange(size) % classes

    return [{"train": part(), "test": part()} for _ in range(2)]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.spare = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 8)
        self.extra()

    def extra(self):
        pass

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Held(Plain):
    def extra(self):
        self.held = [self.a.weight]

    def forward(self, x):
        return self.b(torch.relu(nn.functional.linear(x, self.held[0], self.a.bias)))


class Checkpointed(Plain):
    def forward(self, x):
        return self.b(checkpoint(lambda z: torch.relu(self.a(z)), x, use_reentrant=False))


class Normalised(Plain):
    def extra(self):
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return super().forward(self.norm(x))


def plan(model, **changes):
    config = Config.read({"experiment": "proof", "rounds": 1, "local.lr": 0.5} | changes)
    return make_plan(config, Given(clients=clients(), model=model))


def zeros_for_unused(found):
    def derivatives(value, leaves, networks, *, create_graph):
        grads = found(value, leaves, networks, create_graph=create_graph)
        return {name: grads.get(name, torch.zeros_like(leaf)) for name, leaf in leaves.items()}

    return derivatives


def scaled(update, factor):
    def changed(self, weights, grads, state):
        update(self, weights, {name: grad * factor for name, grad in grads.items()}, state)

    return changed


BREAKS = {
    "weights are put back before the backward pass": (
        Checkpointed,
        {},
        lambda patch: patch.setattr(network.Network, "_hold", lambda self, run: None),
    ),
    "the module's own tensors keep their values": (
        Held,
        {},
        lambda patch: patch.setattr(network.Network, "_fill", lambda self, values: None),
    ),
    "weights without a gradient decay": (
        Plain,
        {"local.weight_decay": 0.1},
        lambda patch: patch.setattr(network, "_derivatives", zeros_for_unused(network._derivatives)),
    ),
    "momentum is forgotten": (
        Plain,
        {"local.momentum": 0.9},
        lambda patch: patch.setattr(
            SGD, "update_", lambda self, w, g, s: [w[name].sub_(self.lr * grad) for name, grad in g.items()]
        ),
    ),
    "a step is one in a thousand too long": (
        Plain,
        {},
        lambda patch: patch.setattr(SGD, "update_", scaled(SGD.update_, 1.001)),
    ),
    "Adam counts no steps": (
        Plain,
        {"local.optimizer": "adam"},
        lambda patch: patch.setattr(
            Adam, "update_", lambda self, w, g, s: [w[n].sub_(g[n].sign() * self.lr) for n in g]
        ),
    ),
    "batch norm is in evaluation mode": (
        Normalised,
        {},
        lambda patch: patch.setattr(nn.BatchNorm1d, "train", lambda self, mode=True: nn.Module.train(self, False)),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_an_engine_that_trains_otherwise_is_found(name, monkeypatch):
    model, changes, break_engine = BREAKS[name]
    assert plan(model, **changes).unproven is None
    if name.startswith("batch norm"):  # which both would lack
        monkeypatch.setattr("rayfed.experiments.proof.batch_norm_layers", lambda module: [])
        changes = {"batch_norm": "frozen"}
    else:
        break_engine(monkeypatch)
    with pytest.raises(rayfed.UsageError, match="after two steps, compared with plain PyTorch"):
        plan(model, **changes)


def test_a_proof_that_cannot_run_is_a_note_and_the_run_goes_on(capsys):
    class OnlyOnce(Plain):
        """Cannot be trained as it is: it is in a mode in which only copies of it have gradients."""

        def forward(self, x):
            if not hasattr(self, "is_copy"):
                raise RuntimeError("this instance is for copies only")
            return super().forward(x)

        def __deepcopy__(self, memo):
            copy = OnlyOnce()
            copy.load_state_dict(self.state_dict())
            copy.is_copy = True
            return copy

    found = plan(OnlyOnce())
    assert found.unproven.startswith(
        "model: not compared with plain PyTorch, in which a step fails: RuntimeError: this"
    )
    values = {"experiment": "proof", "rounds": 1}
    rayfed.run(values, clients=clients(), model=OnlyOnce(), quiet=False)
    assert "note  model: not compared with plain PyTorch" in capsys.readouterr().err


def test_it_is_made_once_for_a_sweep_on_ray_and_not_again_where_the_trial_runs(monkeypatch):
    calls = []
    monkeypatch.setattr("rayfed.experiments.plan.prove_training", lambda *args: calls.append(args))
    space = {"arms": [{"algorithm": {"name": "fedavg"}}], "seeds": [0], "rounds": 1, "experiment": "proof"}
    rayfed.sweep(space | {"search": {"max_concurrent": 1}}, clients=clients(), model=Plain, quiet=True)
    assert len(calls) == 1


def trial_of(plan, key="model"):
    return Trial(plan.blueprint, plan.population, key)


NETWORKS = [
    ("mlp", {}, (1, 8, 8)),
    ("mlp", {"batch_norm": True}, (1, 8, 8)),
    ("mlp", {"projection": 16}, (1, 8, 8)),
    ("cnn", {"width": 0.25}, (1, 28, 28)),
    ("cnn_rotated", {}, (1, 28, 28)),
    ("cnn_domainbed", {}, (1, 28, 28)),
    ("digits_cnn", {"width": 0.0625}, (3, 28, 28)),
    ("cct", {"depth": 2, "heads": 2, "head_width": 8}, (3, 32, 32)),
    ("har_cnn", {}, (9, 1, 128)),
    ("vgg11_mean", {}, (3, 32, 32)),
    ("torchvision", {"arch": "mobilenet_v3_small"}, (3, 32, 32)),
    ("torchvision", {"arch": "shufflenet_v2_x0_5"}, (3, 32, 32)),
    pytest.param("resnet18", {"norm": "group"}, (3, 32, 32), marks=pytest.mark.slow),
    pytest.param("resnet18", {}, (3, 32, 32), marks=pytest.mark.slow),
    pytest.param("resnet34", {}, (3, 32, 32), marks=pytest.mark.slow),
    pytest.param("resnet50", {}, (3, 32, 32), marks=pytest.mark.slow),
    pytest.param("vgg11", {}, (3, 224, 224), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options", "shape"), NETWORKS)
def test_packaged_networks_train_as_in_torch(name, options, shape):
    torch.manual_seed(0)
    module = build_model(name, options, shape, 3)
    config = Config.read({"experiment": "proof", "rounds": 1, "local.momentum": 0.9, "local.weight_decay": 0.01})
    trial = make_plan(config, Given(clients=clients(shape), model=lambda: copied(module)), tried=True)
    assert prove_training(trial_of(trial, name), UsersModel.of(trial.blueprint.model)) is None


def test_fasttext_trains_as_in_torch():
    module = build_model("fasttext", {"vocabulary": 50}, (7,), 3, torch.int64)
    config = Config.read({"experiment": "proof", "rounds": 1})
    trial = make_plan(config, Given(clients=clients((7,), integers=50), model=lambda: copied(module)), tried=True)
    assert prove_training(trial_of(trial), UsersModel.of(trial.blueprint.model)) is None


def test_methods_that_take_plain_steps():
    names = ("fedavg", "fedbn", "solo", "fedadam", "fedprox", "scaffold", "fedrep", "moon")
    plain = [name for name in names if takes_plain_steps(Config.read({"algorithm.name": name}).algorithm)]
    assert plain == ["fedavg", "fedbn", "solo", "fedadam"]


def test_a_step_of_several_clients_is_compared_with_that_of_one():
    assert why_not_at_once(trial_of(plan(Plain))) is None
    assert "a step of model with torch.vmap gives other weights (a." in why_not_at_once(trial_of(plan(Held)))


class Adapted(Plain):
    """As LoRA starts: one factor of the adapter is zero, so that the gradient of the other one is zero at first."""

    def extra(self):
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.b(torch.relu(self.a(x) + self.up(self.down(x))))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_float64_leaves_no_rounding_that_adam_could_enlarge(monkeypatch, optimizer):
    monkeypatch.setitem(proof._SHARE, torch.float64, 1e-12)
    monkeypatch.setitem(proof._FLOOR, torch.float64, 0.0)
    assert plan(Adapted, **{"local.optimizer": optimizer}).unproven is None
