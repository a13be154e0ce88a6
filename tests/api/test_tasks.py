"""Tasks besides classification, from a user's arrays to the tables: what is scored without being asked."""

import io

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    jaccard_score,
    mean_absolute_error,
    r2_score,
    root_mean_squared_error,
)
from torch import nn

import rayfed
from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset
from rayfed.data.loading import load
from rayfed.data.partitions.pooled import Dirichlet, Iid, LabelK
from rayfed.data.partitions.summary import class_counts, describe
from rayfed.data.sets.labelled_table import Table


class Shaped(nn.Module):
    """A model with outputs of any shape, and a split."""

    feature_shape = (9,)

    def __init__(self, *shape):
        super().__init__()
        self.body, self.last, self.shape = nn.Linear(6, 9), nn.Linear(9, int(np.prod(shape))), shape

    def features(self, x):
        return self.body(x).relu()

    def head(self, z):
        return self.last(z).reshape(len(z), *self.shape)

    def forward(self, x):
        return self.head(self.features(x))


def masks(x):
    return (x[:, :4, None] + x[:, None, 2:6] > 0.5).astype(int)


def bits(x):
    return (x[:, :4] > 0.4).astype(np.float32)


def price(x):
    return (3 * x[:, 0] - x[:, 1] + x[:, 2] ** 2).astype(np.float32)


def squared_error(outputs, y):
    return F.mse_loss(outputs[:, 0], y)


def clients(labels, count=3, tests=12):
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        x = rng.normal(size=(20 + tests, 6)).astype(np.float32)
        y = labels(x)
        parts = {"train": slice(0, 12), "val": slice(12, 20), "test": slice(20, None)}
        made.append({name: (x[rows], y[rows]) for name, rows in parts.items()})
    return made


@pytest.fixture
def run(tmp_path):
    """Run three rounds, and return the result and the scores of client 0 on its test part after the last."""

    def run(labels, model, loss=None, config=None, **options):
        given = clients(labels) if callable(labels) else labels
        values = {"rounds": 3, "local.lr": 0.2, "results": str(tmp_path), "select": {}} | (config or {})
        result = rayfed.run(values, clients=given, model=model, loss=loss, **options)
        last = result.metrics.query("round == 3 and client == 0 and split == 'test'").set_index("metric")["value"]
        with torch.no_grad():
            outputs = result.model()(torch.from_numpy(given[0]["test"][0]))
        return result, last.to_dict(), outputs, given[0]["test"][1]

    return run


@pytest.mark.parametrize("form", ["classes", "logit", "convolution"])
def test_masks_have_accuracy_and_iou_of_their_positions(run, form):
    if form == "classes":
        model, loss, labels = lambda: Shaped(2, 4, 4), F.cross_entropy, masks
    elif form == "convolution":  # a model that has no split
        model = lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 3, padding=1))  # noqa: E731
        labels, loss = lambda x: (x.reshape(-1, 2, 3) > 0.5).astype(int), None
    else:
        model, loss = lambda: Shaped(1, 4, 4), F.binary_cross_entropy_with_logits
        labels = lambda x: masks(x)[:, None].astype(np.float32)  # noqa: E731
    torch_iou = "torchmetrics:classification.MulticlassJaccardIndex"
    of_images = {"num_classes": 2, "input_format": "index", "average": "none", "include_background": False}
    metrics = {"dice": True, torch_iou: {"num_classes": 2}, "torchmetrics:segmentation.DiceScore": of_images}
    config = {"metrics": metrics, "select.metric": "mean_iou"}
    result, scores, outputs, y = run(labels, model, loss, config)
    predicted = (outputs > 0 if form == "logit" else outputs.argmax(1)).numpy().astype(int)
    of_image = [f1_score(a.ravel(), b.ravel(), zero_division=np.nan) for a, b in zip(y, predicted, strict=True)]
    predicted, y = predicted.ravel(), y.ravel()
    assert set(scores) == {"accuracy", "loss", "mean_iou", "dice", "MulticlassJaccardIndex", "DiceScore"}
    assert scores["DiceScore"] == pytest.approx(np.nanmean(of_image))
    assert scores["accuracy"] == pytest.approx(np.mean(predicted == y))
    iou = jaccard_score(y, predicted, average=None)
    assert scores["mean_iou"] == pytest.approx(iou.mean())
    assert scores["MulticlassJaccardIndex"] == pytest.approx(iou.mean())
    assert scores["dice"] == pytest.approx(f1_score(y, predicted))
    assert set(result.metrics.query("metric == 'mean_iou'")["n"]) == {8, 12}  # examples, not positions
    assert result.trials["selection_metric"].tolist() == ["mean_iou"]


def test_ignored_positions_count_in_no_score(run):
    def labels(x):
        y = masks(x)
        y[:, 1] = 255
        return y

    given = clients(labels)
    given[1]["test"][1][:] = 255  # a client without any label to score
    loss = nn.CrossEntropyLoss(ignore_index=255)
    result, scores, outputs, y = run(given, lambda: Shaped(2, 4, 4), loss, {"metrics.ece": True})
    counted, predicted = y != 255, outputs.argmax(1).numpy()
    assert scores["accuracy"] == pytest.approx(np.mean((predicted == y)[counted]))
    assert scores["mean_iou"] == pytest.approx(jaccard_score(y[counted], predicted[counted], average=None).mean())
    assert result.metrics.query("client == 1 and split == 'test'").empty
    assert result.metrics["value"].notna().all()


@pytest.mark.parametrize("axis", [1, 2])
def test_sequences_have_accuracy_and_perplexity(run, axis):
    shape = (3, 5) if axis == 1 else (5, 3)
    loss = None if axis == 1 else lambda outputs, y: F.cross_entropy(outputs.transpose(1, 2), y)
    _, scores, outputs, y = run(
        lambda x: np.argsort(x[:, :5], 1) % 3,
        lambda: Shaped(*shape),
        loss,
        {"metrics.torchmetrics:text.Perplexity": True},
    )
    assert set(scores) == {"accuracy", "loss", "perplexity", "Perplexity"}
    p = outputs.softmax(axis).movedim(axis, -1).numpy()
    own = np.take_along_axis(p, y[..., None], -1)
    assert scores["perplexity"] == pytest.approx(np.exp(-np.log(own).mean()))
    assert scores["Perplexity"] == pytest.approx(scores["perplexity"])
    assert scores["accuracy"] == pytest.approx(np.mean(p.argmax(-1) == y))


def test_several_labels_have_f1_and_average_precision(run):
    given = clients(bits)
    given[0]["test"][1][:, 2] = 0  # a label without examples does not count
    given[1]["test"][1][:] = 0
    result, scores, outputs, y = run(given, lambda: Shaped(4), F.binary_cross_entropy_with_logits)
    present = [0, 1, 3]
    assert set(scores) == {"loss", "f1", "average_precision"}
    f1 = f1_score(y, (outputs > 0).numpy(), average=None, zero_division=0)[present].mean()
    assert scores["f1"] == pytest.approx(f1)
    precision = [average_precision_score(y[:, k], outputs[:, k]) for k in present]
    assert scores["average_precision"] == pytest.approx(np.mean(precision))
    assert set(result.metrics.query("client == 1 and split == 'test'")["metric"]) == {"loss"}
    assert result.trials["selection_metric"].tolist() == ["f1"]
    with pytest.raises(UsageError, match=r"^metrics.ece: needs outputs that stand for classes, .* several labels"):
        run(given, lambda: Shaped(4), F.binary_cross_entropy_with_logits, {"metrics.ece": True})


def test_numbers_have_errors_and_the_lowest_is_the_best(run, tmp_path):
    given = clients(price)
    given[1]["test"] = tuple(part[:1] for part in given[1]["test"])  # of one example there is no variance
    config = {"experiment": "prices", "metrics.torchmetrics:regression.R2Score": True}
    result, scores, outputs, y = run(given, lambda: Shaped(1), squared_error, config)
    o = outputs[:, 0].numpy()
    assert scores["mae"] == pytest.approx(mean_absolute_error(y, o))
    assert scores["rmse"] == pytest.approx(root_mean_squared_error(y, o))
    assert scores["r2"] == pytest.approx(r2_score(y, o))
    assert scores["R2Score"] == pytest.approx(scores["r2"])
    of_one = set(result.metrics.query("client == 1 and split == 'test'")["metric"])
    assert of_one == {"loss", "mae", "rmse"}
    means = result.metrics.query("metric == 'mae'").groupby(["split", "round"])["value"].mean()
    csv = io.StringIO(str(rayfed.report(tmp_path, "prices", format="csv")))
    shown = pd.read_csv(csv).query("rule == 'selected' and quantity == 'mean'").set_index("metric")["mean"]
    assert shown.to_dict() == {"mae": pytest.approx(means["test"][means["val"].idxmin()])}
    assert "test mae, at the round" in str(rayfed.report(tmp_path, "prices"))
    assert rayfed.report(tmp_path, "prices", metric="r2")
    with pytest.raises(UsageError, match=r"^select.metric=accuracy: predictions have no such score; "):
        run(given, lambda: Shaped(1), squared_error, {"select.metric": "accuracy"})


@pytest.mark.parametrize(
    ("metric", "error"),
    [
        ({"classification.MulticlasJaccardIndex": True}, "no such metric; did you mean MulticlassJaccardIndex"),
        ({"clasification.MulticlassJaccardIndex": True}, "no such metric; did you mean classification"),
        ({"classification.MulticlassJaccardIndex": True}, "num_classes"),
        ({"classification.MulticlassJaccardIndex": {"num_classes": 2, "averag": "macro"}}, "averag"),
        ({"classification.MulticlassJaccardIndex": {"num_classes": 1}}, "num_classes"),
        ({"functional.r2_score": True}, "functional=.*not callable"),
    ],
)
def test_a_wrong_metric_of_torchmetrics_is_refused_in_one_line(run, metric, error):
    metrics = {f"torchmetrics:{name}": options for name, options in metric.items()}
    with pytest.raises(UsageError, match=rf"^metrics.torchmetrics:.*{error}"):
        run(masks, lambda: Shaped(2, 4, 4), F.cross_entropy, {"metrics": metrics})


@pytest.mark.parametrize("labels", [masks, bits, price], ids=lambda labels: labels.__name__)
def test_a_dataset_and_a_table_take_such_labels(tmp_path, labels):
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    y = labels(x)
    dataset = Dataset.of("own", x, y, strata=np.arange(40) % 3)
    assert dataset.labels.dtype == y.dtype
    pd.DataFrame({"x": list(x), "label": [row.tolist() for row in y], "site": np.arange(40) % 3}).to_parquet(
        tmp_path / "table.parquet"
    )
    options = {"file": str(tmp_path / "table.parquet"), "features": ["x"]}
    of_table = Table(**options).load()
    assert np.array_equal(of_table.labels, y)
    assert of_table.labels.dtype == y.dtype
    iid = Iid(clients=4).split(dataset)
    assert "own: 4 clients, labels " in describe(dataset, iid)
    assert class_counts(dataset, iid).sum() == sum(len(client.train) + len(client.val) for client in iid)
    with pytest.raises(UsageError, match=r"^partition.name: this partition divides by class, and the labels of table"):
        Dirichlet(clients=4).split(of_table)
    split = LabelK(clients=3, classes_per_client=1).split(Table(**options, strata="site").load())
    for client, other in zip(split, LabelK(clients=3, classes_per_client=1).split(dataset), strict=True):
        assert set(client.train % 3) == {client.id}
        assert np.array_equal(client.train, other.train)
    population = load("parquet", options, "iid", {"clients": 4})
    assert population.clients[0].train.y.shape[1:] == y.shape[1:]
    assert population.num_classes == (2 if labels is masks else 1)


def test_several_columns_are_several_labels(tmp_path):
    table = pd.DataFrame({"a": np.arange(8.0), "left": [0, 1] * 4, "right": [1, 1, 0, 0] * 2})
    table.to_csv(tmp_path / "table.csv", index=False)
    loaded = Table(file=str(tmp_path / "table.csv"), features=["a"], label=["left", "right"]).load()
    assert np.array_equal(loaded.labels, table[["left", "right"]])
    with pytest.raises(UsageError, match=r"^data.features: left is data.label"):
        Table(file=str(tmp_path / "table.csv"), features=["left"], label=["left", "right"]).load()


def test_numbers_are_no_classes_for_cross_entropy(tmp_path):
    pd.DataFrame({"a": np.arange(8.0), "label": np.arange(8) / 2}).to_csv(tmp_path / "table.csv", index=False)
    data = {"name": "csv", "file": str(tmp_path / "table.csv"), "features": ["a"]}
    with pytest.raises(UsageError, match=r"^loss.name=cross_entropy: takes classes, integers from 0, and the labels"):
        rayfed.run({"data": data, "model.name": "mlp", "partition.clients": 2})
