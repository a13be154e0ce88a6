"""The views of MNIST, on a few images of our own making."""

import numpy as np
import pytest

from rayfed.data.loading import load
from rayfed.data.sets.mnist import VIEWS, MnistViews, faint, textured

pytestmark = pytest.mark.usefixtures("root")

TRAIN, TEST = 100, 25


def test_each_image_is_in_one_domain_and_keeps_its_label():
    dataset = MnistViews().load()
    assert dataset.domains == tuple(VIEWS)
    assert dataset.images.shape == (TRAIN + TEST, 1, 28, 28)
    assert sorted(zip(dataset.source, dataset.index, strict=True)) == [
        *((0, i) for i in range(TRAIN)),
        *((1, i) for i in range(TEST)),
    ]
    np.testing.assert_array_equal(dataset.labels, dataset.index % 10)
    np.testing.assert_array_equal(dataset.is_test, dataset.source == 1)
    assert np.bincount(dataset.domain).tolist() == [25] * 5


def test_the_exact_views_by_hand(digits):
    dataset = MnistViews().load()
    expected = {
        "plain": lambda x: x,
        "inverted": lambda x: 255 - x,
        "turned": lambda x: np.rot90(x),
    }
    for position, name in enumerate(dataset.domains[:3]):
        for row in dataset.rows(domain=name):
            original = digits[dataset.index[row] + (TRAIN if dataset.source[row] else 0)]
            np.testing.assert_array_equal(dataset.images[row, 0], expected[name](original))
        assert (dataset.domain[dataset.rows(domain=name)] == position).all()


def test_textures_are_smooth_and_differ_and_faint_images_are_faint():
    black = np.zeros((2, 1, 28, 28), np.uint8)
    texture = textured(black, np.random.default_rng(0))
    assert np.abs(np.diff(texture, axis=-1)).max() <= 255 * 4 / 27 + 1e-3  # a cell of 27/4 pixels from 0 to 255
    assert np.abs(texture[0] - texture[1]).mean() > 20
    halves = np.repeat(np.array([0, 255], np.uint8), 14)[None, None, None].repeat(28, 2).repeat(50, 0)
    shown = faint(halves, np.random.default_rng(0))
    assert shown[..., 14:].mean() - shown[..., :14].mean() == pytest.approx(0.2 * 255, abs=1)
    assert shown[..., :14].std() == pytest.approx(255 / 20, rel=0.02)


def test_caps_size_order_and_parties():
    options = {"views": ["faint", "plain"], "per_domain": 20, "tests_per_domain": 5, "size": 14}
    population = load("mnist_views", options, None, {"validation": 0})
    assert [client.domain for client in population.clients] == ["faint", "plain"]
    assert [(len(client.train), len(client.test)) for client in population.clients] == [(20, 5)] * 2
    assert population.shape == (1, 14, 14)
    again, other = MnistViews(**options).load(), MnistViews(seed=1, **options).load()
    np.testing.assert_array_equal(np.sort(again.images, 0), np.sort(MnistViews(**options).load().images, 0))
    assert (again.index != other.index).any()
