"""Arrays on disk: made once, whole or not there. Their rows are numpy's, read when looked at, and sent as a path."""

import dataclasses
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data import on_disk
from rayfed.data.dataset import Dataset
from rayfed.data.loading import load
from rayfed.data.on_disk import ArrayFile, LazyRows, as_lazy_rows, memory_mapped, select_rows
from rayfed.data.population import population_hash

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


WHOLE = np.random.default_rng(0).integers(0, 256, (50, 3, 4, 4), dtype=np.uint8)


def mapped(whole=WHOLE):
    def fill(array):
        array[...] = whole

    return memory_mapped("pictures", {"version": 1}, whole.shape, whole.dtype, fill)


ORDERS = {
    "all": np.arange(50),
    "shuffled": np.random.default_rng(1).permutation(50),
    "runs": np.array([7, 8, 9, 3, 4, 49, 0, 1, 2, 30]),
    "backwards": np.arange(50)[::-1],
    "repeated": np.array([5, 5, 6, 6, 5]),
    "none": np.array([], int),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
def test_rows_are_those_of_the_array(order, dtype):
    whole = WHOLE.astype(dtype)
    rows, expected = select_rows(as_lazy_rows(mapped(whole)), ORDERS[order]), whole[ORDERS[order]]
    assert isinstance(rows, LazyRows)
    assert (len(rows), rows.shape, rows.dtype, rows.ndim) == (len(expected), expected.shape, expected.dtype, 4)
    assert rows.nbytes == expected.nbytes
    np.testing.assert_array_equal(np.asarray(rows), expected)
    np.testing.assert_array_equal(select_rows(rows, slice(1, None, 2)), expected[1::2])


@pytest.mark.parametrize(
    "index",
    [3, -1, slice(2, 9, 3), slice(0, 0), np.array([4, 1, 1]), (0, 1), (slice(5), 0), (slice(None), slice(1), 2), ...],
)
def test_an_index_selects_what_it_selects_of_an_array(index):
    rows, expected = as_lazy_rows(mapped()).select(ORDERS["shuffled"]), WHOLE[ORDERS["shuffled"]]
    np.testing.assert_array_equal(rows[index], expected[index])


@pytest.mark.parametrize("part", [np.s_[:], np.s_[10:], np.s_[10:40], np.s_[3:4]])
def test_part_of_a_mapped_array_lies_where_it_does(part, tmp_path):
    np.testing.assert_array_equal(as_lazy_rows(mapped()[part])[:], WHOLE[part])
    np.save(tmp_path / "own.npy", WHOLE)  # with a header before the data
    own = np.load(tmp_path / "own.npy", mmap_mode="r")
    rows = as_lazy_rows(own[part].reshape(-1, 48))
    assert isinstance(rows, LazyRows)
    np.testing.assert_array_equal(rows[:], WHOLE[part].reshape(-1, 48))


def test_only_what_a_file_holds_as_it_is_becomes_rows(tmp_path):
    np.save(tmp_path / "own.npy", WHOLE)
    for mode in ("c", "r+"):  # what is written to the first is in no file
        array = np.load(tmp_path / "own.npy", mmap_mode=mode)
        assert as_lazy_rows(array) is array
    for array in (WHOLE, mapped()[::2], mapped()[:, :1], mapped()[np.arange(4)], mapped() + 1):
        assert as_lazy_rows(array) is array


def test_they_are_sent_as_a_path():
    rows = as_lazy_rows(mapped(np.tile(WHOLE, (1000, 1, 1, 1)))).select(np.arange(100))
    sent = pickle.dumps([rows.select([k]) for k in range(10)] + [rows])
    assert len(sent) < 6000
    received = pickle.loads(sent)
    assert len({id(each.file) for each in received}) == 1  # opened once
    np.testing.assert_array_equal(received[-1][:], WHOLE[np.arange(100) % 50])


def test_a_receiver_without_the_file_or_with_another_of_that_name_is_told(home, tmp_path):
    sent = pickle.dumps(as_lazy_rows(mapped()))
    (path,) = home.glob("*/*.npy")
    path.unlink()
    received = pickle.loads(sent)  # which a host survives
    with pytest.raises(UsageError, match=r"pictures-.*No such file.*; set RAYFED_CACHE to a folder that all machines"):
        received[:]
    np.save(tmp_path / "own.npy", WHOLE)
    sent = pickle.dumps(as_lazy_rows(np.load(tmp_path / "own.npy", mmap_mode="r")))
    np.save(tmp_path / "own.npy", WHOLE ^ 1)
    with pytest.raises(UsageError, match="differs from that of the machine that started the run"):
        pickle.loads(sent)[:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pictures:
    """A dataset of pictures, on disk or in memory, of two domains, one of them nobody's."""

    on_disk: bool = option(True, help="")

    def load(self):
        labels, domain = np.arange(50) % 3, np.repeat(np.arange(2, dtype=np.int16), [40, 10])
        others = {"domain": domain, "domains": ("a", "b"), "ood": ("b",), "num_classes": 3}
        images = mapped() if self.on_disk else WHOLE
        return Dataset.of("pictures", images, labels, **others)


def test_a_population_is_the_same_from_disk(monkeypatch):
    def unread(*args):
        raise AssertionError("read")

    def people(on_disk):
        return load(f"{__name__}:Pictures", {"on_disk": on_disk}, "iid", {"clients": 3})

    memory = people(False)
    with monkeypatch.context() as patch:
        patch.setattr(ArrayFile, "read", unread)  # dividing needs no picture
        disk = people(True)
        np.testing.assert_array_equal(disk.clients.sizes, memory.clients.sizes)
        assert disk.shape == memory.shape
    assert all(isinstance(part.x, LazyRows) for part in disk.examples())
    assert population_hash(disk) == population_hash(memory)
    held = disk.read()
    assert not any(isinstance(part.x, LazyRows) for part in held.examples())
    assert population_hash(held) == population_hash(memory)
    assert len(pickle.dumps(disk)) < len(pickle.dumps(held))
