"""Ordinary modules, losses and data train as in a plain PyTorch loop, or one line says why not."""

import copy
import functools
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import rayfed

SIZES = (40, 25)
ROUNDS, STEPS, LR = 2, 3, 0.5

pytestmark = pytest.mark.usefixtures("here")


def clients(shift=0.0):
    rng = np.random.default_rng(0)
    parts = []
    for size in SIZES:
        x = rng.normal(shift, 1 + shift, (size + 20, 6)).astype(np.float32)
        y = (x[:, 0] > shift).astype(np.int64)
        parts.append({"train": (x[:size], y[:size]), "test": (x[size:], y[size:])})
    return parts


def run(model, *, given=None, rounds=ROUNDS, loss=None, **changes):
    values = {"experiment": "as_torch", "resume": False, "local.batch_size": 100}
    values |= {"local.epochs": STEPS, "local.lr": LR} | changes
    return rayfed.run(values, clients=given or clients(), model=model, loss=loss, rounds=rounds, quiet=True)


def by_hand(model, *, given=None, rounds=ROUNDS, make_optimizer=None, loss=F.cross_entropy):
    """FedAvg of whole batches in plain PyTorch: the trained model."""
    make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, LR))
    given = given or clients()
    sizes = [len(client["train"][0]) for client in given]
    for _ in range(rounds):
        start = copy.deepcopy(model.state_dict())
        states = []
        for client in given:
            model.load_state_dict(start)
            optimizer = make_optimizer(list(model.parameters()))
            x, y = map(torch.from_numpy, client["train"])
            model.train()
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
            states.append(copy.deepcopy(model.state_dict()))
        weighted = {
            name: sum(size * state[name] for size, state in zip(sizes, states, strict=True)) / sum(sizes)
            for name, value in states[0].items()
            if value.is_floating_point()
        }
        model.load_state_dict(states[0] | weighted)
    return model.eval()


def assert_trained_alike(result, expected, *, moved=True):
    weights = result.server["weights"]
    for name, value in [*expected.named_parameters(), *expected.named_buffers()]:  # tied weights once
        if value.is_floating_point():
            torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=1e-5, msg=name)
    if moved:
        trained = result.model()
        x = torch.from_numpy(clients()[0]["test"][0])
        torch.testing.assert_close(trained(x), expected(x), rtol=1e-4, atol=1e-5)


class Body(nn.Module):
    """Two layers, and what `extra` adds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
        self.extra()

    def extra(self):
        pass

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Lambda(Body):
    def extra(self):
        self.f = lambda x: self.b(torch.relu(self.a(x)))

    def forward(self, x):
        return self.f(x)


class InnerFunction(Body):
    def extra(self):
        a, b = self.a, self.b

        def f(x):
            return b(torch.relu(a(x)))

        self.f = f

    def forward(self, x):
        return self.f(x)


class Steps(Body):
    def extra(self):
        self.steps = deque([("body", lambda x: torch.relu(self.a(x))), ("head", lambda x: self.b(x))])

    def forward(self, x):
        for _, step in self.steps:
            x = step(x)
        return x


class Defaults(Body):
    def extra(self):
        self.steps = {name: (lambda x, layer=layer: layer(x)) for name, layer in self.named_children()}

    def forward(self, x):
        return self.steps["b"](torch.relu(self.steps["a"](x)))


class Decorated(Body):
    def extra(self):
        def twice(function):
            @functools.wraps(function)
            def wrapped(x):
                return function(x) + function(x)

            return wrapped

        self.f = twice(self.half)

    def half(self, x):
        return self.b(torch.relu(self.a(x))) / 2

    def forward(self, x):
        return self.f(x)


class HeldInATuple(Body):
    def extra(self):
        self.weights = (self.a.weight, self.a.bias)
        self.others = {"head": [self.b.weight, self.b.bias]}

    def forward(self, x):
        return F.linear(torch.relu(F.linear(x, *self.weights)), *self.others["head"])


class TiedAndHeld(Body):
    """Two layers share a weight, which a tuple also holds."""

    def extra(self):
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b = nn.Linear(6, 2)
        self.c.weight = self.a.weight
        self.held = (self.a.weight,)

    def forward(self, x):
        x = torch.relu(self.c(torch.relu(self.a(x))))
        return self.b(x @ self.held[0])


class Partial(Body):
    def extra(self):
        self.body = functools.partial(F.linear, weight=self.a.weight, bias=self.a.bias)

    def forward(self, x):
        return self.b(torch.relu(self.body(x)))


class Both(Body):
    """Uses the same weight through its layer and directly."""

    def extra(self):
        self.held = [self.a.weight]

    def forward(self, x):
        return self.b(torch.relu(self.a(x) + F.linear(x, self.held[0]) ** 2))


class Helper:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return torch.relu(self.layer(x))


class HelperObject(Body):
    def extra(self):
        self.helper = Helper(self.a)

    def forward(self, x):
        return self.b(self.helper(x))


class ForwardHook(Body):
    def extra(self):
        weight = self.b.weight
        self.a.register_forward_hook(lambda layer, inputs, output: output + weight.sum(0))


class Checkpointed(Body):
    def forward(self, x):
        return self.b(checkpoint(lambda z: torch.relu(self.a(z)), x, use_reentrant=False))


class BackwardHook(Body):
    def extra(self):
        self.a.register_full_backward_hook(lambda layer, inputs, outputs: (outputs[0] @ layer.weight * 2,))
        self.first = nn.Linear(6, 6)

    def forward(self, x):
        return self.b(torch.relu(self.a(self.first(x))))


class TensorHook(Body):
    def forward(self, x):
        z = torch.relu(self.a(x))
        if z.requires_grad:
            z.register_hook(lambda grad: grad * self.b.weight.norm())
        return self.b(z)


class KeepsItsLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x @ layer.weight.detach().T + layer.bias.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layer.weight, None


class OwnFunction(Body):
    def extra(self):
        self.frozen = nn.Linear(8, 8)

    def forward(self, x):
        return self.b(torch.relu(KeepsItsLayer.apply(self.a(x), self.frozen) + 0 * self.frozen.weight.sum()))


class Unused(Body):
    def extra(self):
        self.other = nn.Linear(8, 5)


class EvaluationOnly(Body):
    def extra(self):
        self.branch = nn.Linear(8, 8)

    def forward(self, x):
        z = torch.relu(self.a(x))
        return self.b(z if self.training else z + self.branch(z))


class FromTheThirdStep(Body):
    """A branch that is used from the third step on, as in training that adds layers one after the other."""

    def extra(self):
        self.late = nn.Linear(8, 8)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.steps += 1
        z = torch.relu(self.a(x))
        if self.steps > 2:
            z = z + self.late(z)
        return self.b(z)


class ActNorm(nn.Module):
    """Shifts and scales by its first batch, then is trained (Kingma and Dhariwal 2018, section 3.1)."""

    def __init__(self):
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0))
                self.scale.copy_(1 / x.std(0))
                self.ready.fill_(True)
        return (x + self.loc) * self.scale


class Initialised(Body):
    def extra(self):
        self.norm = ActNorm()

    def forward(self, x):
        return super().forward(self.norm(x))


KINDS = [
    *(Body, Lambda, InnerFunction, Steps, Defaults, Decorated, HeldInATuple, TiedAndHeld, Partial, Both, HelperObject),
    *(ForwardHook, Checkpointed, BackwardHook, TensorHook, OwnFunction),
]


@pytest.mark.parametrize("given", ["module", "function"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_weights_that_are_also_held_elsewhere_are_trained(kind, given):
    result = run(kind if given == "function" else kind())
    assert_trained_alike(result, by_hand(kind()))


@pytest.mark.parametrize("kind", [Lambda, HeldInATuple, Checkpointed, BackwardHook, Unused, Initialised])
@pytest.mark.parametrize("width", [2, "auto"])
def test_clients_that_train_at_once_end_alike_or_are_refused(kind, width):
    optimizer = {"local.weight_decay": 0.1, "placement.vmap_clients": width}
    halves = [client | {"train": tuple(part[:20] for part in client["train"])} for client in clients()]
    try:
        result = run(kind, given=halves, **optimizer | {"local.batch_size": 20})
    except rayfed.UsageError as refusal:
        if width == 2 and str(refusal).startswith("placement.vmap_clients=2: "):
            return
        raise
    expected = by_hand(
        kind(), given=halves, make_optimizer=lambda weights: torch.optim.SGD(weights, LR, weight_decay=0.1)
    )
    assert_trained_alike(result, expected, moved=kind is not Initialised)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("kind", [Unused, EvaluationOnly])
def test_weights_without_a_gradient_are_left_alone(kind, optimizer):
    makers = {
        "sgd": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=0.1),
        "adam": lambda weights: torch.optim.Adam(weights, 0.1, weight_decay=0.1),
        "adamw": lambda weights: torch.optim.AdamW(weights, 0.1, weight_decay=0.1),
    }
    momentum = {"local.momentum": 0.9} if optimizer == "sgd" else {}
    result = run(kind, **{"local.optimizer": optimizer, "local.weight_decay": 0.1, "local.lr": 0.1} | momentum)
    assert_trained_alike(result, by_hand(kind(), make_optimizer=makers[optimizer]))
    start = kind().state_dict()
    name = "other.weight" if kind is Unused else "branch.weight"
    assert torch.equal(result.server["weights"][name], start[name])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_steps_before_a_weight_is_used_do_not_count_for_it(optimizer):
    makers = {
        "sgd": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=0.1),
        "adam": lambda weights: torch.optim.Adam(weights, 0.1, weight_decay=0.1),
        "adamw": lambda weights: torch.optim.AdamW(weights, 0.1, weight_decay=0.1),
    }
    momentum = {"local.momentum": 0.9} if optimizer == "sgd" else {}
    keys = {"local.optimizer": optimizer, "local.weight_decay": 0.1, "local.lr": 0.1} | momentum
    result = run(FromTheThirdStep, rounds=1, **keys)
    expected = by_hand(FromTheThirdStep(), rounds=1, make_optimizer=makers[optimizer])
    assert_trained_alike(result, expected)
    assert not torch.equal(result.server["weights"]["late.weight"], FromTheThirdStep().late.weight)


@pytest.mark.parametrize("given", ["module", "function"])
def test_a_layer_is_initialised_by_the_first_batch_of_training(given):
    parts = clients(shift=5.0)[:1]
    result = run(Initialised if given == "function" else Initialised(), given=parts)
    expected = by_hand(Initialised(), given=parts)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(result.server["weights"][name], value, rtol=0, atol=1e-5)
    assert -5.5 < float(expected.norm.loc.mean()) < -4.5


@pytest.mark.parametrize("every", [1, 3])
def test_scoring_changes_nothing_where_a_forward_pass_writes_to_weights(every):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.out = nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.words(x).mean(1))

    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (80, 5))
    part = {"train": (x[:50], x[:50, 0] % 2), "test": (x[50:], x[50:, 0] % 2)}
    result = run(Words, given=[part], rounds=3, **{"evaluate.every": every})
    assert_trained_alike(result, by_hand(Words(), given=[part], rounds=3), moved=False)


class Texts(nn.Module):
    """Words by a transformer that leaves out the padding, 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.words, self.encoder = nn.Embedding(9, 8, padding_idx=0), nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        is_padding = x == 0
        z = self.encoder(self.words(x), src_key_padding_mask=is_padding)
        return self.out(z.masked_fill(is_padding[..., None], 0).sum(1) / (~is_padding).sum(1, keepdim=True))


class PaddedTexts(Texts):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids * attention_mask)


class PackedTexts(Texts):
    def __init__(self):
        super().__init__()
        self.encoder = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        lengths = (x != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.encoder(packed)[1][0][-1])


class AverageText(Texts):
    """The mean of the words, and a log-softmax: outputs of padding alone are not numbers."""

    def __init__(self):
        super().__init__()
        self.encoder = None

    def forward(self, x):
        is_word = (x != 0)[..., None]
        return self.out((self.words(x) * is_word).sum(1) / is_word.sum(1)).log_softmax(1)


def texts(*, by_name=False):
    rng = np.random.default_rng(0)
    clients = []
    for size in SIZES:
        x = rng.integers(1, 9, (size + 20, 7))
        x[np.arange(7) >= rng.integers(2, 8, (len(x), 1))] = 0
        y = x[:, 0] % 2
        if by_name:
            x = rayfed.padded([row[row > 0] for row in x], 7)
            parts = [{name: part[rows] for name, part in x.items()} for rows in (slice(size), slice(size, None))]
        else:
            parts = [x[:size], x[size:]]
        clients.append({"train": (parts[0], y[:size]), "test": (parts[1], y[size:])})
    return clients


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # with which torch scores padded texts
@pytest.mark.parametrize("kind", [Texts, PackedTexts, PaddedTexts])
def test_texts_with_padding_train_as_in_torch(kind):
    plain = Texts if kind is PaddedTexts else kind
    result = run(kind, given=texts(by_name=kind is PaddedTexts))
    assert_trained_alike(result, by_hand(plain(), given=texts()), moved=False)


def test_a_model_is_split_by_texts_that_have_words():
    with pytest.raises(rayfed.UsageError, match=r"AverageText: does not end in its last nn\.Linear"):
        run(AverageText, given=texts(), loss=F.nll_loss, **{"algorithm.name": "fedrep"})


class Growing(Body):
    def extra(self):
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.seen = torch.cat([self.seen, self.seen[:1]])
        return super().forward(x)


class Late(Body):
    def extra(self):
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return super().forward(x - self.mean)


class WeightHook(Body):
    def extra(self):
        self.a.weight.register_hook(lambda grad: grad * 3)


class Reentrant(Body):
    def forward(self, x):
        return self.b(checkpoint(lambda z: torch.relu(self.a(z)), x.clone().requires_grad_(), use_reentrant=True))


LAYERS = {}


class Global(Body):
    def extra(self):
        LAYERS["a"] = self.a

    def forward(self, x):
        return self.b(torch.relu(LAYERS["a"](x)))


class LossFirst(Body):
    def forward(self, x):
        logits = super().forward(x)
        return logits.square().mean(), logits


class OpenFile(Body):
    def extra(self):
        self.log = open("shapes.log", "w")  # noqa: SIM115


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Growing, r"^model: a training step changes the shape of its buffer seen, from \[1\] to \[3\]"),
        (Late, r"^model: its buffer mean is None until the first batch"),
        (WeightHook, r"^model: a.weight differs by .* its update after two steps, compared with plain PyTorch"),
        (Reentrant, r"^model: a.weight stays as it is after two steps, compared with plain PyTorch; .*use_reentrant"),
        (Global, r"^model: a.weight stays as it is after two steps, compared with plain PyTorch; .*a global"),
        (LossFirst, r"^model: what it returns begins with a scalar, such as a loss"),
        (OpenFile, r"^model: its attribute log \(TextIOWrapper\) cannot be copied to its clients"),
    ],
)
@pytest.mark.parametrize("given", ["module", "function"])
def test_what_cannot_train_as_in_torch_is_refused(kind, message, given):
    model = kind if given == "function" else kind()
    with pytest.raises(rayfed.UsageError, match=message):
        run(model)


def test_a_module_with_lazy_layers_may_be_given_as_it_is():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
    trained = run(model).model()
    assert [tuple(value.shape) for value in trained.state_dict().values()] == [(8, 6), (8,), (2, 8), (2,)]


def test_the_users_module_is_left_as_it_is():
    model = Initialised()
    before = copy.deepcopy(model.state_dict())
    model.a.weight.grad = torch.ones(8, 6)
    run(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert torch.equal(model.a.weight.grad, torch.ones(8, 6))


def test_labels_that_cross_entropy_ignores_are_left_out_of_every_score(here):
    """Torch's `cross_entropy`, given as a loss, leaves out the label -100."""
    given = clients()
    for client in given:
        x, y = client["test"]
        client["test"] = (x, np.where(np.arange(len(y)) % 2, y, -100))
    result = run(Body, given=given, loss=F.cross_entropy)
    model = by_hand(Body())
    last = result.metrics.query("split == 'test' and metric == 'accuracy'").drop_duplicates("client", keep="last")
    found = dict(zip(last["client"], last["value"], strict=True))
    assert len(found) == len(given)
    for measured, client in zip(found.values(), given, strict=True):
        x, y = map(torch.from_numpy, client["test"])
        right = (model(x).argmax(1) == y)[y >= 0].float().mean()
        assert measured == pytest.approx(float(right), abs=1e-6)
