"""The value that was unused for the longest time goes first."""

from rayfed.engine.device_data import LeastRecent


def test_values_go_in_the_order_of_their_last_use():
    store = LeastRecent(10)
    assert store.put("a", 1, 4) == store.put("b", 2, 4) == []
    assert store.get("a") == 1
    assert store.put("c", 3, 4) == [("b", 2)]
    assert (store.get("b"), "a" in store, "b" in store, len(store)) == (None, True, False, 2)
    assert store.put("c", 4, 6) == []  # in place of 4 bytes
    assert store.get("c") == 4
    assert store.put("d", 5, 40) == [("a", 1), ("c", 4)]  # larger than the room
    assert store.get("d") == 5
    assert store.put("e", 6, 1) == [("d", 5)]
