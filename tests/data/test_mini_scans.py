"""The embedded segmentation task: masks of strokes, disjoint originals, and scanners that differ."""

import numpy as np
import pytest
import torch

import rayfed
from rayfed.core.errors import UsageError
from rayfed.data.sets.mini_scans import PER_SCANNER, SCANNERS, MiniScans
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.models.unet import UNet


def test_each_scanner_has_images_masks_and_digits_of_its_own():
    dataset = MiniScans().load()
    assert dataset.images.shape == (5 * PER_SCANNER, 1, 32, 32)
    assert dataset.labels.shape == (5 * PER_SCANNER, 32, 32)
    assert set(np.unique(dataset.labels)) == {0, 1}
    assert len(np.unique(dataset.index)) == len(dataset)
    assert [dataset.is_test[dataset.domain == domain].sum() for domain in range(5)] == [71] * 5
    strokes = dataset.labels.mean(axis=(1, 2))
    assert 0.02 < strokes.min() < strokes.max() < 0.5


def test_masks_lie_on_the_strokes():
    dataset = MiniScans().load()
    for domain in range(len(SCANNERS)):
        rows = dataset.domain == domain
        images, masks = dataset.images[rows, 0].astype(float), dataset.labels[rows].astype(bool)
        assert images[masks].mean() - images[~masks].mean() > 20


def test_a_u_net_is_scored_by_its_masks(tmp_path):
    small = {"data.name": "mini_scans", "data.per_domain": 10, "model.name": "unet", "model.width": 2, "rounds": 1}
    result = rayfed.run(**small, **{"algorithm.name": "fedbn", "metrics.dice": True, "results": str(tmp_path)})
    test = result.metrics.query("split == 'test'").groupby("metric").value
    assert set(test.groups) == {"accuracy", "dice", "loss", "mean_iou"}
    assert test.count()["accuracy"] == 5
    masks = result.model(client=0)(torch.zeros(3, 1, 32, 32)).argmax(1)
    assert masks.shape == (3, 32, 32)


def test_a_u_net_refuses_images_that_it_cannot_halve():
    with pytest.raises((UsageError, RuntimeError), match="size"):
        UNet(depth=3).build((1, 28, 28), 2)


def test_a_u_net_is_refused_on_data_without_masks():
    message = "^model.name=unet: gives every pixel a class, and needs masks, of which mini_digits has none$"
    with pytest.raises(UsageError, match=message):
        make_plan(Config.read({"model.name": "unet", "model.width": 2}))
