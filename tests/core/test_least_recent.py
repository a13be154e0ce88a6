"""What has not been used for the longest time goes first."""

from rayfed.core.least_recent import LeastRecent


def test_the_longest_unused_goes_first():
    store = LeastRecent(10)
    assert store.put("a", 1, 4) == []
    assert store.put("b", 2, 4) == []
    assert store.get("a") == 1
    assert store.put("c", 3, 4) == [("b", 2)]
    assert store.get("b") is None
    assert ("a" in store, "b" in store, len(store)) == (True, False, 2)


def test_a_new_value_replaces_the_old_one_and_its_size():
    store = LeastRecent(10)
    store.put("a", 1, 8)
    assert store.put("a", 2, 3) == []
    assert store.put("b", 3, 7) == []
    assert store.get("a") == 2


def test_a_value_larger_than_the_room_stays_alone():
    store = LeastRecent(10)
    store.put("a", 1, 4)
    store.put("b", 2, 4)
    assert store.put("c", 3, 40) == [("a", 1), ("b", 2)]
    assert store.get("c") == 3
    assert store.put("d", 4, 1) == [("c", 3)]


def test_room_is_made_in_advance_and_values_are_removed():
    store = LeastRecent(10)
    for key in "abcde":
        store.put(key, key, 2)
    assert store.make_room(4) == [("a", "a"), ("b", "b")]
    store.remove("c")
    store.remove("never here")
    assert store.make_room(6) == []
    store.clear()
    assert len(store) == 0
    assert store.make_room(10) == []
