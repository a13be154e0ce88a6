"""Both recipes of Rotated MNIST, on a few images of our own making, and the angles of Rotated CIFAR."""

import numpy as np
import pytest

from rayfed.data.loading import load
from rayfed.data.sets.rotated import TEN_ANGLES, RotatedMnist, RotationMix, rotate

pytestmark = pytest.mark.usefixtures("root")

TRAIN, TEST = 600, 120


@pytest.fixture(scope="module")
def digits():
    """A bright bar at the top left and noise, so that an image can be told from any other and from its turned self."""
    random = np.random.default_rng(2)
    made = random.integers(0, 120, (TRAIN + TEST, 28, 28)).astype(np.uint8)
    made[:, 4:8, 4:20] = 250
    return made


def test_quarter_turns_are_exact_and_outside_is_black(digits):
    few = digits[:3, None]
    for turns in range(4):
        np.testing.assert_array_equal(rotate(few, 90 * turns), np.rot90(few, turns, axes=(2, 3)))
    corner = rotate(np.full((1, 1, 28, 28), 255, np.uint8), 45)[0, 0]
    assert corner[0, 0] == corner[27, 27] == 0
    assert corner[14, 14] == 255
    mark = np.zeros((1, 1, 5, 5), np.uint8)
    mark[0, 0, 2, 4] = 200  # goes up, and right of the centre it stands half way there after an eighth
    assert np.unravel_index(rotate(mark, 45)[0, 0].argmax(), (5, 5)) in {(0, 3), (1, 3), (1, 4), (0, 4)}


def test_augmentation_gives_each_image_one_angle_and_holds_one_angle_out(digits):
    dataset = RotatedMnist().load()
    assert len(dataset) == TRAIN + TEST
    assert dataset.domains == ("0deg", "15deg", "30deg", "45deg", "60deg", "75deg")
    assert (np.bincount(dataset.domain) == 120).all()
    original = dataset.source.astype(int) * TRAIN + dataset.index
    assert sorted(original) == list(range(TRAIN + TEST))
    for domain, angle in enumerate(range(0, 90, 15)):
        own = dataset.domain == domain
        np.testing.assert_array_equal(dataset.images[own], rotate(digits[original[own], None], angle))


def test_augmentation_population():
    population = load("rotated_mnist")
    assert [client.domain for client in population.clients] == ["0deg", "15deg", "30deg", "45deg", "60deg"]
    assert {(len(c.train), len(c.val), len(c.test)) for c in population.clients} == {(108, 12, 0)}
    (test,) = population.tests
    assert (test.domain, test.split, len(test.examples)) == ("75deg", "ood", 120)
    assert (population.mean, population.std) == ((0.0,), (1.0,))
    other = load("rotated_mnist", {"per_domain": 30, "size": 14}, leave_out="0deg")
    assert [test.domain for test in other.tests] == ["0deg"]
    assert other.shape == (1, 14, 14)
    assert {len(client.train) for client in other.clients} == {27}


def test_feddebias_turns_each_client_and_ten_common_test_sets(digits):
    population = load("rotated_mnist", {"recipe": "feddebias"})
    assert [client.domain for client in population.clients] == [f"{angle}deg" for angle in TEN_ANGLES]
    assert {(len(c.train), len(c.val), len(c.test)) for c in population.clients} == {(48, 12, 0)}
    assert max(len(np.unique(client.train.y)) for client in population.clients[:5]) <= 2
    seen = []
    for client, angle in zip(population.clients, TEN_ANGLES, strict=True):
        turned = {image.tobytes(): row for row, image in enumerate(rotate(digits[:TRAIN, None], angle))}
        own = [turned[image.tobytes()] for image in np.concatenate([client.train.x, client.val.x])]
        assert [row % 10 for row in own] == [*client.train.y, *client.val.y]
        seen += own
    assert sorted(seen) == list(range(TRAIN))
    assert [(test.domain, test.split) for test in population.tests] == [(f"{a}deg", "test") for a in TEN_ANGLES]
    for test, angle in zip(population.tests, TEN_ANGLES, strict=True):
        np.testing.assert_array_equal(np.sort(test.examples.y), np.sort(np.arange(TEST) % 10))
        expected = {image.tobytes() for image in rotate(digits[TRAIN:, None], angle)}
        assert {image.tobytes() for image in test.examples.x} == expected


def test_clients_keep_their_angles_where_another_one_is_left_out():
    whole = load("rotated_mnist", {"recipe": "feddebias"})
    second = TEN_ANGLES[1]
    without = load("rotated_mnist", {"recipe": "feddebias", "without": [f"{second}deg"]})
    kept = [client for client in whole.clients if client.id != 1]
    assert [client.domain for client in without.clients] == [client.domain for client in kept]
    for client, expected in zip(without.clients, kept, strict=True):
        np.testing.assert_array_equal(client.train.x, expected.train.x)


def angles(seed, client, images):
    """The number of the angle of each image: rotations by 0 to 90 degrees leave marks that tell them apart."""
    turned = RotationMix((0, 90, 180, 270), 1e6, seed).images(client, images)
    candidates = np.stack([np.rot90(images, k, axes=(2, 3)) for k in range(4)])
    return (candidates == turned).all(axis=(2, 3, 4)).argmax(0)


@pytest.fixture(scope="module")
def pictures():
    return np.random.default_rng(0).integers(0, 256, (2000, 3, 4, 4), dtype=np.uint8)


@pytest.mark.parametrize("other", [(1, 0), (0, 1)])
def test_another_seed_or_client_draws_anew_which_images_share_an_angle(pictures, other):
    """Of pairs with one angle, a quarter share one again: 500 pairs, so 0.25 ± 0.02 (sd)."""
    first, second = angles(0, 0, pictures), angles(*other, pictures)
    together = first[:1000] == first[1000:]
    again = (second[:1000] == second[1000:])[together].mean()
    assert 0.15 < again < 0.35


def test_the_angle_of_an_image_does_not_depend_on_the_others(pictures):
    order = np.random.default_rng(1).permutation(len(pictures))
    assert np.array_equal(angles(3, 2, pictures)[order], angles(3, 2, pictures[order]))
    assert np.bincount(angles(3, 2, pictures), minlength=4).min() > 400
