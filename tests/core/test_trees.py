"""Trees of tensors: arithmetic, sizes of payloads, and fingerprints that notice every difference."""

import io

import torch

from rayfed.core.optim import SGD
from rayfed.core.task import Batch
from rayfed.core.trees import (
    add,
    bytes_by_field,
    clone,
    named_tensors,
    nbytes,
    scale,
    serialised,
    stack,
    state_hash,
    sub,
    tree_map,
    unstack,
    zeros_like,
)


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


def test_bytes_are_those_of_the_tensors():
    nested = {"list": [torch.ones(1), (torch.zeros(2), None)], "text": "kept", "number": 3}
    assert nbytes(nested) == 12
    payload = {"flags": torch.ones(3, dtype=torch.bool), "half": torch.ones(5, dtype=torch.bfloat16)}
    payload |= {"count": torch.tensor(7), "nothing": torch.zeros(0)}
    assert bytes_by_field(payload) == {"flags": 3, "half": 10, "count": 8}  # a field without bytes is none


def test_fingerprints_notice_names_types_shapes_and_single_bits():
    tree = {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(3)}}
    same = {"b": {"c": torch.tensor(3)}, "a": torch.tensor([1.0, 2.0])}
    assert state_hash(tree) == state_hash(same) == state_hash(clone(tree))
    different = [
        {"a": torch.tensor([1.0, 2.0]), "b": {"d": torch.tensor(3)}},
        {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(4)}},
        {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(3, dtype=torch.int32)}},
        {"a": torch.tensor([[1.0, 2.0]]), "b": {"c": torch.tensor(3)}},
        {"a": torch.tensor([2.0, 1.0]), "b": {"c": torch.tensor(3)}},
        {"a": torch.nextafter(tree["a"], torch.tensor(9.0)), "b": {"c": torch.tensor(3)}},
        {"a": torch.tensor([1.0, 2.0])},
        {"a": tree["a"].view(torch.int32), "b": {"c": torch.tensor(3)}},
    ]
    assert len({state_hash(other) for other in [tree, *different]}) == 1 + len(different)
    assert state_hash({"z": torch.tensor(0.0)}) != state_hash({"z": torch.tensor(-0.0)})
    image = torch.randn(2, 3, 4, 5)  # its layout does not count
    assert state_hash([image]) == state_hash([image.contiguous(memory_format=torch.channels_last)])
    same_path = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}
    assert state_hash(same_path) == state_hash(clone(same_path)) != state_hash(same_path | {"a.b": torch.ones(2)})


def test_a_view_is_saved_without_the_tensor_that_it_views():
    large = torch.zeros(1_000_000)
    state = {"row": large[:3], "turned": torch.arange(6.0).reshape(2, 3).t(), "one": torch.ones(()).expand(4)}
    content = bytes(serialised(state))
    assert len(content) < 10_000
    again = torch.load(io.BytesIO(content), weights_only=True)
    assert all(torch.equal(again[name], state[name]) for name in state)
