"""Values for other processes of Ray, with their large arrays in the object store, where each array is once.

The command puts the data of a sweep into the store. A server opens them there, selects clients, and passes the result
on to its hosts: this takes no more room, because arrays that were opened from the store are passed on by reference. So
the store holds each dataset once, however many trials run on it.
"""

import bisect
import pickle
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import ray

_SMALL_BYTES = 4096  # arrays of at most this size travel in the pickle


class _Place(NamedTuple):
    """Where the bytes of an array are: in one of the arrays of one of the objects."""

    number: int
    item: int
    start: int
    length: int


class Shared(NamedTuple):
    """A value in other processes.

    Attributes:
        pickle: The value without its large arrays.
        objects: References of lists of byte arrays.
        places: Where each of the large arrays is, in the order in which the pickle needs them.
    """

    pickle: bytes
    objects: tuple[Any, ...]
    places: tuple[_Place, ...]


class _Opened(NamedTuple):
    """A byte array of the store that this process uses, and the object in which it is."""

    start: int
    array: "weakref.ref[np.ndarray]"
    reference: Any
    item: int


_opened: list[_Opened] = []  # by the address at which an array starts


def share(value: Any) -> Shared:
    """Return a value that can be pickled for other processes. The object lives as long as this process.

    Its arrays must not be modified from now on.
    """
    objects: list[Any] = [None]  # the first one is for arrays that are not in the store yet
    new: list[np.ndarray] = []
    places: list[_Place] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer out of the pickle, unless it is small."""
        content = np.frombuffer(buffer.raw(), np.uint8)
        if len(content) <= _SMALL_BYTES:
            return True
        known = _where(content)
        if known is None:
            places.append(_Place(0, len(new), 0, len(content)))
            new.append(content)
        else:
            opened, start = known
            if opened.reference not in objects:
                objects.append(opened.reference)
            place = _Place(objects.index(opened.reference), opened.item, start, len(content))
            places.append(place)
        return False

    pickled = ray.cloudpickle.dumps(value, protocol=5, buffer_callback=take)
    if new:
        objects[0] = ray.put(new)
    return Shared(pickled, tuple(objects), tuple(places))


def opened(shared: Shared) -> Any:
    """Return the value. Its large arrays are read-only and lie in the store."""
    objects = [_open(reference) for reference in shared.objects]
    buffers = []
    for place in shared.places:
        array = objects[place.number][place.item]
        buffers.append(array[place.start : place.start + place.length])
    return pickle.loads(shared.pickle, buffers=buffers)


def _open(reference: Any) -> Sequence[np.ndarray]:
    """Return the byte arrays of an object, and note where they are."""
    if reference is None:
        return ()
    arrays: list[np.ndarray] = ray.get(reference)
    _opened[:] = [known for known in _opened if known.array() is not None]
    for item, array in enumerate(arrays):
        owner = array
        while isinstance(owner.base, np.ndarray):  # numpy's views keep this one alive
            owner = owner.base
        _opened.append(_Opened(array.ctypes.data, weakref.ref(owner), reference, item))
    _opened.sort(key=lambda known: known.start)
    return arrays


def _where(content: np.ndarray) -> tuple[_Opened, int] | None:
    """Return the opened array that has `content` in it, and where in it `content` begins."""
    address = content.ctypes.data
    position = bisect.bisect_right(_opened, address, key=lambda known: known.start)
    if not position:
        return None
    known = _opened[position - 1]
    array = known.array()
    if array is None or address + len(content) > known.start + len(array):
        return None
    return known, address - known.start
