"""A user's .npz: clients dropped and numbered anew, and one line for every way in which the file can be wrong."""

import numpy as np
import pytest

from rayfed.core.errors import UsageError
from rayfed.data.loading import load
from rayfed.data.on_disk import LazyRows
from rayfed.data.sets import npz
from rayfed.data.sets.npz import Npz


def arrays(clients=3, each=8):
    size = clients * each
    return {
        "images": np.arange(size * 16, dtype=np.uint8).reshape(size, 4, 4),
        "labels": (np.arange(size) % 5).astype(np.uint8),
        "client": np.repeat(np.arange(clients), each).astype(np.int16),
        "is_test": np.arange(size) % 4 == 0,
    }


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        path = tmp_path / "mine.npz"
        np.savez(path, **{key: value for key, value in {**arrays(), **changes}.items() if value is not None})
        return str(path)

    return write


def test_each_client_gets_its_own_rows(write):
    population = load("npz", {"file": write()}, None, {"validation": 0.0})
    whole = arrays()
    assert [client.domain for client in population.clients] == ["client-0", "client-1", "client-2"]
    for client in population.clients:
        own = whole["client"] == client.id
        np.testing.assert_array_equal(client.test.x[:, 0], whole["images"][own & whole["is_test"]])
        np.testing.assert_array_equal(np.sort(client.train.y), np.sort(whole["labels"][own & ~whole["is_test"]]))
        assert len(client.val) == 0
    assert (population.shape, population.num_classes, population.mean) == ((1, 4, 4), 5, (0.5,))


@pytest.mark.parametrize("images", [
    np.arange(24 * 16, dtype=np.uint8).reshape(24, 4, 4),
    np.asfortranarray(np.arange(24 * 48, dtype=np.uint8).reshape(24, 3, 4, 4)),
    np.linspace(0, 1, 24 * 9).reshape(24, 9),
    np.linspace(0, 1, 24 * 9).astype(">f2").reshape(24, 3, 3),
])  # fmt: skip
def test_images_are_unpacked_into_the_cache(write, monkeypatch, images):
    path = write(images=images)
    dataset = Npz(file=path).load()
    assert isinstance(dataset.images, LazyRows)
    expected = images if images.dtype == np.uint8 else images.astype(np.float32)
    np.testing.assert_array_equal(dataset.images[:].reshape(images.shape), expected)
    monkeypatch.setattr(npz, "_read", None)  # a later start reads nothing
    population = load("npz", {"file": path})
    assert all(isinstance(part.x, LazyRows) for client in population.clients for part in (client.train, client.test))
    own = arrays()["client"] == 2
    found = population.clients[2].test.x[:]
    np.testing.assert_array_equal(found.reshape(-1, *images.shape[1:]), expected[own & arrays()["is_test"]])


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"client": None}, ["not an .npz file with images, labels, client", "client is not a file"]),
        ({"labels": np.zeros(23, int)}, ["not an .npz file", "'images': 24, 'labels': 23"]),
        ({"labels": np.full(24, np.nan)}, ["labels: label nan; a class is an integer from 0", "24 of 24 labels"]),
        (
            {"labels": np.full(24, 2**64 - 1, np.uint64)},
            ["labels: label 18446744073709551615; ", "; the highest is 9223372036854775807"],
        ),
        ({"labels": np.arange(24) % 4 + 1}, ["labels: the labels are 1 to 4; classes count from 0, so subtract 1"]),
        ({"labels": np.arange(24) % 2 * 2 - 1}, ["labels: label -1; ", "write -1 and 1 as 0 and 1"]),
        ({"images": np.zeros((24, 4), np.uint8)}, ["uint8 [24, 4]; uint8 is"]),
        ({"images": np.zeros((24, 32, 32, 3), np.uint8)}, ["channels last", "[n, channels, height, width]"]),
        ({"images": np.full((24, 9), 1e39)}, ["NaN or infinity"]),
        ({"labels": np.array([{}] * 24)}, ["not an .npz file", "Object arrays"]),
    ],
)
def test_a_wrong_array_is_one_line(write, changes, facts):
    path = write(**changes)
    with pytest.raises(UsageError) as caught:
        load("npz", {"file": path})
    message = str(caught.value)
    assert message.startswith(f"data.file={path}: ")
    for fact in facts:
        assert fact in message


def test_other_files(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(UsageError, match=r"one.npy: .* not an .npz file with images, labels"):
        load("npz", {"file": str(tmp_path / "one.npy")})
    with pytest.raises(UsageError, match=r"none.npz: no such file"):
        load("npz", {"file": str(tmp_path / "none.npz")})
    with pytest.raises(UsageError, match=r"data.file: required"):
        load("npz")
