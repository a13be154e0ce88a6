"""Batch norm is found by type: all of it, on networks whose names do not say "bn"."""

import pytest
from torch import nn

from rayfed.core.modules import batch_norm_names, batch_norm_statistics
from rayfed.models.base import build_model


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
