"""Digits-5: the pixels of each form that a domain comes in, and the recipes of the papers."""

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import image_sets
from helpers.image_sets import DIGITS, picture
from helpers.published_data import needs
from rayfed.core.errors import UsageError
from rayfed.data.loading import load
from rayfed.data.sets.digits5 import Digits5


def whole(root, domain, size, **others):
    """All images of a domain in the order of its files, and their labels."""
    options = {"root": str(root), "domains": [domain], "size": size, "split": "published", **others}
    dataset = Digits5(**options).load()
    return np.asarray(dataset.images), dataset


def enlarged(image, size):
    """What Pillow makes of one image [height, width]."""
    return np.asarray(Image.fromarray(image).convert("RGB").resize((size, size), Image.Resampling.BILINEAR))


def test_svhn_calls_zero_ten(tmp_path):
    images, labels = image_sets.digits(12, 32, 32, 3)
    for side in ("train", "test"):
        image_sets.mat(tmp_path / f"SVHN/{side}_32x32.mat", images, np.where(labels == 0, 10, labels))
    found, dataset = whole(tmp_path, "svhn", 32)
    np.testing.assert_array_equal(found[:12], images.transpose(0, 3, 1, 2))
    assert dataset.labels.tolist() == [*labels, *labels]
    assert dataset.is_test.tolist() == [False] * 12 + [True] * 12


def test_usps_values_become_pixels_as_torchvision_makes_them(tmp_path):
    values = np.linspace(-1, 1, 256)
    (tmp_path / "USPS").mkdir()
    for file in ("usps.bz2", "usps.t.bz2"):
        line = image_sets.usps_line(9, values)
        (tmp_path / "USPS" / file).write_bytes(image_sets.bz2.compress(line.encode()))
    found, dataset = whole(tmp_path, "usps", 28)
    expected = ((np.array([float(f"{value:.4f}") for value in values], np.float32) + 1) / 2 * 255).astype(np.uint8)
    np.testing.assert_array_equal(found[0], enlarged(expected.reshape(16, 16), 28).transpose(2, 0, 1))
    assert dataset.labels.tolist() == [9, 9]


def test_mnist_is_grey_in_three_channels_and_enlarged(tmp_path):
    image_sets.mnist(tmp_path)
    small, _ = whole(tmp_path, "mnist", 28)
    raw = (tmp_path / "MNIST/raw/train-images-idx3-ubyte").read_bytes()[16 : 16 + 784]
    first = np.frombuffer(raw, np.uint8).reshape(28, 28)
    np.testing.assert_array_equal(small[0], np.repeat(first[None], 3, axis=0))
    large, _ = whole(tmp_path, "mnist", 32)
    np.testing.assert_array_equal(large[0], enlarged(first, 32).transpose(2, 0, 1))


def test_mnist_m_from_tensors(tmp_path):
    sides = {"train": image_sets.digits(20, 28, 28, 3), "test": image_sets.digits(10, 28, 28, 3)}
    (tmp_path / "MNIST_M").mkdir()
    for side, (images, labels) in sides.items():
        pair = torch.from_numpy(images), torch.from_numpy(labels)
        torch.save(pair, tmp_path / f"MNIST_M/mnist_m_{side}.pt")
    found, dataset = whole(tmp_path, "mnist_m", 28)
    images, labels = (np.concatenate([sides[side][place] for side in sides]) for place in (0, 1))
    np.testing.assert_array_equal(found, images.transpose(0, 3, 1, 2))
    assert dataset.labels.tolist() == labels.tolist()
    assert dataset.is_test.tolist() == [False] * 20 + [True] * 10


def test_mnist_m_is_made_from_mnist_and_photographs(tmp_path):
    image_sets.mnist(tmp_path)
    with pytest.raises(UsageError, match=r"MNIST_M: no such folder.*set data.photographs to make it from MNIST"):
        whole(tmp_path, "mnist_m", 28)
    (tmp_path / "photographs").mkdir()
    Image.new("RGB", (40, 30), (10, 120, 250)).save(tmp_path / "photographs/one.png")
    digits, plain = whole(tmp_path, "mnist", 28)
    found, dataset = whole(tmp_path, "mnist_m", 28, photographs=str(tmp_path / "photographs"))
    colour = np.array([10, 120, 250]).reshape(3, 1, 1)
    np.testing.assert_array_equal(found, np.abs(colour - digits.astype(int)))
    np.testing.assert_array_equal(dataset.labels, plain.labels)
    picture(tmp_path / "photographs/one.png", 40)  # another photograph, other pixels
    again, _ = whole(tmp_path, "mnist_m", 28, photographs=str(tmp_path / "photographs"))
    assert (again != found).any()


def test_adcol_draws_a_fifth_and_cuts_to_the_smallest(tmp_path):
    image_sets.digits5(tmp_path)
    population = load("digits5", {"root": str(tmp_path), "per_party": "smallest"}, None, {"validation": 0.0})
    totals = [sum(counts) for counts in DIGITS.values()]
    assert [client.domain for client in population.clients] == list(DIGITS)
    assert {len(client.train) for client in population.clients} == {min(totals) * 4 // 5}
    assert [len(client.test) for client in population.clients] == [total - total * 4 // 5 for total in totals]
    assert (population.shape, population.mean, population.std) == ((3, 28, 28), (0.5,) * 3, (0.5,) * 3)


def test_rows_are_named_by_domain_and_place_in_its_files(tmp_path):
    image_sets.digits5(tmp_path)
    svhn, published = whole(tmp_path, "svhn", 32)
    drawn = Digits5(root=str(tmp_path), size=32, domains=["usps", "svhn"], per_party=7).load()
    rows = np.flatnonzero(drawn.source == 1)
    assert drawn.sources == ("usps", "svhn")
    np.testing.assert_array_equal(np.asarray(drawn.images)[rows], svhn[drawn.index[rows]])
    np.testing.assert_array_equal(drawn.labels[rows], published.labels[drawn.index[rows]])
    assert len(set(drawn.index[rows])) == len(rows) == 7 + 15


@needs("MNIST/raw")
def test_the_real_mnist_has_the_sizes_of_both_papers():
    adcol = Digits5(domains=["mnist"]).load()
    assert (int((~adcol.is_test).sum()), int(adcol.is_test.sum())) == (56000, 14000)
    fraug = load("digits5", {"domains": ["mnist"], "size": 32, "test": 0.1, "share": 0.01}).clients[0]
    assert (len(fraug.train), len(fraug.test)) == (567, 7000)
