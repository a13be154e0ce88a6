"""Values arrive in other processes as they were sent."""

import numpy as np
import pytest
import torch

from rayfed.core.trees import named_tensors, state_hash
from rayfed.distributed.host_actor import pack, unpack

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
    "no_rows": torch.zeros(0, 3),
    "nested": {"list": [torch.ones(1), (torch.zeros(2), None)], "text": "kept", "number": 3},
}


@pytest.mark.parametrize("shared", [False, True])
def test_pack_and_unpack_give_back_every_bit(shared):
    message = pack(PAYLOAD)
    back = unpack(message, torch.device("cpu"), shared=shared)
    assert state_hash(back) == state_hash(PAYLOAD)
    sent = list(named_tensors(PAYLOAD))
    assert message.nbytes == sum(tensor.nbytes for _, tensor in sent) < sum(part.nbytes for part in message.data)
    for (path, tensor), (other, found) in zip(sent, named_tensors(back), strict=True):
        assert (path, tensor.dtype, tensor.shape) == (other, found.dtype, found.shape)
        assert torch.equal(tensor, found)
    assert back["nested"]["text"] == "kept"
    assert back["nested"]["number"] == 3
    assert back["nested"]["list"][1][1] is None
    assert isinstance(back["nested"]["list"][1], tuple)


def test_a_message_is_plain_bytes_and_what_arrives_is_our_own():
    weights = torch.ones(3, requires_grad=True)
    large = torch.ones(2**19, 2)[:, 0]
    message = pack({"w": weights, "v": torch.zeros(2), "large": large})
    assert [(part.dtype, part.nbytes) for part in message.data] == [(np.uint8, 64 + 8), (np.uint8, 2**21)]
    for part in message.data:
        part.setflags(write=False)  # as in the object store
    back = unpack(message, torch.device("cpu"))
    for name, tensor in (("w", weights), ("large", large)):
        back[name].add_(1)
        assert tensor.eq(1).all()
        assert not back[name].requires_grad
        assert back[name].untyped_storage().nbytes() == tensor.nbytes  # it does not keep the whole message


def test_large_tensors_are_not_copied():
    state = {"small": torch.ones(3), "large": torch.randn(2**10, 2**9)}
    message = pack(state)
    assert message.data[1].ctypes.data == state["large"].data_ptr()
    back = unpack(message, torch.device("cpu"), shared=True)
    assert back["large"].data_ptr() == state["large"].data_ptr()
    assert state_hash(back) == state_hash(state)


def test_tensors_are_aligned_and_may_stay_where_they_arrived(recwarn):
    state = {"w": torch.arange(2000.0), "none": torch.zeros(0), "n": torch.tensor(3), "v": torch.ones(5)}
    (data,) = pack(state).data
    assert data.nbytes == 8000 + 64 + 20
    room = np.zeros(len(data) + 128, np.uint8)
    aligned = -room.ctypes.data % 64
    for offset, shared in ((aligned, True), (aligned, False), (aligned + 4, True)):  # else kernels may round otherwise
        place = room[offset : offset + len(data)]
        place[:] = data
        place.setflags(write=False)  # as in the object store
        back = unpack(pack(state)._replace(data=(place,)), torch.device("cpu"), shared=shared)
        assert state_hash(back) == state_hash(state)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in back.values() if tensor.numel())
        assert (back["w"].data_ptr() == place.ctypes.data) == (shared and offset == aligned)
    assert not recwarn.list


@pytest.mark.parametrize("value", [{"weights": {}}, {"weights": torch.zeros(0, 3)}])
def test_a_message_without_numbers(value):
    message = pack(value)
    assert message.nbytes == 0
    assert state_hash(unpack(message, torch.device("cpu"))) == state_hash(value)
