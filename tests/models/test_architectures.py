"""Sizes of the papers' networks, split points, batch norm found by type, and one-line refusals."""

import numpy as np
import pytest
import torch
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.modules import batch_norm_names, batch_norm_statistics
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.models.base import build_model
from rayfed.models.cct import Attention


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "shape", "classes", "count", "feature_shape"),
    [
        ("mlp", {}, (1, 28, 28), 10, 199_210, (200,)),  # the 2NN of FedAvg, and the MLP of ADCOL's traffic example
        ("mlp", {"hidden": []}, (1, 28, 28), 10, 7_850, (784,)),
        ("cnn", {}, (1, 28, 28), 10, 582_026, (512,)),
        ("cnn", {"width": 0.5}, (1, 28, 28), 10, 147_146, (256,)),
        ("cnn", {"split": "conv1"}, (1, 28, 28), 10, 582_026, (32, 12, 12)),
        ("cnn", {"split": "conv1"}, (3, 64, 64), 200, None, (32, 30, 30)),  # DBE's table 1: 28800 values
        ("cnn", {"split": "conv2"}, (3, 64, 64), 200, None, (64, 13, 13)),  # 10816
        ("cnn_rotated", {}, (1, 28, 28), 10, 28_938, (1568,)),
        ("cnn_domainbed", {}, (1, 28, 28), 10, 371_850, (128,)),
        ("digits_cnn", {}, (3, 28, 28), 10, 14_219_210, (512,)),
        ("digits_cnn", {"pool": 3}, (3, 32, 32), 10, 18_151_370, (512,)),
        ("digits_cnn", {"width": 0.25}, (3, 28, 28), 10, None, (128,)),
        ("vgg11_mean", {}, (3, 32, 32), 10, 9_225_610, (512,)),
        ("resnet18", {"norm": "group"}, (3, 64, 64), 7, 11_180_103, (512,)),  # 11.18M in FRAug's table 4
        *[
            ("resnet18", {"split": stage}, (3, 64, 64), 200, 11_279_112, shape)  # DBE's table 7
            for stage, shape in {
                "stem": (64, 16, 16),
                "layer1": (64, 16, 16),
                "layer2": (128, 8, 8),
                "layer3": (256, 4, 4),
                "layer4": (512, 2, 2),
                "pool": (512,),
            }.items()
        ],
        ("cct", {}, (3, 32, 32), 10, 3_760_139, (256,)),
        ("cct", {}, (3, 32, 32), 100, 3_760_139 + 90 * 257, (256,)),
        ("cct", {"depth": 2, "heads": 2, "head_width": 8}, (1, 9, 7), 10, None, (16,)),
        ("har_cnn", {}, (9, 1, 128), 6, 2_253_958, (1664,)),
        ("har_cnn", {"split": "fc2"}, (9, 1, 128), 6, 2_253_958, (512,)),
        ("torchvision", {"arch": "mobilenet_v3_small"}, (1, 32, 32), 10, None, (1024,)),
        ("torchvision", {"arch": "mnasnet0_5"}, (3, 64, 64), 10, None, (1280,)),
        ("mlp", {"projection": 64}, (1, 8, 8), 10, None, (64,)),
        ("cnn_domainbed", {"projection": 32}, (1, 28, 28), 10, None, (32,)),
    ],
)
def test_size_and_split(name, options, shape, classes, count, feature_shape):
    model = build_model(name, options, shape, classes)
    if count is not None:
        assert parameters(model) == count
    assert model.feature_shape == feature_shape
    model.eval()
    x = torch.randn(2, *shape)
    z = model.features(x)
    assert z.shape == (2, *feature_shape)
    assert torch.equal(model(x), model.head(z))
    assert model(x).shape == (2, classes)
    assert any(name.startswith("head.") for name in model.state_dict())


def test_width_of_the_projection_and_its_predictor():
    model = build_model("mlp", {"projection": 16, "hidden": [12]}, (5,), 3)
    projection = 12 * 16 + 16 + 2 * (16 * 16 + 16) + 3 * 2 * 16  # three linear layers, three batch norms
    predictor = 16 * 512 + 512 + 2 * 512 + 512 * 3 + 3
    assert parameters(model) == 5 * 12 + 12 + projection + predictor


@pytest.mark.parametrize(
    ("name", "options", "shape", "message"),
    [
        ("cnn", {}, (1, 12, 12), "images (channels x height x width) of at least 16x16, got inputs of 1x12x12"),
        ("cnn", {}, (196,), "model.name=cnn: needs images (channels x height x width) of at least 16x16, got inputs"),
        ("fasttext", {}, (3, 8, 8), "model.name=fasttext: needs sequences of token numbers (length), got inputs of"),
        ("har_cnn", {}, (9, 2, 64), "model.name=har_cnn: needs sensor signals (channels x 1 x time) with"),
        ("har_cnn", {}, (9, 1, 20), " with at least 28 time steps, got inputs of 9x1x20"),
        ("cct", {}, (9,), "model.name=cct: needs images"),
        ("cnn", {"split": "conv1", "projection": 8}, (1, 28, 28), "model.projection=8: requires model.split=fc1"),
        ("torchvision", {"arch": "squeezenet1_0"}, (3, 64, 64), "does not end in its last nn.Conv2d"),
        ("torchvision", {"arch": "resnet19"}, (3, 64, 64), "did you mean resnet18?"),
    ],
)
def test_refusals_when_building(name, options, shape, message):
    with pytest.raises(UsageError) as caught:
        build_model(name, options, shape, 10)
    assert message in str(caught.value)


def squeezenet(algorithm, **model):
    part = np.random.default_rng(0).normal(size=(6, 3, 64, 64)).astype(np.float32), np.arange(6) % 3
    clients = [{"train": part, "test": part}] * 2
    values = {"algorithm.name": algorithm, "model": {"name": "torchvision", "arch": "squeezenet1_1"} | model}
    return make_plan(Config.read(values), Given(clients=clients)).blueprint.model


def test_torchvision_networks_are_split_where_that_is_needed():
    assert type(squeezenet("fedavg")).__name__ == "SqueezeNet"
    assert squeezenet("fedrep", head="classifier").feature_shape == (512, 3, 3)
    with pytest.raises(UsageError, match=r"^algorithm.name=fedrep: .* does not end in its last nn.Conv2d; name "):
        squeezenet("fedrep")


@pytest.mark.parametrize(("arch", "last"), [("squeezenet1_1", "classifier.1"), ("shufflenet_v2_x0_5", "fc")])
def test_the_last_layer_of_a_pretrained_network_is_new(arch, last, monkeypatch):
    from torchvision import models

    whole, made = models.get_model(arch, weights=None, num_classes=1000), models.get_model
    old = whole.get_submodule(last)
    monkeypatch.setattr(
        models, "get_model", lambda name, **given: whole if given.get("weights") else made(name, **given)
    )
    model = build_model("torchvision", {"arch": arch, "pretrained": True}, (3, 64, 64), 4, prepare=lambda m, *_: m)
    new = model.get_submodule(last)
    assert type(new) is type(old)
    assert new.weight.shape == (4, *old.weight.shape[1:])
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 4)


def test_weights_that_cannot_be_fetched(monkeypatch, tmp_path):
    from urllib.error import URLError

    def fails(*args, **kwargs):
        raise URLError("no route")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", fails)
    monkeypatch.setattr("torchvision._internally_replaced_utils.load_state_dict_from_url", fails)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fails)
    with pytest.raises(UsageError, match=r"model.pretrained=true: could not download the weights of resnet18"):
        build_model("resnet18", {"pretrained": True}, (3, 32, 32), 10)


def test_fasttext_size_split_and_output():
    model = build_model("fasttext", {}, (200,), 4, torch.int64)
    assert sum(p.numel() for p in model.parameters()) == 98_635 * 32 + 32 * 32 + 32 + 32 * 4 + 4 == 3_157_508
    assert model.feature_shape == (32,)
    small = build_model("fasttext", {"vocabulary": 7, "hidden": 3}, (5,), 4, torch.int64)
    tokens = torch.tensor([[1, 6, 2, 0, 0]])
    vectors = small.features[0].embedding.weight
    assert not vectors[0].any()
    mean = (vectors[1] + vectors[6] + vectors[2]) / 5  # padding counts
    hidden = mean @ small.features[1].weight.T + small.features[1].bias
    torch.testing.assert_close(small.features(tokens)[0], hidden)
    torch.testing.assert_close(small(tokens)[0], hidden @ small.head.weight.T + small.head.bias)


def test_attention_is_torchs():
    torch.manual_seed(0)
    ours, x = Attention(12, 3, 0.0), torch.randn(2, 5, 12)
    theirs = torch.nn.MultiheadAttention(12, 3, bias=True, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.zero_()
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0], rtol=1e-4, atol=1e-5)


def by_running_statistics(model: nn.Module) -> set[str]:
    """Every tensor that lies beside a running mean: found from the state's names, not from the types."""
    names = set(model.state_dict())
    layers = {name.removesuffix("running_mean") for name in names if name.endswith("running_mean")}
    return {name for name in names if name[: name.rfind(".") + 1] in layers}


@pytest.mark.parametrize(
    ("name", "share_named_bn"),
    [
        ("resnet18", 0.85),
        *((arch, 0.0) for arch in ("mobilenet_v3_small", "efficientnet_b0", "densenet121", "shufflenet_v2_x1_0")),
        ("digits_cnn", 0.0),
    ],
)
def test_all_of_it_is_found(name, share_named_bn):
    own = name in ("resnet18", "digits_cnn")
    model = build_model(name if own else "torchvision", {} if own else {"arch": name}, (3, 32, 32), 10)
    names = batch_norm_names(model)
    assert names == by_running_statistics(model)
    assert len([key for key in names if "bn" in key]) / len(names) == pytest.approx(share_named_bn, abs=0.01)
    statistics = batch_norm_statistics(model)
    assert statistics == {key for key, _ in model.named_buffers()}
    assert len(statistics) * 5 == len(names) * 3  # weight, bias; mean, variance, count
