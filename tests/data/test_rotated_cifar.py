"""Rotated CIFAR: which images share an angle follows from the seed, and from nothing else."""

import numpy as np
import pytest

from rayfed.data.sets.rotated_cifar import RotationMix


def angles(seed, client, images):
    """The number of the angle of each image: rotations by 0 to 90 degrees leave marks that tell them apart."""
    turned = RotationMix((0, 90, 180, 270), 1e6, seed).images(client, images)
    candidates = np.stack([np.rot90(images, k, axes=(2, 3)) for k in range(4)])
    return (candidates == turned).all(axis=(2, 3, 4)).argmax(0)


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (2000, 3, 4, 4), dtype=np.uint8)


@pytest.mark.parametrize("other", [(1, 0), (0, 1)])
def test_another_seed_or_client_draws_anew_which_images_share_an_angle(images, other):
    """Of pairs with one angle, a quarter share one again: 500 pairs, so 0.25 ± 0.02 (sd)."""
    first, second = angles(0, 0, images), angles(*other, images)
    together = first[:1000] == first[1000:]
    again = (second[:1000] == second[1000:])[together].mean()
    assert 0.15 < again < 0.35


def test_the_angle_of_an_image_does_not_depend_on_the_others(images):
    order = np.random.default_rng(1).permutation(len(images))
    assert np.array_equal(angles(3, 2, images)[order], angles(3, 2, images[order]))
    assert np.bincount(angles(3, 2, images), minlength=4).min() > 400
