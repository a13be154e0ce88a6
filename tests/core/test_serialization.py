"""Sizes of payloads; fingerprints notice every difference."""

import io

import torch

from rayfed.core.trees import bytes_by_field, clone, nbytes, serialised, state_hash


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
