"""Models with state of their own: buffers that a forward pass assigns, constants, spectral norms, hooks and caches."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ray import cloudpickle
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import rayfed
from rayfed.core.exact_sum import ExactSum
from rayfed.core.modules import make_picklable

pytestmark = pytest.mark.usefixtures("here")

CLIENTS = 3
QUIET = {"experiment": "own_state", "resume": False, "local.batch_size": 30, "local.lr": 0.1}


def clients(seed=0):
    rng = np.random.default_rng(seed)
    parts = []
    for shift in range(CLIENTS):
        x = rng.normal(shift, 1, (40, 5)).astype(np.float32)
        y = x[:, :3].argmax(1)
        parts.append({"train": (x[:30], y[:30]), "test": (x[30:], y[30:])})
    return parts


def run(model, rounds=2, epochs=3, **changes):
    return rayfed.run(QUIET | {"local.epochs": epochs} | changes, clients=clients(), model=model, rounds=rounds)


def by_hand(model, rounds=2, epochs=3):
    """FedAvg of whole batches in plain PyTorch."""
    model.train()
    for _ in range(rounds):
        start, states = copy.deepcopy(model.state_dict()), []
        for client in clients():
            model.load_state_dict(start)
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            x, y = map(torch.from_numpy, client["train"])
            for _ in range(epochs):
                sgd.zero_grad()
                F.cross_entropy(model(x), y).backward()
                sgd.step()
            states.append(copy.deepcopy(model.state_dict()))
        model.load_state_dict({name: sum(state[name] for state in states) / CLIENTS for name in states[0]})
    return model


def assert_same_states(trained, expected):
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=1e-6)


class Centred(nn.Module):
    """Subtracts a moving mean, which it assigns anew."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x):
        h = self.body(x)
        if self.training:
            self.centre = 0.8 * self.centre + 0.2 * h.detach().mean(0)
        return self.fc(torch.tanh(h - self.centre))


@pytest.mark.parametrize("vmap_clients", [1, CLIENTS])
def test_a_buffer_that_forward_assigns_is_that_of_a_plain_loop(vmap_clients):
    torch.manual_seed(0)
    model = Centred()
    trained = run(model, **{"placement.vmap_clients": vmap_clients}).model()
    expected = by_hand(copy.deepcopy(model))
    assert expected.centre.norm() > 0.1
    assert_same_states(trained, expected)


class Constants(nn.Module):
    """Has buffers that nothing changes, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0, -torch.inf, 0, 0]))
        self.register_buffer("missing", torch.tensor([torch.nan, 1.0]), persistent=False)
        self.register_buffer("phase", torch.polar(torch.ones(3), torch.tensor([0.1, 1e-9, 3.0])))
        self.register_buffer("tiny", torch.tensor([1.1e-13, -0.0, 3.7e-9]))
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.frozen = nn.Parameter(torch.tensor([1.3e-12, torch.inf]), requires_grad=False)

    def forward(self, x):
        return self.fc(self.body(x * torch.softmax(self.mask, 0) * self.phase[0].abs()))


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper", "fedadam", "erm", "afl"])
def test_constants_are_the_same_bits_after_training(algorithm):
    model = Constants()
    result = run(model, **{"algorithm.name": algorithm})
    trained = result.model(client=0) if algorithm == "fedper" else result.model()
    constants = dict(model.named_buffers()) | {"frozen": model.frozen}
    for name, value in (dict(trained.named_buffers()) | {"frozen": trained.frozen}).items():
        assert value.detach().numpy().tobytes() == constants[name].detach().numpy().tobytes(), name


def test_equal_leaves_are_kept_and_others_are_averaged_on_any_number_of_hosts():
    trees = [{"w": {"same": torch.tensor(-torch.inf), "other": torch.tensor(float(i))}} for i in range(4)]
    hosts = [ExactSum(untrained={"same", "other"}) for _ in range(2)]
    for i, tree in enumerate(trees):
        hosts[i % 2].add(tree, 0.25 if i else 0.0)
    hosts[0].merge(hosts[1])
    assert hosts[0].result() == {"w": {"same": -torch.inf, "other": 1.5}}
    single = ExactSum(untrained={"same"})
    single.add({"same": torch.tensor(0.0)}, 0.5)
    single.add({"same": torch.tensor(-0.0)}, 0.5)
    assert single.equal == {("same",): None}  # else the order would decide about the sign


def test_complex_weights_are_averaged_and_take_the_steps_of_torch():
    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter, self.fc = nn.Parameter(torch.randn(5, dtype=torch.cfloat)), nn.Linear(5, 3)

        def forward(self, x):
            return self.fc((torch.fft.fft(x) * self.filter).abs())

    torch.manual_seed(0)
    model = Waves()
    trained, expected = run(model).model(), by_hand(copy.deepcopy(model))
    torch.testing.assert_close(trained.filter, expected.filter, rtol=0, atol=1e-5)
    assert (expected.filter - model.filter).abs().max() > 1e-3


@pytest.mark.parametrize("normalised", [parametrizations.spectral_norm, spectral_norm])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam"])
def test_spectral_vectors_are_those_of_the_averaged_weight(normalised, algorithm):
    torch.manual_seed(0)
    model = nn.Sequential(
        normalised(nn.Linear(5, 8)), nn.ReLU(), normalised(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3)
    )
    result = run(model, **{"algorithm.name": algorithm, "local.lr": 0.5})
    trained = result.model()
    loss = result.metrics.query("round == 2 and split == 'test' and metric == 'loss'").value.mean()
    originals = [value for name, value in trained.state_dict().items() if "orig" in name]
    assert len(originals) == 2
    with torch.no_grad():
        for position, weight in zip((0, 2), originals, strict=True):
            exact = weight / torch.linalg.matrix_norm(weight, 2)
            torch.testing.assert_close(trained[position].weight, exact, rtol=0, atol=1e-5)
        held_out = [map(torch.from_numpy, client["test"]) for client in clients()]
        losses = [F.cross_entropy(trained(x), y) for x, y in held_out]
    assert loss == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    assert all(vector.norm() == pytest.approx(1) for name, vector in trained.named_buffers())


def chain(layer):
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 3))


def pruned(layer):
    return prune.random_unstructured(layer, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("change", [pruned, weight_norm, spectral_norm, parametrizations.weight_norm])
@pytest.mark.parametrize("given", ["module", "function"])
def test_layers_with_computed_weights_train_as_in_a_plain_loop(change, given):
    torch.manual_seed(0)
    model = chain(change(nn.Linear(5, 6)))
    trained = run(model if given == "module" else lambda: model, rounds=1).model()
    twin = chain(nn.Linear(5, 6))
    with torch.random.fork_rng():
        twin[0] = change(twin[0])
    twin.load_state_dict(model.state_dict())
    if change is spectral_norm:
        assert torch.linalg.matrix_norm(trained[0].weight, 2) == pytest.approx(1, abs=1e-5)
        return
    assert_same_states(trained, by_hand(twin, rounds=1))
    assert not torch.equal(trained[0].weight, model[0].weight)


def test_parametrised_layers_go_to_other_processes():
    layer = parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(5, 6)))
    model = chain(layer)
    make_picklable(model)
    sent = cloudpickle.loads(cloudpickle.dumps(cloudpickle.loads(cloudpickle.dumps(model))))
    x = torch.randn(4, 5)
    assert torch.equal(sent.eval()(x), model.eval()(x))
    assert sent.state_dict().keys() == model.state_dict().keys()
    sent[0].weight.sum().backward()
    assert all(value.grad is not None for value in sent[0].parametrizations.weight.parameters())


def test_hooks_that_change_nothing_are_taken_and_others_are_refused():
    def hooked(factor, *, after=False):
        def change(weight):
            weight.grad.mul_(factor)

        model = chain(nn.Linear(5, 6))
        if after:
            model[0].weight.register_post_accumulate_grad_hook(change)
        else:
            model[0].weight.register_hook(lambda grad: grad * factor)
        return model

    for after in (False, True):
        assert len(run(hooked(1, after=after)).metrics)
        for model in (hooked(2, after=after), lambda after=after: hooked(2, after=after)):
            with pytest.raises(
                rayfed.UsageError, match=r"model: 0\.weight differs by .* a gradient hook of the weight"
            ):
                run(model)


def test_a_hook_of_the_whole_model_is_called_where_the_method_does_not_split_it():
    whole = chain(nn.Linear(5, 6))
    whole.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(rayfed.UsageError, match="model"):
        run(whole, **{"algorithm.name": "fedper"})
    trained = run(whole, rounds=1, epochs=1).model()
    expected = by_hand(copy.deepcopy(whole), rounds=1, epochs=1)
    assert_same_states(trained, expected)


class Keeping(nn.Module):
    """Calls `keep(self, h)` in each forward pass."""

    def __init__(self, keep, **attributes):
        super().__init__()
        self.body, self.fc, self.keep = nn.Linear(5, 6), nn.Linear(6, 3), keep
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        h = torch.relu(self.body(x))
        if self.training:
            self.keep(self, h)
        return self.fc(h)


def count(module, h):
    module.steps += 1


def remember(module, h):
    module.bank["rows"].append(h.detach())


def draw(module, h):
    torch.rand(1, generator=module.source)


def fill(module, h):
    module.centre = h.detach().mean(0) if module.centre is None else 0.5 * (module.centre + h.detach().mean(0))


def drift(module, h):
    with torch.no_grad():
        module.centre.lerp_(h.mean(0), 0.1)


def with_buffer(keep, centre, **how):
    model = Keeping(keep)
    model.register_buffer("centre", centre, **how)
    return model


def loss_with(state):
    def loss(outputs, y):
        state["steps"] += 1
        return F.cross_entropy(outputs, y)

    return loss


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: Keeping(count, steps=0), "steps"),
        (lambda: Keeping(remember, bank={"rows": []}), "bank"),
        (lambda: Keeping(draw, source=torch.Generator()), "source"),
        (lambda: with_buffer(drift, torch.zeros(6), persistent=False), "centre"),
        (lambda: Keeping(drift, centre=nn.Parameter(torch.zeros(6), requires_grad=False)), "centre"),
    ],
)
def test_attributes_that_carry_state_from_client_to_client_are_refused(model, name):
    with pytest.raises(rayfed.UsageError, match=f"model: training changes {name}, which is no buffer"):
        run(model)


def test_losses_that_carry_state_are_refused():
    with pytest.raises(rayfed.UsageError, match="loss: training changes state, which is no buffer"):
        rayfed.run(QUIET, clients=clients(), model=lambda: chain(nn.Linear(5, 6)), loss=loss_with({"steps": 0}))


def test_attributes_that_depend_on_the_last_batch_alone_are_accepted():
    def last(module, h):
        module.last, module.shape = h, h.shape
        module.mask = torch.eye(6) if module.mask is None else module.mask

    assert len(run(Keeping(last, mask=None)).metrics)
