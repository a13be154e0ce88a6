"""Weighted sums of trees that do not depend on the order of their terms."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.core import exact_sum
from rayfed.core.exact_sum import ExactSum
from rayfed.core.trees import clone, state_hash, tree_map

TERMS = 600


def total(terms):
    result = ExactSum()
    for tree, weight in terms:
        result.add(tree, weight)
    return result


def many_terms(seed=0):
    """Terms of very different sizes with weights that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(TERMS, generator=generator, dtype=torch.float64)
    weights = (weights / weights.sum()).tolist()
    sizes = 10.0 ** (6 * torch.rand(TERMS, generator=generator) - 4)
    trees = [
        {"w": torch.randn(7, generator=generator) * size, "in": [torch.randn((), generator=generator), size.clone()]}
        for size in sizes
    ]
    return list(zip(trees, weights, strict=True))


def test_order_and_grouping_do_not_change_a_bit():
    terms = many_terms()
    forth, back = (sum(tree["w"].double() * weight for tree, weight in order) for order in (terms, terms[::-1]))
    assert not torch.equal(forth, back)  # plain sums do depend on the order
    whole = total(terms).value
    rng = np.random.default_rng(0)
    for groups in (1, 2, 3, 7, 40):
        order = rng.permutation(TERMS)
        cuts = np.sort(rng.choice(TERMS, groups - 1, replace=False))
        parts = [total([terms[k] for k in some]) for some in np.split(order, cuts)]
        merged = ExactSum()
        for part in [parts[k] for k in rng.permutation(groups)]:
            merged.merge(part)
        assert state_hash(merged.value) == state_hash(whole)


def add_at_once(numbers, place, monkeypatch):
    """Let sums be taken in pieces of so many numbers, as on the place, "cpu" or "gpu"."""
    monkeypatch.setattr(exact_sum, "_AT_ONCE", numbers)
    monkeypatch.setattr(exact_sum, "_IN_CACHE", numbers)
    if place == "gpu":
        add_in_groups = exact_sum._add_in_groups
        monkeypatch.setattr(exact_sum, "_add_in_cache", lambda a, b, weights: add_in_groups([(a, b)], weights))


@pytest.mark.parametrize("at_once", [1, 8, 25, 2**20])
@pytest.mark.parametrize("place", ["cpu", "gpu"])
@pytest.mark.parametrize("parts", ["slices", "some slices", "copies"])
def test_terms_that_are_added_in_parts_or_together_give_the_same_bits(parts, place, at_once, monkeypatch):
    draws = torch.Generator().manual_seed(0)
    stacked = {
        "w": torch.randn(6, 4, 3, generator=draws).permute(0, 2, 1),
        "deep": [
            torch.randn(6, generator=draws, dtype=torch.bfloat16),
            torch.randn(6, 2, generator=draws).to(torch.cfloat),
        ],
        "n": torch.arange(6)[:, None].flip(0),
    }
    weights = torch.rand(6, generator=draws, dtype=torch.float64).tolist()
    trees = [tree_map(lambda x, i=i: x[i], stacked) for i in range(6)]
    if parts != "slices":
        trees = [clone(tree) if parts == "copies" or i % 2 else tree for i, tree in enumerate(trees)]
    expected = total(zip(trees, weights, strict=True))
    add_at_once(at_once, place, monkeypatch)
    assert state_hash(total(zip(trees, weights, strict=True)).value) == state_hash(expected.value)
    found = ExactSum()
    found.add_all(trees[:2], weights[:2])
    found.add_all(trees[2:], weights[2:])
    assert state_hash(found.value) == state_hash(expected.value)
    assert state_hash(found.result()) == state_hash(expected.result())


def test_slices_of_a_tensor_are_added_without_a_copy_of_them(monkeypatch):
    stacked = torch.randn(5, 3, 2)
    monkeypatch.setattr(torch, "stack", None)
    found = ExactSum()
    found.add_all([{"w": part} for part in stacked], [0.2] * 5)
    assert found.value["w"].numpy() == pytest.approx(stacked.double().mean(0).numpy())


def test_the_sum_is_the_sum():
    terms = many_terms()
    result = total(terms)
    for index in range(7):
        exact = math.fsum(tree["w"][index].item() * weight for tree, weight in terms)
        assert result.value["w"][index].item() == pytest.approx(exact, abs=TERMS * 2.0**-41)
    assert result.result()["w"].dtype == torch.float32
    assert isinstance(result.result()["in"], list)


def test_negative_weights_and_types():
    terms = [
        ({"h": torch.tensor([1.5], dtype=dtype)}, w) for dtype, w in ((torch.bfloat16, 2.0), (torch.bfloat16, -1.0))
    ]
    found = total(terms).result()["h"]
    assert found.dtype == torch.bfloat16
    assert found.item() == 1.5
    assert total([({"d": torch.tensor([0.1], dtype=torch.float64)}, 1.0)]).result()["d"].item() == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_passes(bad):
    found = total([({"w": torch.tensor([1.0, bad])}, 0.5), ({"w": torch.tensor([1.0, 1.0])}, 0.5)]).result()["w"]
    assert found[0].item() == 1.0
    assert math.isnan(found[1].item()) if math.isnan(bad) else found[1].item() == bad


def test_counters_become_their_greatest():
    trees = [{"n": torch.tensor(k), "seen": torch.tensor([k == 3, False])} for k in (2, 9, 3)]
    found = total([(tree, 1 / 3) for tree in trees]).result()
    assert found["n"].item() == 9
    assert found["n"].dtype == torch.int64
    assert found["seen"].tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_adding_leaves_the_terms_alone(dtype):
    trees = [{"w": torch.tensor([1, 2, 3], dtype=dtype)} for _ in range(3)]
    total([(tree, 0.5) for tree in trees])
    for tree in trees:
        assert tree["w"].tolist() == [1, 2, 3]


def test_nothing_added_is_nothing():
    empty = ExactSum()
    empty.merge(ExactSum())
    assert empty.value is None
    empty.merge(total([({"w": torch.tensor([2.0])}, 1.0)]))
    assert empty.result()["w"].tolist() == [2.0]


class Launches(TorchDispatchMode):
    """Counts the operations that compute; views and lists of them do not."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names[func.overloadpacket.__name__] += 1
        return result

    def total(self):
        views = ("as_strided", "detach", "split", "view", "lift_fresh")
        return sum(count for name, count in self.names.items() if name not in views)


def test_a_gpu_adds_many_clients_in_few_launches():
    """50 clients with a network of 1.6 million weights, whose tensors have a form alone."""
    shapes = {"c1": (32, 3, 3, 3), "c2": (32, 32, 3, 3), "c3": (64, 32, 3, 3), "c4": (64, 64, 3, 3)}
    shapes |= {"b1": (32,), "b2": (32,), "b3": (64,), "b4": (64,), "h": (512, 3136), "hb": (512,), "o": (10, 512)}
    stacked = {name: torch.empty(50, *shape, device="meta") for name, shape in shapes.items()}
    trees = [{name: tensor[i] for name, tensor in stacked.items()} for i in range(50)]
    result = ExactSum()
    result.add_all(trees[:1], [0.02])
    assert set(result.value) == set(shapes)
    with Launches() as launches:
        result.add_all(trees, [0.02] * 50)
    assert launches.names["div"] == 1  # the factors are made, and uploaded, once
    assert launches.names["_foreach_round_"] <= 6
    assert launches.total() < 60
