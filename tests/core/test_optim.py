"""Local optimisers agree with torch.optim, one client at a time and under vmap."""

import pytest
import torch
from torch import nn

from rayfed.core.network import vectorised
from rayfed.core.optim import SGD, Adam

STEPS = 6


def case(ours, theirs, *, clip_norm=None, decoupled=False, **options):
    """Return our optimiser with `options`, and a function that makes torch's of parameters."""

    def make(parameters):
        optimizer = theirs(parameters, **options)
        if clip_norm is not None:
            optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, clip_norm) and None)
        return optimizer

    extra = {"decoupled": True} if decoupled else {}
    return ours(clip_norm=clip_norm, **options, **extra), make


CASES = {
    "plain": case(SGD, torch.optim.SGD, lr=0.1),
    "decay": case(SGD, torch.optim.SGD, lr=0.1, weight_decay=0.3),
    "momentum": case(SGD, torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": case(SGD, torch.optim.SGD, lr=0.05, momentum=0.8, weight_decay=0.1, nesterov=True),
    "adam": case(Adam, torch.optim.Adam, lr=0.03),
    "all": case(Adam, torch.optim.Adam, lr=0.03, betas=(0.7, 0.95), eps=1e-3, weight_decay=0.2),
    "adamw": case(Adam, torch.optim.AdamW, lr=0.03, weight_decay=0.2, decoupled=True),
    # the norms are 4 to 24
    "sgd, clipped": case(SGD, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, clip_norm=9.0),
    "adam, clipped": case(Adam, torch.optim.Adam, lr=0.03, eps=1.0, clip_norm=9.0),
}


def start(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(4, 3, generator=generator), "b": torch.randn(5, generator=generator)}


def grads_at(step, seed=0):
    return {name: value * (step + 1) for name, value in start(100 * seed + step + 1).items()}


def by_torch(make, seed=0, names=("a", "b")):
    parameters = {name: nn.Parameter(value.clone()) for name, value in start(seed).items()}
    optimizer = make([parameters[name] for name in names])
    for step in range(STEPS):
        for name in names:
            parameters[name].grad = grads_at(step, seed)[name]
        optimizer.step()
    return {name: value.detach() for name, value in parameters.items()}


@pytest.mark.parametrize("case", CASES)
def test_several_steps_are_those_of_torch(case):
    ours, theirs = CASES[case]
    weights = start()
    state = ours.init(weights)
    for step in range(STEPS):
        grads = grads_at(step)
        ours.update_(weights, grads, state)
        assert all(torch.equal(grads[name], value) for name, value in grads_at(step).items())  # theirs to keep
    torch.testing.assert_close(weights, by_torch(theirs))
    assert not torch.allclose(weights["a"], start()["a"], atol=0.01)


@pytest.mark.parametrize("case", [name for name in CASES if "clipped" not in name])
def test_a_weight_without_a_gradient_skips_the_step_as_in_torch(case):
    ours, theirs = CASES[case]
    weights = start()
    state = ours.init(weights)
    parameters = {name: nn.Parameter(value) for name, value in start().items()}
    optimizer = theirs(list(parameters.values()))
    for step in range(STEPS):
        grads = grads_at(step)
        if step in (0, 1, 3):
            del grads["b"]
        for name, parameter in parameters.items():
            parameter.grad = grads.get(name)
        ours.update_(weights, {name: value.clone() for name, value in grads.items()}, state)
        optimizer.step()
    torch.testing.assert_close(weights, {name: parameter.detach() for name, parameter in parameters.items()})


@pytest.mark.parametrize("case", CASES)
def test_several_clients_at_once_under_vmap(case):
    ours, theirs = CASES[case]
    seeds = (1, 2, 3)
    weights = {name: torch.stack([start(seed)[name] for seed in seeds]) for name in start()}
    state = torch.vmap(ours.init)(weights) if ours.init(start()) else {}

    def one(weights, grads, state):
        ours.update_(weights, grads, state)
        return weights, state

    if "steps" in state:  # a tensor without a batch dimension of its own comes out of vmap expanded
        state["steps"] = state["steps"].clone()
    for step in range(STEPS):
        grads = {name: torch.stack([grads_at(step, seed)[name] for seed in seeds]) for name in start()}
        with vectorised():
            weights, state = torch.vmap(one)(weights, grads, state)
    for index, seed in enumerate(seeds):
        torch.testing.assert_close({name: value[index] for name, value in weights.items()}, by_torch(theirs, seed))


@pytest.mark.parametrize(
    "ours",
    [
        SGD(lr=0.1, momentum=0.9, weight_decay=0.5, plain_names=frozenset({"b"})),
        Adam(lr=0.1, plain_names=frozenset({"b"})),
        SGD(lr=0.1, clip_norm=1e-3, plain_names=frozenset({"b"})),
        Adam(lr=0.1, clip_norm=1e-3, plain_names=frozenset({"b"})),
    ],
)
def test_plain_names_take_bare_gradient_steps(ours):
    weights = start()
    state = ours.init(weights)
    moments = [value for value in state.values() if isinstance(value, dict)]
    assert all(set(moment) == {"a"} for moment in moments)
    for step in range(STEPS):
        ours.update_(weights, grads_at(step), state)
    torch.testing.assert_close(weights["b"], start()["b"] - 0.1 * sum(grads_at(step)["b"] for step in range(STEPS)))
    assert not torch.allclose(weights["a"], start()["a"] - 0.1 * sum(grads_at(step)["a"] for step in range(STEPS)))
