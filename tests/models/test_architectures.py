"""Sizes of the papers' networks, split points, and one-line refusals."""

import pytest
import torch

from rayfed.core.errors import UsageError
from rayfed.models.build import build_model


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


def test_building_leaves_the_model_in_training_mode_with_untouched_statistics():
    model = build_model("torchvision", {"arch": "mobilenet_v3_small"}, (3, 32, 32), 10)
    assert all(part.training for part in model.modules())
    assert all(int(value) == 0 for name, value in model.state_dict().items() if name.endswith("num_batches_tracked"))


def test_small_stem_keeps_small_images_at_full_size():
    model = build_model("resnet18", {"small_stem": True, "split": "stem"}, (1, 32, 32), 10)
    assert model.feature_shape == (64, 32, 32)


def test_width_of_the_projection_and_its_predictor():
    model = build_model("mlp", {"projection": 16, "hidden": [12]}, (5,), 3)
    projection = 12 * 16 + 16 + 2 * (16 * 16 + 16) + 3 * 2 * 16  # three linear layers, three batch norms
    predictor = 16 * 512 + 512 + 2 * 512 + 512 * 3 + 3
    assert parameters(model) == 5 * 12 + 12 + projection + predictor


@pytest.mark.parametrize(
    ("name", "options", "shape", "message"),
    [
        ("cnn", {}, (1, 12, 12), "images (channels x height x width) of at least 16x16, got inputs of 1x12x12"),
        (
            "cnn",
            {},
            (196,),
            "model.name=cnn: needs images (channels x height x width) of at least 16x16, got inputs of 196",
        ),
        ("cnn", {"split": "conv1", "projection": 8}, (1, 28, 28), "model.projection=8: requires model.split=fc1"),
        ("torchvision", {"arch": "squeezenet1_0"}, (3, 64, 64), "does not end in its last nn.Conv2d"),
        ("torchvision", {"arch": "resnet19"}, (3, 64, 64), "did you mean resnet18?"),
        (
            "torchvision",
            {"arch": "mobilenet_v3_small", "norm": "group", "groups": 7},
            (3, 64, 64),
            "model.groups=7: does not divide the 16",
        ),
    ],
)
def test_refusals_when_building(name, options, shape, message):
    with pytest.raises(UsageError) as caught:
        build_model(name, options, shape, 10)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_cannot_be_fetched(monkeypatch, tmp_path):
    from urllib.error import URLError

    def fails(*args, **kwargs):
        raise URLError("no route")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", fails)
    monkeypatch.setattr("torchvision._internally_replaced_utils.load_state_dict_from_url", fails)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fails)
    with pytest.raises(UsageError, match=r"model.pretrained=true: could not download the weights of resnet18"):
        build_model("resnet18", {"pretrained": True}, (3, 32, 32), 10)
