"""All methods with models that are not made for the data: words with tied weights, and spare outputs in bfloat16."""

import contextlib
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from helpers.federations import Adapter, blueprint, simulate
from rayfed.algorithms import ALGORITHMS
from rayfed.core.errors import UsageError
from rayfed.data.user_clients import user_population
from rayfed.experiments.checks import check_trial
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.models.split_model import ensure_split

RNG = np.random.default_rng(0)
BATCH_NORM = {"dp_fedbn", "fedbn", "gaussian_dp_fedbn"}
LORA = {"flora", "het_lora"}
REFUSED = {
    "bfloat16": LORA | {"harmofl"},
    "words": BATCH_NORM | LORA | {"faug", "feddebias", "fedmix", "fedreg", "harmofl", "mixup", "vhl"},
}
OPTIONS = {"dp_adcol": {"server_batch_size": 10}, "fedgen": {"server_steps": 2}}


def clients(words):
    def part(n):
        x = RNG.integers(0, 20, (n, 7)) if words else RNG.normal(size=(n, 6)).astype(np.float32)
        return x, np.arange(n) % 3

    return user_population([{"train": part(20), "val": part(6), "test": part(6)} for _ in range(3)], None, classes=True)


class Words(nn.Module):
    """The mean of embeddings; the embedding is also the last layer, whose 20 outputs are words."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.middle(self.embedding(x).mean(1)).tanh())


class Half(nn.Module):
    """Computes its features in float32 and its ten outputs in bfloat16."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.out = nn.Linear(8, 10, dtype=torch.bfloat16)

    def forward(self, x):
        return self.out(self.body(x).bfloat16())


MODELS = {"words": Words, "bfloat16": Half}
DATA = {kind: clients(words=kind == "words") for kind in MODELS}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_trains_or_says_why_not(name, kind):
    population = DATA[kind]
    dtype = torch.long if kind == "words" else torch.float32
    torch.manual_seed(0)
    model = ensure_split(MODELS[kind](), population.shape, dtype)
    if name in BATCH_NORM and dtype == torch.float32:
        model.features.body[1] = nn.BatchNorm1d(8)
    algorithm = Config.read({"algorithm": {"name": name, **OPTIONS.get(name, {})}}).algorithm
    plan = blueprint(algorithm, population, model=model, rounds=1, batch_size=10)
    if name in REFUSED[kind]:
        with pytest.raises(UsageError, match=f"algorithm.name={name}: (needs|the model has no)"):
            check_trial(plan, population)
        return
    has_global = plan.global_model(population)[0] is not None
    point = algorithm.traits.default_eval_point if has_global else "downloaded"
    _, records = simulate(plan, population, points=[point])
    assert all(np.isfinite(score.value) for record in records for score in record.scores)


class Whole(nn.Module):
    """Ends in a product, not in a layer, and returns an object, as models of transformers do."""

    def __init__(self, name):
        super().__init__()
        batch_norm, linear = name in BATCH_NORM, nn.Linear(6, 8)
        self.body = nn.Sequential(
            nn.Flatten(),
            Adapter(linear) if name in LORA else linear,
            nn.BatchNorm1d(8) if batch_norm else nn.Identity(),
        )
        self.w = nn.Parameter(torch.randn(8, 10))

    def forward(self, x):
        return SimpleNamespace(logits=torch.relu(self.body(x)) @ self.w)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_methods_train_whole_models_or_declare_that_they_split(name):
    """`needs_split` is declared where it is needed: every other method trains, with the names that the model has."""
    x, y = RNG.normal(size=(20, 1, 2, 3)).astype(np.float32), np.arange(20) % 3
    people = [dict.fromkeys(("train", "val", "test"), (x + shift, y)) for shift in range(3)]
    config = Config.read({"algorithm": {"name": name, **OPTIONS.get(name, {})}, "local.batch_size": 10})
    with contextlib.ExitStack() as stack:
        if config.algorithm.traits.needs_split:
            stack.enter_context(pytest.raises(UsageError, match=f"^algorithm.name={name}: needs a model that is split"))
        plan = make_plan(config, Given(clients=people, model=lambda: Whole(name)))
    if config.algorithm.traits.needs_split:
        return
    has_global = plan.blueprint.global_model(plan.population)[0] is not None
    _, records = simulate(
        dataclasses.replace(plan.blueprint, rounds=1),
        plan.population,
        points=[config.algorithm.traits.default_eval_point if has_global else "downloaded"],
    )
    assert records
    assert "w" in plan.blueprint.context(plan.population, "cpu").task.trainable
