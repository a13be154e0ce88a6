"""Losses of examples, added up over parts, are the mean loss that torch computes of each part alone."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed.core.example_losses import example_losses, sums_of_parts
from rayfed.losses.base import BceWithLogits, CrossEntropy

WEIGHT = torch.tensor([0.5, 2.0, 0.25, 1.0])
LENGTHS = [5, 1, 9, 3]
KNOWN = {
    "function": F.cross_entropy,
    "smoothed": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "weighted": functools.partial(F.cross_entropy, weight=WEIGHT, ignore_index=3),
    "module": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2, ignore_index=2),
    "named": CrossEntropy(),
    "named, weighted": CrossEntropy(weight=WEIGHT.tolist(), ignore_index=1),
    "named, smoothed": functools.partial(CrossEntropy(weight=WEIGHT.tolist()), label_smoothing=0.3),
}


def drawn():
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(sum(LENGTHS), 4, generator=draws)
    y = torch.randint(4, (sum(LENGTHS),), generator=draws)
    return logits, y


@pytest.mark.parametrize("name", KNOWN)
def test_the_mean_of_each_part_is_that_of_torch(name):
    loss = KNOWN[name]
    logits, y = drawn()
    y[5] = 0  # the second part has one example, which must count
    found = example_losses(loss, logits, y)
    sums = sums_of_parts(torch.stack(list(found), 1), LENGTHS)
    expected = [loss(x, labels) for x, labels in zip(logits.split(LENGTHS), y.split(LENGTHS), strict=True)]
    torch.testing.assert_close(sums[:, 0] / sums[:, 1], torch.stack(expected).double(), rtol=1e-6, atol=0)


def test_ignored_labels_may_be_negative():
    logits, y = drawn()
    y[:3] = -100
    losses, weights = example_losses(functools.partial(F.cross_entropy, weight=WEIGHT), logits, y)
    assert weights[:3].tolist() == losses[:3].tolist() == [0, 0, 0]
    assert weights[3:].tolist() == WEIGHT[y[3:]].tolist()


class Own(nn.CrossEntropyLoss):
    """A loss of a user's, which may be anything."""


@pytest.mark.parametrize(
    "loss",
    [
        F.nll_loss,
        Own(),
        BceWithLogits(),
        lambda outputs, y: F.cross_entropy(outputs, y),
        functools.partial(F.cross_entropy, reduction="sum"),
        functools.partial(F.cross_entropy, size_average=True),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_other_losses_are_taken_of_each_part(loss):
    assert example_losses(loss, *drawn()) is None


def test_labels_that_are_no_classes_are_left_to_the_loss():
    logits, y = drawn()
    assert example_losses(F.cross_entropy, logits, logits.softmax(1)) is None
    assert example_losses(F.cross_entropy, logits[:, :, None], y[:, None]) is None


@pytest.mark.parametrize("lengths", [[3, 1, 2], [400, 500], [3, 400, 1, 2, 257, 256]])
def test_sums_of_parts_are_sums_of_slices(lengths):
    values = torch.arange(2.0 * sum(lengths), dtype=torch.float64).reshape(-1, 2)
    expected, start = [], 0
    for length in lengths:
        expected.append(values[start : start + length].sum(0).tolist())
        start += length
    assert sums_of_parts(values, lengths).tolist() == expected


def test_the_bits_of_a_sum_depend_on_its_part_alone():
    lengths = [3, 400, 1, 100, 257, 256]
    values = torch.rand(sum(lengths), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = sums_of_parts(values, lengths)
    for part, length, found in zip(values.split(lengths), lengths, sums, strict=True):
        assert torch.equal(sums_of_parts(part, [length])[0], found)


@pytest.mark.parametrize("name", KNOWN)
def test_the_bits_of_a_loss_do_not_depend_on_the_other_examples(name):
    logits, y = drawn()
    together = example_losses(KNOWN[name], logits, y)
    for i in range(len(y)):
        alone = example_losses(KNOWN[name], logits[i : i + 1], y[i : i + 1])
        assert torch.equal(alone.losses[0], together.losses[i])
