"""MNIST and MNIST-M from a few digits and photographs of our own making."""

import numpy as np
import pytest
from PIL import Image

from rayfed.data.loading import load
from rayfed.data.on_disk import LazyRows
from rayfed.data.sets import mnist_m
from rayfed.data.sets.mnist_m import MnistM, blended

pytestmark = pytest.mark.usefixtures("root")

TRAIN, TEST = 180, 20


@pytest.fixture
def folder(tmp_path):
    """Two photographs: one all (10, 20, 30), which leaves no doubt about what came of a digit, and a larger one."""
    for name, side in (("a.png", 28), ("b.jpg", 40)):
        Image.fromarray(np.full((side, side, 3), (10, 20, 30), np.uint8)).save(tmp_path / name, quality=100)
    (tmp_path / "notes.txt").write_text("not a photograph")
    return tmp_path


def originals(dataset, domain):
    rows = np.flatnonzero(dataset.domain == domain)
    return dataset.index[rows] + np.where(dataset.source[rows] % 2, TRAIN, 0), rows


def test_a_pasted_digit_is_the_distance_from_the_photograph():
    """By hand: 255 on 10 is 245, 0 leaves the photograph, 15 on 20 is 5; the piece lies where it is said."""
    digit = np.zeros((1, 1, 28, 28), np.uint8)
    digit[0, 0, 0, :2] = (255, 15)
    photograph = np.zeros((29, 30, 3), np.uint8)
    photograph[1, 2] = (10, 20, 30)
    photograph[1, 3] = (10, 20, 30)
    made = blended(digit, [photograph], np.array([0.0]), np.array([0.99]), np.array([0.99]))
    assert made[0, :, 0, 0].tolist() == [245, 235, 225]
    assert made[0, :, 0, 1].tolist() == [5, 5, 15]
    assert made[0, :, 1:].max() == 0


def test_domains_share_test_digits_and_no_training_digit(digits, folder):
    dataset = MnistM(share=0.25, size=28, photographs=str(folder)).load()
    found = []
    for domain in (0, 1):
        which, rows = originals(dataset, domain)
        held = dataset.is_test[rows]
        assert (~held).sum() == 45  # a quarter of the 180 that are not for testing
        assert held.sum() == 20
        np.testing.assert_array_equal(dataset.labels[rows], np.where(which < TRAIN, which, which - TRAIN) % 10)
        wanted = digits[which, None].repeat(3, axis=1)
        if domain:
            wanted = np.abs(wanted.astype(int) - np.array([10, 20, 30])[:, None, None])
        # JPEG may be a level off
        assert np.abs(dataset.images[rows].astype(int) - wanted).max() <= domain * 2
        found.append((set(which[~held]), set(which[held])))
    assert found[0][1] == found[1][1]
    assert not found[0][0] & (found[1][0] | found[1][1])


def test_pieces_do_not_depend_on_the_share_or_on_the_cache(monkeypatch, tmp_path):
    few = MnistM(share=0.1, size=28).load()
    many = MnistM(share=0.4, size=28).load()
    where = {row: place for place, row in zip(*originals(many, 1)[::-1], strict=True)}
    which, rows = originals(few, 1)
    for original, row in zip(which, rows, strict=True):
        np.testing.assert_array_equal(few.images[row], many.images[where[original]])
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path / "none yet"))
    np.testing.assert_array_equal(MnistM(share=0.1, size=28).load().images, few.images)
    other = MnistM(share=0.1, size=28, seed=1).load()
    assert (other.index != few.index).any()


def test_the_images_are_made_once_and_mapped(monkeypatch):
    """All 140,000 at 32 are 430 MB: no process should hold them, or enlarge them again at each start."""
    first = MnistM().load()
    assert isinstance(first.images, np.memmap)
    assert first.images.shape == (2 * (TRAIN + TEST), 3, 32, 32)
    monkeypatch.setattr(mnist_m, "blended", None)
    monkeypatch.setattr(mnist_m, "enlarged", None)
    np.testing.assert_array_equal(MnistM().load().images, first.images)
    population = load("mnist_m", {})
    assert all(isinstance(client.train.x, LazyRows) for client in population.clients)
