"""Split points of a user's own networks, and the functional calls that methods use."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.network import logits_of
from rayfed.core.task import Task
from rayfed.models.base import build_model, check_model
from rayfed.models.split_model import ensure_split


class Plain(nn.Module):
    """No split of its own."""

    def __init__(self, shape=(6,), num_classes=3, width=4):
        super().__init__()
        self.first = nn.Linear(shape[0], width)
        self.last = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class OwnSplit(nn.Module):
    """Split in the middle, by a method and a module."""

    def __init__(self, shape=(6,), num_classes=3):
        super().__init__()
        self.first = nn.Linear(shape[0], 5)
        self.head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, num_classes))

    def features(self, x):
        return torch.relu(self.first(x))

    def forward(self, x):
        return self.head(self.features(x))


class Softmax(Plain):
    def forward(self, x):
        return super().forward(x).log_softmax(1)


class Contradiction(OwnSplit):
    feature_shape = (5,)

    def forward(self, x):
        return 2 * super().forward(x)


class Noisy(Plain):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class InPlace(Plain):
    def forward(self, x):
        x += 1
        return super().forward(x)


class TwoInputs(Plain):
    def forward(self, x, mask):
        return super().forward(x * mask)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(6, 6)

    def forward(self, x):
        return self.only(torch.relu(self.only(x)))


class Mask(nn.Module):
    """Outputs for every pixel; ends in a convolution."""

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.out(torch.relu(self.body(x)))


class Kinds(Plain):
    """Logits in a mapping, an object, or a tuple; their layer is of float64, and a deep head comes before it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.head_of_mine = kind, nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()

    def forward(self, x):
        h = torch.relu(self.first(x))
        z = self.head_of_mine(h.double())
        return {"mapping": {"logits": z, "h": h}, "object": SimpleNamespace(logits=z), "tuple": (z, h)}[self.kind]


@pytest.mark.parametrize(("kind", "shape", "features"), [(Plain, (6,), (4,)), (Mask, (1, 5, 6), (3, 5, 6))])
def test_the_last_layer_is_the_head_and_outputs_stay(kind, shape, features):
    whole, x = kind(), torch.randn(2, *shape)
    before = whole(x)
    model = ensure_split(whole, shape)
    assert model.feature_shape == features
    assert torch.equal(model(x), before)
    assert {name for name in model.state_dict() if name.startswith("head.")} == {"head.weight", "head.bias"}


class Moving(nn.Module):
    """Encodes [n, 2, 5, 6] or [n, 7], and changes the axes of what its last layer gives."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.body = kind, nn.Conv2d(2, 3, 1)
        self.embedding, self.cell = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True)
        self.last = {
            "flattened": nn.Conv2d(3, 2, (5, 6)),
            "one logit": nn.Linear(4, 1),
            "words": nn.Linear(4, 9),
            "pixels": nn.Linear(3, 2),
            "words of layers": nn.Conv1d(4, 9, 1),
        }[kind]

    def forward(self, x):
        z = self.body(x).relu() if x.ndim == 4 else self.cell(self.embedding(x))[0]
        if self.kind == "flattened":
            return self.last(z).flatten(1)
        if self.kind == "one logit":
            return self.last(z[:, -1]).squeeze(1)
        if self.kind == "words":
            return self.last(z).transpose(1, 2)
        if self.kind == "pixels":
            return self.last(z.movedim(1, -1)).movedim(-1, 1)
        return self.last(z.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        *(("flattened", (3, 5, 6)), ("one logit", (4,)), ("words", (7, 4)), ("pixels", (5, 6, 3))),
        ("words of layers", (4, 7)),
    ],
)
def test_axes_may_change_after_the_last_layer(kind, features):
    images = kind in ("flattened", "pixels")
    x = torch.randn(3, 2, 5, 6) if images else torch.randint(9, (3, 7))
    whole = Moving(kind)
    before = whole(x)
    model = ensure_split(whole, tuple(x.shape[1:]), x.dtype)
    assert model.feature_shape == features
    assert model.features(x).shape == (3, *features)
    assert torch.equal(model(x), before)
    task = Task(model, F.cross_entropy, num_clients=1, num_classes=3)
    assert task.head_names == {f"head.module.{name}" for name in ("weight", "bias")}
    weights = task.initial_weights()
    torch.testing.assert_close(task.head(weights, task.represent(weights, x)), before)


@pytest.mark.parametrize("kind", ["mapping", "object", "tuple"])
def test_a_head_is_named_whatever_the_model_returns(kind):
    whole, x = Kinds(kind), torch.randn(5, 6)
    before = logits_of(whole(x))
    model = ensure_split(whole, (6,), head="head_of_mine")
    assert (model.feature_shape, model.feature_dtype) == ((4,), torch.float64)
    assert torch.equal(model(x), before)
    task = Task(model, F.cross_entropy, num_clients=1, num_classes=3)
    assert task.head_names == {f"head.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")}
    assert torch.equal(task.predict(task.initial_weights(), x), before)


@pytest.mark.parametrize(
    ("module", "head", "message"),
    [
        (Softmax(), None, "does not end in its last nn.Linear"),
        (Tied(), None, "does not end in its last nn.Linear"),
        (nn.Flatten(), None, "no nn.Linear to split at"),
        (Contradiction(), None, "forward(x) must equal head(features(x))"),
        (Plain((9,)), None, "an input of shape 6 does not fit"),
        (Noisy(), None, "gives different outputs for the same input in evaluation mode"),
        (InPlace(), None, "modifies its input; write x = x + 1 in place of x += 1"),
        (TwoInputs(), None, "missing 1 required positional argument: 'mask'"),
        (Plain(), "frist", "model.head: model Plain has no submodule 'frist'; did you mean first"),
        (Plain(), "first", "does not end in model.head=first"),
    ],
)
def test_refusals(module, head, message):
    with pytest.raises(UsageError) as caught:
        ensure_split(module, (6,), head=head)
    assert message in str(caught.value)


def test_users_module_by_name():
    name = f"{__name__}:Plain"
    model = build_model(name, {"width": 7, "projection": 3}, (6,), 2)
    assert model.feature_shape == (3,)
    assert model.eval()(torch.zeros(4, 6)).shape == (4, 2)
    check_model(f"{__name__}:OwnSplit", {})
    assert ensure_split(own := OwnSplit(), (6,)) is own
    with pytest.raises(UsageError, match="unexpected keyword argument 'deep'"):
        check_model(name, {"deep": 1})
