"""AUROC, F1 and balanced accuracy, against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from rayfed.metrics.predictions import F1, Auroc, BalancedAccuracy


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
