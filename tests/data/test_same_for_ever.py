"""The same seed gives the same examples for ever: what datasets draw before any partition, and the newcomers."""

import numpy as np
import pytest
from PIL import Image

from helpers.federations import blobs
from helpers.partitions import pin, pin_of_parts
from rayfed.core.registry import resolve
from rayfed.data.dataset_options import DomainSampling
from rayfed.data.loading import load_partitioned
from rayfed.data.sets import DATASETS
from rayfed.experiments.plan_data import with_unseen_clients

SIZES = {"art": 157, "photo": 1123, "art_again": 157}
TRAIN, TEST = 300, 100


@pytest.mark.parametrize(
    ("options", "others", "expected"),
    [
        ({}, {}, "7f5a1e76b0d63eb5"),
        ({"test": 0.1, "share": 0.1, "seed": 3}, {}, "e65e097754993a57"),
        ({"per_party": "smallest"}, {}, "badc3c98624b489b"),
        ({"per_party": 50}, {"left_out": ["photo"]}, "6cb776ca572bc0ca"),
        ({}, {"published": {name: np.arange(size) % 4 == 0 for name, size in SIZES.items()}}, "60b1cd6f866bac8e"),
        ({"share": 0.5}, {"made_of": {"art_again": "art"}}, "1a4639ca4b1adec7"),
    ],
)
def test_which_examples_of_a_domain_are_kept_and_which_are_for_testing(options, others, expected):
    others = dict(others)
    left_out = others.pop("left_out", ())

    def draw_groups(**changes):
        kept = DomainSampling(**{**options, **changes}).without(left_out).sample(SIZES, **others)
        return pin(*(values for name in SIZES for values in (kept[name].rows, kept[name].is_test)))

    assert draw_groups() == expected
    if "published" not in others:
        assert draw_groups(seed=11) != expected


@pytest.fixture(scope="module")
def digits():
    return (np.arange((TRAIN + TEST) * 784) * 2654435761 % 2**32 >> 24).astype(np.uint8).reshape(-1, 28, 28)


@pytest.mark.parametrize(
    ("name", "options", "rows", "split"),
    [
        ("mnist_m", {"size": 28}, "d7f77d7eb138cc8a", "17d9e5170668a5c2"),
        ("mnist_m", {"size": 28, "share": 0.2, "tests": 30, "seed": 2}, "ac03df2aea58c3d2", "e2762d3e5d04ad88"),
        ("mnist_views", {}, "03282b2ad069dc2f", "568f88b63355556a"),
        (
            "mnist_views",
            {"views": ["faint", "plain"], "per_domain": 50, "seed": 2},
            "6399868f153f6feb",
            "0f42c7481a09be0d",
        ),
        ("rotated_mnist", {"recipe": "feddebias"}, "2c4c9e9212a9ff39", "f648908689ce7406"),
        ("rotated_mnist", {"recipe": "feddebias", "per_domain": 20, "seed": 2}, "754aa76e31eb0def", "f648908689ce7406"),
        ("rotated_mnist", {"recipe": "augmentation"}, "76476c11f9cba446", "d249c94ec0a75f67"),
        (
            "rotated_mnist",
            {"recipe": "augmentation", "per_domain": 40, "seed": 2},
            "5b28e3cd76994669",
            "f13c744595e0e45a",
        ),
        ("digits5", {"domains": ["mnist", "mnist_m"], "split": "random"}, "b0e4df8dab3d723b", "3b4c2b2cf3c5f3de"),
    ],
)
def test_which_image_is_seen_where(root, name, options, rows, split):
    if name == "digits5":
        (root / "photographs").mkdir(exist_ok=True)
        Image.new("RGB", (40, 30), (10, 120, 250)).save(root / "photographs/one.png")
        options = {**options, "photographs": str(root / "photographs")}
    dataset = resolve(name, DATASETS, where="data")(**options).load()
    tests = [test.examples.y for test in dataset.tests]
    assert pin(dataset.source, dataset.index, dataset.domain, dataset.is_test, dataset.labels, *tests) == rows
    _, parts = load_partitioned(name, options)
    assert pin_of_parts(parts) == split


def test_which_piece_of_a_photograph_a_digit_lies_on(root, tmp_path):
    """At 28 x 28 pixels of MNIST-M are whole numbers' distances, the same on any machine."""
    noise = np.arange(60 * 50 * 3) * 40503 % 65536 >> 8
    Image.fromarray(noise.astype(np.uint8).reshape(60, 50, 3)).save(tmp_path / "one.png")
    options = {"size": 28, "share": 0.1, "photographs": str(tmp_path)}
    found = pin(resolve("mnist_m", DATASETS, where="data")(**options).load().images)
    assert found == "4915408ef04ac349"


@pytest.mark.parametrize(("asked", "seed", "late"), [(4, 1, [0, 5, 7, 9]), (0.3, 0, [4, 6, 8]), (2, 5, [6, 8])])
def test_who_joins_when_training_is_over(asked, seed, late):
    people = with_unseen_clients(blobs(10), asked, seed)
    assert [client.id for client in people.clients[10 - people.unseen_clients :]] == late
