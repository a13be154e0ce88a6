"""Metrics of predictions, by hand."""

import math

import pytest
import torch

from rayfed.metrics.predictions import ClassAccuracy, Ece


def logits(*confidences):
    """Two classes; class 0 has the confidence."""
    return torch.tensor([[math.log(c), math.log(1 - c)] for c in confidences])


def test_ece_by_hand():
    # bins (0.5, 0.75] and (0.75, 1]: {0.6 right, 0.7 wrong}, {0.9 right, 0.8 right}
    found = list(Ece(bins=4).measure(logits(0.6, 0.7, 0.9, 0.8), torch.tensor([0, 1, 0, 0])))
    expected = 2 / 4 * abs(1 / 2 - 0.65) + 2 / 4 * abs(1 - 0.85)
    assert [(v.metric, v.n) for v in found] == [("ece", 4)]
    assert found[0].value == pytest.approx(expected)


def test_an_upper_edge_belongs_to_its_bin():
    # 0.75 with three bins of a quarter... in the third of four bins, with 0.6; in the fourth they would not mix
    found = list(Ece(bins=4).measure(logits(0.6, 0.75), torch.tensor([1, 0])))
    assert found[0].value == pytest.approx(abs(0.5 - 0.675), abs=1e-6)


def test_class_accuracy_by_hand():
    scores = torch.tensor([[3.0, 1, 0], [3, 1, 0], [0, 3, 1], [1, 0, 3]])
    found = {v.metric: (v.value, v.n) for v in ClassAccuracy().measure(scores, torch.tensor([0, 1, 1, 0]))}
    assert found == {"accuracy_class_0": (0.5, 2), "accuracy_class_1": (0.5, 2)}


def test_classes_without_examples_have_no_value():
    found = {v.metric: v.value for v in ClassAccuracy().measure(torch.eye(3)[[0, 2, 2]], torch.tensor([0, 2, 0]))}
    assert found == {"accuracy_class_0": 0.5, "accuracy_class_2": 1.0}
