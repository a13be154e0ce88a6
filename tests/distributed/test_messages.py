"""Values arrive in other processes as they were sent."""

import numpy as np
import pytest
import torch

from rayfed.core.trees import named_tensors
from rayfed.distributed.host_actor import pack, pack_state, unpack
from rayfed.engine.serialization import state_hash

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


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_pack_and_unpack_give_back_every_bit(flat, shared):
    back = unpack(pack(PAYLOAD, flat=flat), torch.device("cpu"), shared=shared)
    assert state_hash(back) == state_hash(PAYLOAD)
    for (path, sent), (other, found) in zip(named_tensors(PAYLOAD), named_tensors(back), strict=True):
        assert (path, sent.dtype, sent.shape) == (other, found.dtype, found.shape)
        assert torch.equal(sent, found)
    assert back["nested"]["text"] == "kept"
    assert back["nested"]["number"] == 3
    assert back["nested"]["list"][1][1] is None
    assert isinstance(back["nested"]["list"][1], tuple)


def test_a_message_is_plain_bytes_and_what_arrives_is_our_own():
    weights = torch.ones(3, requires_grad=True)
    message = pack({"w": weights})
    ((data, *_),) = message.tensors
    assert data.dtype == np.uint8
    assert message.nbytes == 12
    data.setflags(write=False)  # as in the object store
    back = unpack(message, torch.device("cpu"))["w"]
    back.add_(1)
    assert weights.tolist() == [1, 1, 1]
    assert not back.requires_grad


def test_a_flat_message_is_one_array_with_aligned_tensors_and_may_stay_where_it_arrived():
    state = {"w": torch.arange(2000.0), "none": torch.zeros(0), "n": torch.tensor(3), "v": torch.ones(5)}
    ((data, *_),) = pack(state, flat=True).tensors
    assert data.nbytes == 8000 + 64 + 20
    room = np.zeros(len(data) + 128, np.uint8)
    aligned = -room.ctypes.data % 64
    for offset, shared in ((aligned, True), (aligned, False), (aligned + 4, True)):
        place = room[offset : offset + len(data)]
        place[:] = data
        message = pack(state, flat=True)._replace(tensors=[(place, torch.uint8, place.shape)])
        back = unpack(message, torch.device("cpu"), shared=shared)
        assert state_hash(back) == state_hash(state)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in back.values() if tensor.numel())
        assert (back["w"].data_ptr() == place.ctypes.data) == (shared and offset == aligned)


def test_states_are_flat_unless_their_tensors_are_large_and_on_a_cpu():
    small, large = {"a": torch.ones(9), "b": torch.ones(9, 2)}, {"a": torch.ones(20000), "b": torch.ones(9)}
    assert [len(pack_state(state).tensors) for state in (small, large, {"weights": {}})] == [1, 2, 0]
    assert state_hash(unpack(pack_state(small), torch.device("cpu"))) == state_hash(small)


def test_large_tensors_may_stay_where_they_arrived(recwarn):
    room = np.zeros(4 * 2000 + 128, np.uint8)
    aligned = -room.ctypes.data % 64
    for offset, stays in ((aligned, True), (aligned + 4, False)):  # on which kernels could compute other bits
        data = room[offset : offset + 4 * 2000]
        data[:] = np.arange(2000, dtype=np.float32).view(np.uint8)
        message = pack({"w": torch.zeros(2000)})
        data.setflags(write=False)  # as in the object store
        message.tensors[0] = (data, torch.float32, (2000,))
        back = unpack(message, torch.device("cpu"), shared=True)["w"]
        assert back.tolist() == list(range(2000))
        assert (back.data_ptr() == data.ctypes.data) == stays
        assert unpack(message, torch.device("cpu"))["w"].data_ptr() != data.ctypes.data
    assert not recwarn.list
