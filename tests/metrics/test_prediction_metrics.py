"""Metrics of predictions: calibration and class accuracy by hand, AUROC, F1 and balanced accuracy by scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from rayfed.metrics.predictions import F1, Auroc, BalancedAccuracy, ClassAccuracy, Ece


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


def values(metric, logits, y):
    return [(value.metric, value.value, value.n) for value in metric.measure(logits, y)]


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_scores_are_those_of_scikit_learn(classes, ties):
    rng = torch.Generator().manual_seed(classes)
    y = torch.randint(classes, (60,), generator=rng)
    logits = torch.randn((60, classes), generator=rng) + torch.eye(classes)[y]
    logits = logits.round() if ties else logits
    p, prediction = logits.double().softmax(1).numpy(), logits.argmax(1)
    auroc = roc_auc_score(y, p[:, 1]) if classes == 2 else roc_auc_score(y, p, multi_class="ovr", average="macro")
    f1 = f1_score(y, prediction, average="binary" if classes == 2 else "macro")
    assert values(Auroc(), logits, y) == [("auroc", pytest.approx(auroc), 60)]
    assert values(F1(), logits, y) == [("f1", pytest.approx(f1), 60)]
    assert values(BalancedAccuracy(), logits, y) == [
        ("balanced_accuracy", pytest.approx(balanced_accuracy_score(y, prediction)), 60)
    ]


def test_classes_without_examples_do_not_count():
    rng = torch.Generator().manual_seed(0)
    y, logits = torch.tensor([0, 2] * 10), torch.randn((20, 5), generator=rng)
    p, prediction = logits.double().softmax(1).numpy(), logits.argmax(1)
    areas = [roc_auc_score(y == label, p[:, label]) for label in (0, 2)]
    assert values(Auroc(), logits, y)[0][1] == pytest.approx(np.mean(areas))
    assert values(F1(), logits, y)[0][1] == pytest.approx(f1_score(y, prediction, labels=[0, 2], average="macro"))


@pytest.mark.parametrize(("label", "f1"), [(0, []), (1, [0.75])])
def test_what_one_class_leaves_undefined_has_no_value(label, f1):
    logits, y = torch.tensor([[0.0, 1], [0, 1], [0, 1], [1, 0], [1, 0]]), torch.full((5,), label)
    assert values(Auroc(), logits, y) == []
    assert [value for _, value, _ in values(F1(), logits, y)] == pytest.approx(f1)
