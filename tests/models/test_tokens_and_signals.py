"""Text and sensor input: models, their refusals, and the engine from end to end on both."""

import pytest
import torch

from rayfed.core.errors import UsageError
from rayfed.models.base import build_model
from rayfed.models.cct import Attention


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


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("fasttext", (3, 8, 8), "model.name=fasttext: needs sequences of token numbers .length., got inputs of 3x8x8"),
        (
            "har_cnn",
            (9, 2, 64),
            "model.name=har_cnn: needs sensor signals .channels x 1 x time. with .*, got inputs of 9x2",
        ),
        (
            "har_cnn",
            (9, 1, 20),
            "model.name=har_cnn: needs sensor signals .* with at least 28 time steps, got inputs of 9x1x20",
        ),
        ("cct", (9,), "model.name=cct: needs images"),
    ],
)
def test_refusals(name, shape, message):
    with pytest.raises(UsageError, match="^" + message):
        build_model(name, {}, shape, 4)
