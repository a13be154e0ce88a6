"""Metrics switched on by the configuration: what arrives in the tables, and that nothing else changes."""

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rayfed
from helpers.federations import as_mappings, blobs, blueprint, net
from helpers.run_on_stand_in_device import METRICS
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.engine.device_data import client_data
from rayfed.engine.scoring import DueMetrics
from rayfed.metrics.representations import Mdl, collect_representations
from rayfed.models.split_model import SplitModel

ALL = METRICS | {"class_accuracy": {"every": 2}, "gradient_norm": {"every": 2}}


def run(tmp_path, config=None, **keys):
    base = {"rounds": 3, "local.batch_size": 5, "results": str(tmp_path / "results"), "evaluate.points": ["global"]}
    return rayfed.run({**base, **(config or {}), **keys}, clients=as_mappings(blobs(4)), model=net)


def test_all_metrics_arrive_where_they_should(tmp_path):
    result = run(tmp_path, {"metrics": ALL, "evaluate.points": ["global", "trained"]})
    found = result.metrics
    rounds = {name: sorted(set(rows["round"])) for name, rows in found.groupby("metric")}
    assert rounds["ece"] == rounds["drift"] == rounds["drift_relative"] == [1, 2, 3]
    assert rounds["gradient_norm"] == rounds["gradient_norm_mean"] == rounds["accuracy_class_0"] == [2, 3]
    assert rounds["mdl"] == rounds["mdl@logits"] == rounds["frechet"] == [3]
    points = {name: set(rows["point"]) for name, rows in found.groupby("metric")}
    assert points["ece"] == points["mdl"] == {"global", "trained"}
    assert points["drift"] == {"trained"}
    assert points["gradient_norm"] == {"global"}
    drift = found[found["metric"] == "drift"]
    assert sorted(drift["client"]) == sorted([0, 1, 2, 3] * 3)
    assert (drift["value"] > 0).all()
    assert set(found[found["metric"] == "gradient_norm"]["domain"]) == {c.domain for c in blobs(4).clients}
    maps = sorted((tmp_path / "results" / "run" / "maps").glob("*.parquet"))
    assert len(maps) == 2
    places = pd.read_parquet(maps[0])
    assert list(places.columns) == ["client", "domain", "label", "x", "y", "point"]
    assert set(places["client"]) == {0, 1, 2, 3}
    assert set(places["point"]) == {"global"}


def test_a_joint_map_has_the_same_examples_under_every_model_in_one_projection(tmp_path):
    tsne = {"joint": True, "examples": 40, "perplexity": 5}
    run(tmp_path, {"metrics": {"tsne": tsne}, "evaluate.points": ["global", "trained", "adapted"]})
    (file,) = (tmp_path / "results" / "run" / "maps").glob("*.parquet")
    assert "-round3-tsne-joint-test-features" in file.name
    points = dict(list(pd.read_parquet(file).groupby("point")))
    assert set(points) == {"global", "trained", "adapted"}
    examples = [points[point][["client", "label"]].reset_index(drop=True) for point in points]
    assert len(examples[0]) == 40
    assert all(each.equals(examples[0]) for each in examples)
    assert points["global"]["x"].tolist() != points["trained"]["x"].tolist()


def test_models_that_diverged_in_the_last_step_end_no_trial(tmp_path):
    """The loss was finite before that step, so the trial is done; nobody can fit a head to what is infinite."""
    diverging = {"algorithm.name": "solo", "local.lr": 3e37, "local.steps": 1, "rounds": 1, "batch_norm": "frozen"}
    points = {"evaluate.points": ["downloaded"]}
    metrics = {name: options for name, options in ALL.items() if name != "gradient_norm"}
    plain = run(tmp_path, {**diverging, **points}, experiment="a").metrics
    found = run(tmp_path, {**diverging, **points, "metrics": metrics}, experiment="b").metrics
    assert plain.query("metric == 'loss' and split == 'test'")["value"].isna().all()
    of_representations = {"mdl", "mdl@logits", "frechet", "frechet_mean", "head_accuracy"}
    assert not of_representations & set(found["metric"])
    assert {"loss", "accuracy", "ece", "drift"} <= set(found["metric"])


def test_what_a_head_is_fitted_to_need_not_be_scored(tmp_path):
    """The training part is not in evaluate.splits: the same values as if it were, and no other row changes."""
    points = {"evaluate.points": ["global", "downloaded", "trained"]}
    plain = run(tmp_path, points, experiment="a").metrics
    found = run(tmp_path, {"metrics": {"head_accuracy": True, "drift": True}, **points}, experiment="b").metrics
    splits = {"evaluate.splits": ["train", "val", "test"]}
    scored = run(tmp_path, {"metrics": {"head_accuracy": True}, **splits, **points}, experiment="c").metrics
    keys = ["round", "client", "split", "point", "metric"]
    heads, expected = (rows[rows["metric"] == "head_accuracy"].set_index(keys)["value"] for rows in (found, scored))
    assert len(heads) == 3 * 4
    assert heads.to_dict() == expected.to_dict()
    others = found[~found["metric"].isin(["head_accuracy", "drift", "drift_relative"])]
    pd.testing.assert_series_equal(others.set_index(keys)["value"], plain.set_index(keys)["value"], check_exact=True)


@pytest.mark.parametrize("splits", [("val",), ("val", "train")])
def test_gradient_norm_is_that_of_the_final_model(tmp_path, splits):
    """Clients 0 and 2 share a domain: the gradient is that of their examples together, of all splits asked for."""
    result = run(tmp_path, {"metrics": {"gradient_norm": {"splits": list(splits)}}})
    model, (first, _, second, _) = net(), blobs(4).clients
    assert first.domain == second.domain
    model.load_state_dict(result.server["weights"])
    model.eval()
    parts = [getattr(client, split) for client in (first, second) for split in splits]
    x, y = (torch.cat([torch.from_numpy(getattr(part, name)) for part in parts]) for name in ("x", "y"))
    F.cross_entropy(model(x), y).backward()
    norm = sum((p.grad.double() ** 2).sum() for p in model.parameters()) ** 0.5
    rows = result.metrics[(result.metrics["metric"] == "gradient_norm") & (result.metrics["domain"] == first.domain)]
    assert rows["value"].item() == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize(("every", "rounds"), [(None, [4]), (2, [2, 4])])
def test_metrics_that_come_once_look_at_the_models_after_the_final_stage(tmp_path, every, rounds):
    """FedBABU fine-tunes in round R + 1; the models after local training are those of round R."""
    metrics = {"frechet": {"every": every}, "gradient_norm": {"every": every}, "ece": True}
    points = ["global", "downloaded", "trained"]
    found = run(tmp_path, {"metrics": metrics, "algorithm.name": "fedbabu", "evaluate.points": points}).metrics
    at = {key: sorted(set(rows["round"])) for key, rows in found.groupby(["metric", "point"])}
    assert at["frechet", "downloaded"] == at["frechet", "global"] == at["gradient_norm_mean", "global"] == rounds
    assert at["frechet", "trained"] == ([3] if every is None else [2, 3])
    assert at["ece", "downloaded"] == [1, 2, 3, 4]


def collected(model, layers, algorithm=None, weights=None):
    people, algorithm = blobs(2), algorithm or FedAvg()
    ctx = blueprint(algorithm, people, model=model).context(people, "cpu")
    part = client_data(people, 0, ctx.task).train
    mine = ctx.task.initial_weights() | (weights or {})
    rows = torch.tensor([3, 1])
    return part.x[rows], collect_representations(algorithm, ctx, mine, part, rows, layers)


def test_layers_by_name_and_by_method():
    model = net().eval()
    x, found = collected(model, ["features", "head", "logits", "body.0"])
    torch.testing.assert_close(found["features"], model.features(x))
    torch.testing.assert_close(found["head"], model.features(x))
    torch.testing.assert_close(found["logits"], model(x))
    torch.testing.assert_close(found["body.0"], model.body[0](x))
    assert "features" not in model.__dict__


def test_features_of_dbe_come_before_its_bias():
    bias = torch.linspace(-1, 1, 5)
    model = SplitModel(nn.Linear(6, 5), nn.Linear(5, 3), (6,))
    x, found = collected(model, ["features", "head"], DBE(), {"dbe.bias": bias})
    torch.testing.assert_close(found["features"], model.features(x))
    torch.testing.assert_close(found["head"] - found["features"], bias.expand(2, -1))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"metrics": {"mdl": {"layers": ["bodi.0"]}}}, "metrics.mdl.layers: the model has no layer 'bodi.0'; did you"),
        ({"metrics": {"tsne": {"split": "ood"}}}, "metrics.tsne.split=ood: this split is not scored; scored splits"),
        (
            {"metrics.gradient_norm": True, "algorithm.name": "fedrep", "evaluate.points": ["downloaded"]},
            "metrics.gradient_norm: needs a global model",
        ),
    ],
)
def test_metrics_of_what_is_not_there(tmp_path, config, words):
    with pytest.raises(UsageError, match=words.replace(".", r"\.").split("'")[0]):
        run(tmp_path, config)


def test_a_client_sends_its_share_of_representations_and_no_more():
    people = blobs(4)
    ctx = blueprint(FedAvg(), people, model=net()).context(people, "cpu")
    part = client_data(people, 0, ctx.task).train
    metrics = DueMetrics({"mdl": Mdl(examples=24, split="train")}, {"train": 4})
    (item,) = metrics.collect(FedAvg(), ctx, ctx.task.initial_weights(), "global", part, 0)
    assert len(part) > len(item.z) == len(item.y) == 6
    (other,) = metrics.collect(FedAvg(), ctx, ctx.task.initial_weights(), "global", part, 1)
    assert not torch.equal(item.z, other.z)  # a random sample, drawn by the seed
