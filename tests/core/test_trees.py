"""Arithmetic on trees of tensors."""

import torch

from rayfed.core.optim import SGD
from rayfed.core.task import Batch
from rayfed.core.trees import add, clone, named_tensors, scale, stack, state_hash, sub, tree_map, unstack, zeros_like


def test_tree_arithmetic_returns_new_trees():
    a = {"x": torch.tensor([1.0, 2.0]), "y": [torch.tensor(3.0)]}
    b = {"x": torch.tensor([10.0, 20.0]), "y": [torch.tensor(30.0)]}
    before = state_hash([a, b])
    assert add(a, b, alpha=0.5)["x"].tolist() == [6, 12]
    assert sub(b, a)["y"][0].item() == 27
    assert scale(a, 2)["x"].tolist() == [2, 4]
    assert zeros_like(a)["y"][0].item() == 0
    copied = clone(a)
    copied["x"].add_(1)
    assert tree_map(torch.neg, a)["x"].tolist() == [-1, -2]
    assert state_hash([a, b]) == before


def test_stack_and_unstack_are_inverse_and_the_parts_are_their_own():
    trees = [{"w": torch.full((2,), float(k)), "n": torch.tensor(k), "none": {}} for k in range(3)]
    stacked = stack(trees)
    assert stacked["w"].shape == (3, 2)
    assert stacked["n"].tolist() == [0, 1, 2]
    parts = unstack(stacked, 3)
    assert state_hash(parts) == state_hash(trees)
    parts[0]["w"].fill_(9)
    assert stacked["w"][0].tolist() == [0, 0]


def test_trees_keep_named_tuples_and_plain_values():
    tree = {"batch": Batch(torch.zeros(1), torch.ones(1)), "optimizer": SGD(lr=0.1), "n": 3, "w": torch.ones(1)}
    mapped = tree_map(lambda x: x + 1, tree)
    assert isinstance(mapped["batch"], Batch)
    assert mapped["optimizer"] is tree["optimizer"]
    assert mapped["n"] == 3
    assert [path for path, _ in named_tensors({"a": [torch.ones(1), {"b": torch.ones(1)}]})] == ["a.0", "a.1.b"]
