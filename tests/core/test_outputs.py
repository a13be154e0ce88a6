"""What outputs stand for, by losses that users write."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed.core.outputs import Outputs, meaning_of_outputs, scored_values
from rayfed.losses.base import CrossEntropy

CLASSES, BINARY = [np.array([0, 1, 4]), np.array([], int)], [np.array([0, 1, 1]), np.array([1, 0])]
COLUMN = [np.array([[0.0], [1.0]], np.float32)]
BITS, NUMBERS = [np.array([[0.0, 1, 1]], np.float32)], [np.array([0.5, 2], np.float32)]
MASKS = [np.ones((2, 6, 6), int), np.zeros((1, 6, 6), int)]


def focal(outputs, y):
    losses = F.cross_entropy(outputs, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def contrastive(outputs, y):
    z = F.normalize(outputs, dim=1)
    return -((z @ z.T / 0.1).log_softmax(1) * (y[:, None] == y)).sum(1).mean()


def ordinal(outputs, y):
    return F.binary_cross_entropy_with_logits(outputs, (torch.arange(outputs.shape[1]) < y[:, None]).float())


def quantiles(outputs, y):
    levels, errors = torch.tensor([0.1, 0.5, 0.9]), y[:, None] - outputs
    return torch.maximum(levels * errors, (levels - 1) * errors).mean()


def of_known(ignored):
    return lambda outputs, y: F.cross_entropy(outputs, y, ignore_index=ignored)


def last(function):
    return lambda outputs, y: function(outputs.movedim(-1, 1), y)


def dice(p, y):
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def dice_and_cross_entropy(outputs, y):
    return F.cross_entropy(outputs, y) + dice(outputs.softmax(1)[:, 1], y)


def dice_of_logit(outputs, y):
    return dice(outputs[:, 0].sigmoid(), y)


def focal_of_logit(outputs, y):
    losses = F.binary_cross_entropy_with_logits(outputs[:, 0], y.float(), reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def of_logit(function, **options):
    return lambda outputs, y: function(outputs.squeeze(), y.float(), **options)


@pytest.mark.parametrize(
    ("loss", "shape", "labels", "meaning"),
    [
        (F.cross_entropy, (5,), CLASSES, "classes"),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 1, 0, 0, 0])), (5,), CLASSES, "classes"),
        (lambda outputs, y: F.nll_loss(outputs.log_softmax(1), y), (5,), CLASSES, "classes"),
        (F.multi_margin_loss, (5,), CLASSES, "classes"),
        (focal, (5,), CLASSES, "classes"),
        (F.cross_entropy, (4,), CLASSES, "unknown"),  # fewer outputs than classes
        (nn.CrossEntropyLoss(ignore_index=-100), (5,), [*CLASSES, np.array([0, 255])], "unknown"),
        (of_known(9), (5,), [*CLASSES, np.array([0, 9, 8])], "unknown"),  # two labels that are no classes
        (F.cross_entropy, (7, 5), [np.zeros((2, 7), int)], "unknown"),  # torch takes the classes first
        (F.cross_entropy, (3,), [np.full((2, 3), 1 / 3, np.float32)], "unknown"),  # soft labels
        (contrastive, (8,), CLASSES, "unknown"),
        (ordinal, (5,), CLASSES, "unknown"),
        (quantiles, (3,), [np.array([0, 2, 1])], "unknown"),
        (F.binary_cross_entropy_with_logits, (1,), COLUMN, "binary"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), (1,), COLUMN, "binary"),
        (of_logit(F.binary_cross_entropy_with_logits), (1,), BINARY, "binary"),
        (of_logit(F.binary_cross_entropy_with_logits), (), BINARY, "binary"),
        (lambda o, y: F.binary_cross_entropy(o[:, 0].sigmoid(), y.float()), (1,), BINARY, "binary"),
        (of_logit(F.binary_cross_entropy_with_logits), (1,), [np.array([1, 2])], "unknown"),
        (F.binary_cross_entropy_with_logits, (1,), [np.array([[0.0], [0.5]], np.float32)], "unknown"),
        (focal_of_logit, (1,), BINARY, "binary"),
        (of_logit(F.binary_cross_entropy), (1,), BINARY, "unknown"),  # a probability, whose threshold is not 0
        (of_logit(F.mse_loss), (1,), BINARY, "unknown"),
        (of_logit(F.l1_loss), (1,), BINARY, "unknown"),
        (F.binary_cross_entropy_with_logits, (3,), BITS, "labels"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3, 9])), (3,), BITS, "labels"),
        (nn.MultiLabelSoftMarginLoss(), (3,), BITS, "labels"),
        (F.cross_entropy, (3,), BITS, "unknown"),  # soft labels
        (F.binary_cross_entropy_with_logits, (3,), [np.array([[0, 0.5, 1]], np.float32)], "unknown"),
        (F.mse_loss, (1,), [np.array([[0.5], [-3]], np.float32)], "numbers"),
        (of_logit(F.mse_loss), (1,), [np.array([18, 80])], "numbers"),
        (of_logit(F.huber_loss, delta=0.1), (1,), NUMBERS, "numbers"),
        (lambda outputs, y: F.smooth_l1_loss(outputs[:, 0], y), (1,), NUMBERS, "numbers"),
        (nn.L1Loss(), (2, 3), [np.ones((4, 2, 3), np.float32)], "numbers"),
        (lambda o, y: (torch.tensor([1.0, 9]) * (o - y) ** 2).mean().sqrt(), (2,), [np.eye(2)], "numbers"),
        (of_logit(F.poisson_nll_loss), (1,), NUMBERS, "unknown"),
        (lambda outputs, y: F.mse_loss(outputs[:, :1], y[:, :1]), (2,), [np.eye(2)], "unknown"),
        (F.gaussian_nll_loss, (1,), NUMBERS, "unknown"),
    ],
)
def test_the_meaning_follows_from_loss_outputs_and_labels(loss, shape, labels, meaning):
    assert meaning_of_outputs(loss, shape, labels).kind == meaning


@pytest.mark.parametrize(
    ("loss", "shape", "labels", "axis", "ignored"),
    [
        (F.cross_entropy, (5, 7), [np.zeros((2, 7), int)], 1, None),
        (nn.CrossEntropyLoss(torch.tensor([0.0, 0, 1])), (3, 4, 5), [np.ones((2, 4, 5), int)], 1, None),
        (functools.partial(F.cross_entropy, ignore_index=2), (2, 4, 5), [np.full((2, 4, 5), 2)], 1, 2),
        (CrossEntropy(ignore_index=255), (2, 4, 5), [np.full((2, 4, 5), 255)], 1, 255),
        (of_known(0), (3, 4), [np.ones((2, 4), int)], 1, 0),  # padding
        (of_known(9), (3, 4), [np.full((2, 4), 9)], 1, 9),
        (last(F.cross_entropy), (7, 5), [np.array([[0, 1, 2, 3, 4, -100, 0]])], 2, -100),
        (last(F.cross_entropy), (4, 4), [np.ones((3, 4), int)], 2, None),  # which axis the loss tells, not the shape
        (F.cross_entropy, (2, 2), [np.ones((3, 2), int)], 1, None),
        (dice_and_cross_entropy, (2, 6, 6), [np.ones((3, 6, 6), int)], 1, None),
        (F.binary_cross_entropy_with_logits, (1, 6, 6), [np.ones((2, 1, 6, 6), np.float32)], None, None),
        (lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()), (1, 6, 6), MASKS, None, None),
        (dice_of_logit, (1, 6, 6), MASKS, None, None),
    ],
)
def test_classes_at_every_position(loss, shape, labels, axis, ignored):
    assert meaning_of_outputs(loss, shape, labels) == Outputs("positions", axis, ignored)


def test_labels_that_are_ignored_are_no_classes():
    assert meaning_of_outputs(F.cross_entropy, (5,), [*CLASSES, np.array([0, -100])]) == Outputs("classes", 1, -100)
    outputs, y = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    y[:, 2] = 255
    logits, classes = scored_values(Outputs("positions", 1, 255), outputs, y)
    assert torch.equal(classes, y[y != 255])
    assert torch.equal(logits, outputs.permute(0, 2, 3, 1)[y != 255])
    logits, classes = scored_values(Outputs("positions", None), outputs[:, 0], y % 2)
    assert torch.equal(logits.argmax(1), (outputs[:, 0] > 0).long().flatten())


def test_a_logit_becomes_the_logits_of_two_classes():
    logit = torch.tensor([[-1.0], [2.0], [0.0]])
    logits, y = scored_values(Outputs("binary"), logit, torch.tensor([[0.0], [1.0], [1.0]]))
    torch.testing.assert_close(logits.softmax(1)[:, 1], logit[:, 0].sigmoid())
    assert (logits.argmax(1).tolist(), y.tolist()) == ([0, 1, 0], [0, 1, 1])
    assert scored_values(Outputs("unknown"), logit, y) is None
