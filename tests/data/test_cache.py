"""Arrays kept on disk and mapped: made once, whole or not there, and never needed for a result."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from rayfed.data import on_disk

KEY = {"version": 1, "of": "counting"}


pytestmark = pytest.mark.usefixtures("home")


class Counting:
    """Fills with 0, 1, 2, …, and counts how often."""

    def __init__(self):
        self.calls = 0

    def __call__(self, array):
        assert not array.any()
        self.calls += 1
        array[...] = np.arange(array.size, dtype=array.dtype).reshape(array.shape)


def get(fill, shape=(5, 2, 3), dtype="int32", key=KEY):
    return on_disk.memory_mapped("counting", key, shape, dtype, fill)


def test_an_array_is_filled_once_and_then_mapped(home):
    fill = Counting()
    for _ in range(2):
        array = get(fill)
        assert isinstance(array, np.memmap)
        np.testing.assert_array_equal(array, np.arange(30).reshape(5, 2, 3))
        assert array.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert fill.calls == 1


@pytest.mark.parametrize("size", [0, 10, 200])
def test_a_truncated_file_is_made_again(home, size):
    get(fill := Counting())
    (path,) = home.glob("*/*.npy")
    os.truncate(path, size)
    for _ in range(2):
        np.testing.assert_array_equal(get(fill).ravel(), np.arange(30))
    assert fill.calls == 2


def test_what_goes_wrong_while_filling_is_raised_and_leaves_nothing(home):
    def fail(array):
        array[0] = 1
        raise OSError("picture 17 is damaged")

    with pytest.raises(OSError, match="picture 17"):
        get(fail)
    assert [path.suffix for path in home.iterdir()] == [".lock"]
    assert get(fill := Counting())[4, 1, 2] == 29
    assert fill.calls == 1


def killed(folder):
    os.environ["RAYFED_CACHE"] = folder

    def fill(array):
        array[...] = 7
        os._exit(1)

    get(fill)


def test_a_killed_writer_leaves_nothing_that_looks_whole_and_the_next_one_clears_up(home):
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(str(home),))
    process.start()
    process.join()
    assert sorted(path.suffix for path in home.iterdir()) == [".lock", ".part"]
    assert get(Counting())[4, 1, 2] == 29
    assert sorted(path.suffix for path in home.iterdir()) == ["", ".lock"]


@pytest.fixture(params=["file in the way", "disk full"])
def unusable(request, home, monkeypatch):
    if request.param == "file in the way":
        home.write_text("no folder")
    else:

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(on_disk.os, "posix_fallocate", full)


def test_where_the_cache_cannot_hold_it_a_small_array_is_made_in_memory(unusable, home):
    array = get(fill := Counting())
    np.testing.assert_array_equal(array.ravel(), np.arange(30))
    assert fill.calls == 1
    assert not isinstance(array, np.memmap)
    assert not array.flags.writeable
    assert not list(home.glob("*.part"))


def test_the_disk_s_room_is_taken_before_the_array_is_filled():
    def fill(array):
        used = 512 * Path(array.filename).stat().st_blocks
        assert used >= array.nbytes

    get(fill, (1 << 20,), "uint8")
