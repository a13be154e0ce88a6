"""A store with a budget of bytes, for the data and the states that a device or a machine keeps."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class LeastRecent(Generic[_Key, _Value]):
    """A store of values with a budget of bytes, from which the value that was unused for the longest time goes first.

    Args:
        room: The bytes that all values may take together.
    """

    def __init__(self, room: float):
        self._room = room
        self._used = 0
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: _Key) -> bool:
        return key in self._entries

    def get(self, key: _Key) -> _Value | None:
        """Return a value, and note its use; None if it is not here."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: _Key, value: _Value, size: int) -> list[tuple[_Key, _Value]]:
        """Keep a value of `size` bytes in place of the key's earlier value, and return the values that went for it.

        The new value stays, even if it alone takes more than the room.
        """
        self.remove(key)
        gone = self.make_room(size)
        self._entries[key] = value, size
        self._used += size
        return gone

    def make_room(self, size: int) -> list[tuple[_Key, _Value]]:
        """Take out values until `size` further bytes fit or no value is left, and return them."""
        gone = []
        while self._entries and self._used + size > self._room:
            key, (value, freed) = self._entries.popitem(last=False)
            self._used -= freed
            gone.append((key, value))
        return gone

    def remove(self, key: _Key) -> None:
        """Take a value out, if it is here."""
        if key in self._entries:
            self._used -= self._entries.pop(key)[1]

    def clear(self) -> None:
        """Take out everything."""
        self._entries.clear()
        self._used = 0
