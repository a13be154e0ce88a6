"""Metrics of predictions: calibration and class accuracy by hand, AUROC, F1 and balanced accuracy by scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    jaccard_score,
    roc_auc_score,
)
from torchmetrics.functional import classification, regression, text

from rayfed.metrics.predictions import (
    F1,
    R2,
    Auroc,
    AveragePrecision,
    BalancedAccuracy,
    ClassAccuracy,
    Dice,
    Ece,
    Mae,
    MeanIou,
    MeanOverClasses,
    Perplexity,
    Rmse,
)


def test_class_accuracy_by_hand():
    scores = torch.tensor([[3.0, 1, 0], [3, 1, 0], [0, 3, 1], [1, 0, 3]])
    found = {v.metric: (v.value, v.n) for v in ClassAccuracy().measure(scores, torch.tensor([0, 1, 1, 0]))}
    assert found == {"accuracy_class_0": (0.5, 2), "accuracy_class_1": (0.5, 2)}


def values(metric, logits, y):
    return [(value.metric, value.value, value.n) for value in metric.measure(logits, y)]


class Precision(MeanOverClasses):
    """Undefined, that is 0/0, for a class that is never predicted."""

    name = "precision"

    def of_classes(self, hits, predicted, examples):
        return hits / predicted


def test_a_mean_over_classes_leaves_out_undefined_ones_by_hand():
    predicted = torch.eye(3)[[0, 1, 1, 1]]
    found = values(Precision(), predicted, torch.tensor([0, 0, 1, 2]))
    assert found == [("precision", pytest.approx((1 + 1 / 3) / 2), 4)]
    assert values(Precision(), predicted[:1], torch.tensor([2])) == []


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


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("y", [[0, 1, 1, 0, 1, 0], [0] * 6, [1] * 6, [1]])
def test_further_scores_are_those_of_scikit_learn_and_torchmetrics(classes, y):
    y = torch.tensor(y)
    logits = torch.randn((len(y), classes), generator=torch.Generator().manual_seed(classes)).round(decimals=1)
    p, prediction, present = logits.double().softmax(1).numpy(), logits.argmax(1), np.unique(y)
    iou = jaccard_score(y, prediction, labels=present, average="macro")
    assert values(MeanIou(), logits, y) == [("mean_iou", pytest.approx(iou), len(y))]
    counted = present[present > 0]
    dice = [pytest.approx(f1_score(y, prediction, labels=counted, average="macro"))] if len(counted) else []
    assert [value for _, value, _ in values(Dice(), logits, y)] == dice
    shown = counted if classes == 2 else present
    precision = [average_precision_score(y == label, p[:, label]) for label in shown]
    found = [value for _, value, _ in values(AveragePrecision(), logits, y)]
    assert found == ([pytest.approx(np.mean(precision))] if len(shown) else [])
    theirs = text.perplexity(logits[None], y[None])
    assert values(Perplexity(), logits, y)[0][1] == pytest.approx(float(theirs))
    theirs = classification.multiclass_calibration_error(torch.from_numpy(p), y, classes, n_bins=15)
    assert values(Ece(), logits, y)[0][1] == pytest.approx(float(theirs))


def test_large_logits_are_ranked():
    """torchmetrics rounds their sigmoid to 1, and takes the first for a tie."""
    logits, y = torch.tensor([[0.0, 40], [0, 50], [0, 60], [0, -3]]), torch.tensor([0, 1, 1, 0])
    assert values(Auroc(), logits, y) == [("auroc", 1.0, 4)]
    assert values(AveragePrecision(), logits, y) == [("average_precision", 1.0, 4)]


@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3), (1, 2), (5, 2, 2)])
def test_errors_are_those_of_torchmetrics(shape):
    rng = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    assert values(Mae(), outputs, y)[0][1] == pytest.approx(float(regression.mean_absolute_error(outputs, y)))
    assert values(Rmse(), outputs, y)[0][1] == pytest.approx(float((outputs - y).square().mean().sqrt()))
    if len(y) == 1:
        assert values(R2(), outputs, y) == []
        return
    flat = [part.reshape(len(y), -1) for part in (outputs, y)]
    assert values(R2(), outputs, y)[0][1] == pytest.approx(float(regression.r2_score(*flat)))
    flat[1][:, 0] = 3.0  # a number that never changes
    left = [] if flat[1].shape[1] == 1 else [pytest.approx(float(regression.r2_score(flat[0][:, 1:], flat[1][:, 1:])))]
    assert [value for _, value, _ in values(R2(), *flat)] == left
