"""Payloads arrive as they were sent; fingerprints notice every difference."""

import numpy as np
import torch

from rayfed.core.trees import (
    clone,
    named_tensors,
    nbytes,
)
from rayfed.engine.serialization import Packed, bytes_by_field, pack, state_hash, unpack

PAYLOAD = {
    "floats": torch.randn(3, 4),
    "strided": torch.randn(4, 6)[:, ::2],
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "half": torch.randn(5).to(torch.bfloat16),
    "double": torch.randn(2, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "counts": torch.arange(5),
    "bytes": torch.arange(6, dtype=torch.uint8),
    "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
    "nested": {"list": [torch.ones(1), (torch.zeros(2), None)], "text": "kept", "number": 3},
}


def test_pack_and_unpack_give_back_every_bit():
    back = unpack(pack(PAYLOAD), torch.device("cpu"))
    assert state_hash(back) == state_hash(PAYLOAD)
    for (path, sent), (other, found) in zip(named_tensors(PAYLOAD), named_tensors(back), strict=True):
        assert (path, sent.dtype, sent.shape) == (other, found.dtype, found.shape)
        assert torch.equal(sent, found)
    assert back["nested"]["text"] == "kept"
    assert back["nested"]["number"] == 3
    assert back["nested"]["list"][1][1] is None
    assert isinstance(back["nested"]["list"][1], tuple)


def test_tensors_without_elements_come_back():
    back = unpack(pack({"rows": torch.zeros(0, 3)}), torch.device("cpu"))["rows"]
    assert back.shape == (0, 3)
    assert back.dtype == torch.float32


def test_packed_is_plain_bytes_and_unpacked_is_our_own():
    weights = torch.ones(3, requires_grad=True)
    packed = pack({"w": weights})["w"]
    assert isinstance(packed, Packed)
    assert packed.data.dtype == np.uint8
    assert packed.data.nbytes == 12
    packed.data.setflags(write=False)  # as in the object store
    back = unpack({"w": packed}, torch.device("cpu"))["w"]
    back.add_(1)
    assert weights.tolist() == [1, 1, 1]
    assert not back.requires_grad


def test_bytes_are_those_of_the_tensors():
    assert nbytes(PAYLOAD["half"]) == 10
    assert nbytes(PAYLOAD["nested"]) == 12
    sizes = {"flags": PAYLOAD["flags"], "half": PAYLOAD["half"], "count": PAYLOAD["count"], "nothing": torch.zeros(0)}
    assert bytes_by_field(sizes) == {"flags": 3, "half": 10, "count": 8}  # a field without bytes is none


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


def test_fingerprints_see_values_and_not_their_layout():
    image = torch.randn(2, 3, 4, 5)
    assert state_hash([image]) == state_hash([image.contiguous(memory_format=torch.channels_last)])


def test_a_dotted_name_and_a_nested_one_may_be_the_same_path():
    tree = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}
    assert state_hash(tree) == state_hash(clone(tree)) != state_hash({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}})
