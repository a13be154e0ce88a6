"""The store of clients' states: versions, and spilling to disk."""

import gc
from pathlib import Path

import pytest
import torch

from rayfed.core.trees import named_tensors
from rayfed.engine.client_store import ClientStore


def state(value: float, size: int = 100) -> dict:
    return {
        "weights": {"w": torch.full((size,), float(value))},
        "steps": torch.tensor(int(value)),
        "names": ["a", None],
    }


def same(one, other) -> bool:
    pairs = zip(named_tensors(one), named_tensors(other), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_it_is_a_mapping_in_the_order_of_clients():
    store = ClientStore()
    for client in (3, 0, 2):
        store[client] = state(client)
    assert list(store) == [0, 2, 3]
    assert len(store) == 3
    assert 2 in store
    assert 1 not in store
    assert same(store[2], state(2))
    with pytest.raises(KeyError):
        store[1]


def test_every_write_has_a_version_of_its_own():
    store = ClientStore()
    store[0], store[1] = state(0), state(1)
    versions = [store.versions[0], store.versions[1]]
    store[0] = state(0)
    versions.append(store.versions[0])
    store.clear()
    assert not store
    store[0] = state(0)
    versions.append(store.versions[0])
    assert len(set(versions)) == 4


def test_what_was_not_used_for_longest_goes_to_disk_and_comes_back():
    size = 408  # bytes of one state
    store = ClientStore(memory=2 * size)
    for client in range(5):
        store[client] = state(client)
    folder = Path(store._folder.name)
    assert sorted(path.name for path in folder.iterdir()) == ["0.pt", "1.pt", "2.pt"]
    assert same(store[0], state(0))  # comes back, and 3 goes
    assert sorted(path.name for path in folder.iterdir()) == ["1.pt", "2.pt", "3.pt"]
    store[2] = state(7)  # what is on disk is replaced
    assert same(store[2], state(7))
    assert [float(store[client]["steps"]) for client in store] == [0, 1, 7, 3, 4]
    del store
    gc.collect()
    assert not folder.exists()


def test_a_device_keeps_what_was_used_last_then_memory_then_the_disk():
    size = 408  # bytes of one state
    store = ClientStore(memory=2 * size, device_memory=size)
    for client in range(4):
        store[client] = state(client)
    folder = Path(store._folder.name)
    assert (list(store._on_device._entries), list(store._kept._entries)) == ([3], [1, 2])
    assert [path.name for path in folder.iterdir()] == ["0.pt"]
    assert same(store[1], state(1))  # comes back from memory, and 3 goes there
    assert same(store[0], state(0))  # comes back from the disk, to which 2 goes
    assert (list(store._on_device._entries), list(store._kept._entries)) == ([0], [3, 1])
    store[3] = state(7)  # no older state stays in memory
    assert same(store[3], state(7))
    assert [same(store[client], state(client)) for client in (1, 2, 0)] == [True] * 3
    assert same(store[3], state(7))
    store.clear()
    assert list(folder.iterdir()) == []
