"""Pickles of arrays: what NumPy and CIFAR write is read, and nothing that a file asks for is called or allocated."""

import io
import pickle
import pickletools
import struct
import sys

import numpy as np
import pytest

from rayfed.data.readers.pickles import read_pickle

PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
WIDE = np.array([[1, 2], [300, -4]])


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    "value",
    [
        {"data": PIXELS, "labels": [0, 9, 255, 70_000, 2**40], "batch_label": "one of 5", "filenames": ["a.png", "b"]},
        {"data": np.asfortranarray(PIXELS), "more": (1, "x", None, True, 1.5), "none": {}},
        {"data": WIDE, "big": WIDE.astype(">i4"), "empty": np.zeros((0, 3), np.uint8), "flat": PIXELS[0, 0]},
        [1, [2, (3, b"bytes")]],
        PIXELS,
    ],
    ids=["cifar", "fortran", "integers", "list", "array"],
)
def test_what_numpy_writes_is_read(protocol, value):
    found = read_pickle(pickle.dumps(value, protocol=protocol))
    if not isinstance(value, dict):
        np.testing.assert_equal(found, value)
        return
    assert found.keys() == value.keys()
    for key, item in value.items():
        np.testing.assert_array_equal(np.asarray(found[key], dtype=object), np.asarray(item, dtype=object))
    assert not found["data"].flags.writeable if "data" in found else True


class Call:
    """Pickles as the call of a function."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def name(module, attribute):
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


U1 = name("numpy", "dtype") + text("u1") + b"\x89\x88\x87R"
EMPTY = name("numpy._core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"


def array(shape, content=b"C\x04abcd", kind=U1):
    """Return the pickle of an array with that state."""
    return b"\x80\x03" + EMPTY + b"(K\x01" + shape + kind + b"\x89" + content + b"tb."


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (pickle.dumps(Call(print, ("called",))), "it asks for builtins.print"),
        (pickle.dumps(Call(np.ndarray, (3 * 10**11,))), "it asks for numpy.ndarray"),
        (pickle.dumps(Call(bytearray, (3 * 10**11,))), "it asks for builtins.bytearray"),
        (pickle.dumps(np.float64(1.5)), "it asks for numpy"),
        (pickle.dumps(np.array(["a", None], object)), "no integers"),
        (pickle.dumps(np.array([b"\x41" * 8], "V8")), "no integers"),
        (pickle.dumps(np.array([1.5])), "no integers"),
        (array(b"K\x05\x85"), "has 4 bytes"),
        (array(b"(" + b"K\x01" * 9 + b"t"), "the shape of an array does not fit"),
        (array(b"\x8a\x05\xff\xff\xff\xff\x7f\x85"), "the shape of an array does not fit its 4 bytes"),
        (array(b"J\xff\xff\xff\xff\x85"), "the shape of an array does not fit"),
        (array(b"K\x02K\x02\x86", kind=b"N"), "dtype"),
        (b"\x80\x02K\x01K\x02b.", "it gives a state to what is no array"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 3 * 10**11) + b"abc.", "expected 300000000000 bytes"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 3 * 10**11) + b"abc.", "expected 300000000000 bytes"),
        (b"\x80\x02" + b"K\x01r" + struct.pack("<I", 2**32 - 1) + b"h\x00.", "0"),
        (b"\x80\x02}K\x01K\x02s.", "its keys are no strings"),
        (b"\x80\x02})" + b"\x86" * 0 + b"K\x02s.", "its keys are no strings"),
        (b"\x80\x02K\x01K\x02R.", "it calls what is no function"),
        (b"\x80\x02t.", "its stack is empty"),
        (b"\x80\x02.", "its stack is empty"),
        (b"\x80\x02K\x01K\x02a.", "it appends to no list"),
        (b"\x80\x02N0.", "it has the opcode POP"),
        (b"N" * 4_000_000, "within 3,000,000 steps"),
        (b"", "pickle exhausted"),
        (b"\x80\x02N", "pickle exhausted"),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_anything_else_is_refused(content, why):
    before = sys.modules.keys()
    with pytest.raises((ValueError, KeyError, AttributeError, IndexError), match=why):
        read_pickle(content)
    assert sys.modules.keys() == before


def test_tuples_that_hold_each_other_many_times_take_no_time():
    """A hash or a text of them would take 2 to the power of 60 steps."""
    doubled = b"K\x01" + b"".join(b"q" + bytes([k]) + b"h" + bytes([k]) + b"\x86" for k in range(60))
    assert isinstance(read_pickle(b"\x80\x02" + doubled + b"."), tuple)
    with pytest.raises(ValueError, match="its keys are no strings"):
        read_pickle(b"\x80\x02}" + doubled + b"K\x01s.")
    with pytest.raises(ValueError, match="does not fit"):
        read_pickle(array(doubled + b"\x85"))


def test_every_opcode_that_is_read_is_pythons():
    """A misspelt one would never be met."""
    from rayfed.data.readers import pickles

    known = {opcode.name for opcode in pickletools.opcodes}
    assert (
        pickles._VALUES | pickles._CONSTANTS.keys() | pickles._REMEMBERING | pickles._RECALLING | pickles._IGNORED
        <= known
    )


def test_python_reads_the_hostile_pickles_of_this_file():
    """So that they are refused for what they ask, and not because they are damaged."""
    found = pickle.Unpickler(io.BytesIO(array(b"K\x04\x85"))).load()
    assert found.tolist() == [97, 98, 99, 100]
    np.testing.assert_array_equal(read_pickle(array(b"K\x04\x85")), found)
