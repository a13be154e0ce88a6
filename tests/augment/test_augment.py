"""Augmentations against torchvision's, image by image with the same parameters, and how they are drawn and used."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF
from torch import nn
from torchvision.transforms import InterpolationMode, v2

from helpers.federations import blueprint, simulate
from rayfed.algorithm import Phase
from rayfed.algorithms.fedavg import FedAvg
from rayfed.augment import AUGMENTS
from rayfed.augment.base import Noise
from rayfed.augment.images import (
    Blur,
    Crop,
    HorizontalFlip,
    Moderate,
    Rotation,
    Weak,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    crop_and_resize,
    draw_boxes,
    draw_chances,
    draw_jitter,
    first_that_fits,
    gaussian_blur,
    grey_below,
    jitter_colours,
    rotate,
)
from rayfed.core.errors import UsageError
from rayfed.core.ids import Moment
from rayfed.core.registry import resolve
from rayfed.core.rng import Streams
from rayfed.data.population import Client, Examples, Population
from rayfed.engine import training
from rayfed.engine.training import train_block


def pictures(count=6, channels=3, height=17, width=17, seed=0):
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(seed))


# Each change with given parameters


@pytest.mark.parametrize("sides", [(17, 17), (28, 28), (12, 20)])
def test_turned(sides):
    x, degrees = pictures(6, 3, *sides), torch.tensor([0.0, 90.0, -33.0, 12.5, 45.0, 179.0])
    wanted = [
        TF.rotate(image, angle.item(), InterpolationMode.NEAREST) for image, angle in zip(x, degrees, strict=True)
    ]
    same = (rotate(x, degrees) == torch.stack(wanted)).float().mean(dim=(1, 2, 3))
    assert same.min() > 0.99  # a pixel between two may fall either way
    assert torch.equal(rotate(x, torch.zeros(6)), x)


@pytest.mark.parametrize("channels", [1, 3])
def test_blurred(channels):
    x, sigma = pictures(4, channels, 12, 15), torch.tensor([0.1, 0.5, 1.3, 2.0])
    wanted = [TF.gaussian_blur(image, [5, 5], [s.item()] * 2) for image, s in zip(x, sigma, strict=True)]
    torch.testing.assert_close(gaussian_blur(x, sigma), torch.stack(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sides", [(28, 28), (20, 13)])
def test_resized(sides):
    x = pictures(5, 3, *sides)
    height, width = sides
    boxes = torch.tensor(
        [[0, 0, height, width], [0, 0, 9, 8], [4, 3, 9, 7], [height - 10, width - 9, 10, 9], [1, 2, 11, 11]]
    ).T.float()
    wanted = [
        TF.resized_crop(image, *(int(side) for side in box), list(sides)) for image, box in zip(x, boxes.T, strict=True)
    ]
    torch.testing.assert_close(crop_and_resize(x, boxes), torch.stack(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs", "factors"),
    [
        (adjust_brightness, TF.adjust_brightness, (0.0, 0.7, 1.0, 1.3)),
        (adjust_contrast, TF.adjust_contrast, (0.0, 0.7, 1.0, 1.3)),
        (adjust_saturation, TF.adjust_saturation, (0.0, 0.7, 1.0, 1.3)),
        (adjust_hue, TF.adjust_hue, (-0.3, -0.01, 0.0, 0.5)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_colours(ours, theirs, factors, channels):
    x = pictures(4, channels)
    x[:, :, 0], x[:, :, 1], x[:, :, 2] = 0, 1, 0.5  # without colour
    wanted = [theirs(image, factor) for image, factor in zip(x, factors, strict=True)]
    torch.testing.assert_close(ours(x, torch.tensor(factors)), torch.stack(wanted), rtol=1e-4, atol=2e-5)


# How parameters are drawn


def test_every_image_has_its_own_draw():
    x = pictures(1).expand(50, -1, -1, -1)
    for augment in (Rotation(), Blur(), Weak(), Moderate(), Crop(), Noise()):
        torch.manual_seed(0)
        found = augment(x.clone())
        assert len({image.numpy().tobytes() for image in found}) > 30, augment
        assert not torch.equal(augment(x.clone()), found)
        torch.manual_seed(0)
        assert torch.equal(augment(x.clone()), found)


def test_boxes():
    torch.manual_seed(0)
    top, left, height, width = first_that_fits(100, 100, *draw_boxes(4000, (0.7, 1.0), torch.device("cpu")))
    area, ratio = height * width / 1e4, width / height
    assert 0.68 < area.min() < 0.72
    assert 0.95 < area.max() <= 1
    assert 0.7 < ratio.min() < ratio.max() < 1.43
    assert ((top >= 0) & (top + height <= 100) & (left >= 0) & (left + width <= 100)).all()
    transform = v2.RandomResizedCrop(100, (0.7, 1.0))
    drawn = [transform.make_params([torch.rand(1, 100, 100)]) for _ in range(1500)]
    for ours, key in ((top, "top"), (left, "left"), (height, "height"), (width, "width")):
        assert ours.mean().item() == pytest.approx(np.mean([each[key] for each in drawn]), abs=0.6), key


def test_shares():
    torch.manual_seed(0)
    ramp = torch.arange(9.0).expand(4000, 1, 9, 9)
    mirrored = HorizontalFlip(probability=0.3)(ramp)[:, 0, 0, 0] == 8
    assert mirrored.float().mean().item() == pytest.approx(0.3, abs=0.03)
    coloured = pictures(1).expand(4000, -1, -1, -1)
    lost = grey_below(coloured, 0.1, *draw_chances(coloured))
    assert (lost[:, 0] == lost[:, 1]).all((1, 2)).float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_jitter_in_every_order():
    """With two orders alone the outcome of one image would be one of two; all 24 are met."""
    x = pictures(1).expand(600, -1, -1, -1)
    torch.manual_seed(0)
    found = jitter_colours(x, *draw_jitter(x, 0.3))
    assert 0 <= found.min() < found.max() <= 1
    torch.manual_seed(0)
    orders = torch.rand(600, 4).argsort(1)
    factors = [torch.empty(600).uniform_(0.7, 1.3) for _ in range(3)] + [torch.empty(600).uniform_(-0.3, 0.3)]
    assert len({tuple(order) for order in orders.tolist()}) == 24
    changes = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
    for j in range(0, 600, 60):
        image = x[j]
        for kind in orders[j].tolist():
            image = changes[kind](image, factors[kind][j].item())
        torch.testing.assert_close(found[j], image, rtol=1e-3, atol=1e-4)


def test_noise():
    torch.manual_seed(0)
    x = torch.full((100, 1000), 3.0)
    noise = Noise(sigma=0.5)(x) - x
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(noise.mean().item()) < 0.01


# In training


class Pictures(nn.Module):
    feature_shape = (4,)

    def __init__(self, channels=1):
        super().__init__()
        self.conv, self.head = nn.Conv2d(channels, 4, 3), nn.Linear(4, 3)

    def features(self, x):
        return self.conv(x).relu().mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


def people(sizes=(10, 10, 10), channels=1):
    rng = np.random.default_rng(0)

    def examples(n):
        x = rng.integers(0, 256, (n, channels, 8, 8)).astype(np.uint8)
        return Examples(x, rng.integers(0, 3, n).astype(np.int64))

    clients = tuple(Client(i, "d", examples(size), examples(4), examples(4)) for i, size in enumerate(sizes))
    return Population("pictures", clients, 3, (channels, 8, 8), (0.4,) * channels, (0.2,) * channels)


def seen_by_steps(augment, population, **changes):
    seen = []

    class Spy(FedAvg):
        def step(self, ctx, work, down, batch):
            if changes.get("vmap_clients", 1) == 1:
                seen.append((ctx.round, ctx.client, ctx.step, batch))
            return super().step(ctx, work, down, batch)

        def finish(self, ctx, work, client, down, data):
            for batch in data.train.batches(100):
                seen.append((ctx.round, ctx.client, "finish", batch))
            return super().finish(ctx, work, client, down, data)

    torch.manual_seed(0)
    plan = blueprint(Spy(), population, model=Pictures(population.shape[0]), augment=augment, **changes)
    server, _ = simulate(plan, population)
    return server, {key: batch for *key, batch in seen for key in [tuple(key)]}


def test_pixels_are_augmented_before_normalisation_and_seeded_by_round_client_and_step():
    population = people()
    _, plain = seen_by_steps(None, population)
    augment = Rotation(degrees=60.0)
    _, found = seen_by_steps(augment, population)
    assert found.keys() == plain.keys()
    for (round_, client, step), batch in plain.items():
        assert torch.equal(found[round_, client, step].y, batch.y)
        if step == "finish":
            assert torch.equal(found[round_, client, step].x, batch.x)  # never augmented
            continue
        pixels = batch.x * 0.2 + 0.4
        Streams(0).begin("batch", Moment("round", round_), phase=0, client=client, step=step)
        wanted = (augment(pixels) - 0.4) / 0.2
        torch.testing.assert_close(found[round_, client, step].x, wanted, rtol=1e-4, atol=1e-5)
        assert not torch.equal(found[round_, client, step].x, batch.x)


@pytest.mark.parametrize("augment", [Rotation(), Moderate(), Noise()])
def test_any_width_augments_alike(augment):
    population = people()
    narrow, wide = (seen_by_steps(augment, population, vmap_clients=w)[0].state["weights"] for w in (1, 3))
    plain = seen_by_steps(None, population)[0].state["weights"]
    for name, value in narrow.items():
        torch.testing.assert_close(value, wide[name], rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(value, narrow[name], atol=1e-4) for name, value in plain.items())


@dataclass(frozen=True, kw_only=True)
class Own(Crop):
    """An augmentation that draws and changes a batch in one hook."""

    def __call__(self, x):
        return super().__call__(x) * torch.rand_like(x)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", [*list(AUGMENTS)[1:], "own"])
def test_clients_that_train_at_once_have_the_bits_that_each_has_alone(name, channels, monkeypatch):
    population, together = people((10, 21, 15), channels), {}
    augment = Own() if name == "own" else resolve(name, AUGMENTS, where="augment.name")()

    def watched(exchange, ctx, work, down, batches, counts, graphs):
        assert counts == [4, 3, 2]
        batches = list(batches)
        for step, batch in enumerate(batches):
            for client, x, y in zip((1, 2, 0), *batch, strict=False):  # those that still train
                together[ctx.round, client, step] = x, y
        return train_block(exchange, ctx, work, down, batches, counts, graphs)

    monkeypatch.setattr(training, "train_block", watched)
    seen_by_steps(augment, population, vmap_clients=3)
    _, alone = seen_by_steps(augment, population)
    assert together.keys() == {key for key in alone if key[2] != "finish"}
    for key, (x, y) in together.items():
        assert torch.equal(x, alone[key].x), key
        assert torch.equal(y, alone[key].y), key


def test_scores_see_the_data_as_they_are():
    population = people()
    torch.manual_seed(0)
    changes = {"model": Pictures(), "local": Phase("train", steps=0)}
    one, other = (
        simulate(blueprint(FedAvg(), population, augment=augment, **changes), population)[1][-1].scores
        for augment in (None, Rotation(degrees=180.0))
    )
    assert [score for score in one if score.split == "test"] == [score for score in other if score.split == "test"]


# Names and refusals


@pytest.mark.parametrize(
    ("augment", "shape", "dtype", "words"),
    [
        (Rotation(), (6,), np.float32, "augment.name: Rotation needs images, but the inputs are 6"),
        (Moderate(), (3, 8, 8), np.float32, "augment.name=moderate: colour jitter needs uint8"),
        (Moderate(), (2, 8, 8), np.uint8, "augment.name=moderate: colour jitter needs uint8"),
        (Noise(), (9,), np.int64, "augment.name=noise: needs images or floats"),
    ],
)
def test_data_that_cannot_be_augmented(augment, shape, dtype, words):
    with pytest.raises(UsageError) as error:
        augment.check(shape, np.dtype(dtype))
    assert str(error.value).startswith(words)
