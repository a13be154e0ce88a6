"""Frozen weights and buffers that are not saved: constants of the task, which no state, message or checkpoint has."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import rayfed
from helpers.algorithm_cases import MAIN_CASES, everything, finished, plan_of
from helpers.federations import adapted, as_mappings, blobs, blueprint, net, reshaped, simulate
from rayfed.algorithms.common.networks import with_projection
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import Network, vectorised, weights_of
from rayfed.core.trees import named_tensors
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.run_summary import run_summary
from rayfed.experiments.sources import from_arguments
from rayfed.models.base import build_model
from rayfed.models.split_model import ensure_split

HEAD = ("fc.weight", "fc.bias")
A, B = (f"body.0.lora_{letter}.default.weight" for letter in "AB")
FROZEN = ("first.weight", "first.bias", "norm.weight", "norm.bias", "scale")


class Half(nn.Module):
    """A frozen layer, a frozen batch norm with running statistics, a table that is not saved, and a trained end."""

    def __init__(self, seed=0):
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.middle, self.fc = nn.Linear(8, 5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.linspace(1, 2, 8), persistent=False)
        for layer in (self.first, self.norm):
            layer.requires_grad_(False)

    def forward(self, x):
        return self.fc(torch.relu(self.middle(torch.relu(self.norm(self.first(x))) * self.scale)))


def clients(count=3, seed=0):
    return as_mappings(blobs(count, sizes=(20,), seed=seed))


@pytest.fixture
def run(tmp_path):
    def run(model=Half, people=None, **changes):
        values = {"results": str(tmp_path / "r"), "local.batch_size": 10, "local.lr": 0.1, "resume": False}
        return rayfed.run(values | changes, clients=people or clients(), model=model, quiet=True)

    return run


def test_weights_are_those_of_a_plain_loop_to_the_bit(run):
    """One client with momentum: a batch is its whole data, and the mean is its model."""
    (client,) = people = clients(1)
    result = run(people=people, rounds=1, **{"local.epochs": 4, "local.batch_size": 20, "local.momentum": 0.9})
    model = Half().train()
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    order = np.arange(20)
    for _ in range(4):
        x, y = (torch.from_numpy(values[order]) for values in client["train"])
        sgd.zero_grad()
        F.cross_entropy(model(x), y).backward()
        sgd.step()
    trained = result.model().state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=2e-6, atol=2e-7)
    assert all(torch.equal(trained[name], value) for name, value in Half().state_dict().items() if name in FROZEN)
    assert not torch.equal(trained["norm.running_mean"], torch.zeros(8))


def test_bytes_and_checkpoints_are_those_of_what_is_trained(run, tmp_path):
    big = nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.Linear(4000, 8), nn.Linear(8, 3))
    for model, frozen in ((Half(), FROZEN), (big, ("0.weight", "0.bias", "2.weight", "2.bias"))):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        result = run(model, rounds=2, **{"checkpoint.every": 1})
        sent = sum(value.nbytes for name, value in model.state_dict().items() if name not in frozen)
        for column in ("bytes_up", "bytes_down"):
            assert result.rounds.query("round == 1")[column].item() == 3 * sent
    files = [path.stat().st_size for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert max(files) < 60_000 < big[2].weight.nbytes  # tables and states, without the frozen weights
    assert result.trials["base_hash"].item() != run(Half()).trials["base_hash"].item()


@MAIN_CASES
def test_no_state_of_any_method_has_a_constant(case):
    model = copy.deepcopy(case.changes.get("model") or net())
    first = next(index for index, layer in enumerate(model.body) if isinstance(layer, nn.Linear))
    name = f"body.{first}.weight"
    model.body[first].weight.requires_grad_(False)
    server = finished(plan_of(case, model=model, rounds=1))
    assert [path for path in server.ctx.task.model.constants if path.endswith(name)]
    paths = [path for path, _ in named_tensors(everything(server) | {"constants": None})]
    assert [path for path in paths if path.endswith(f"body.{first}.bias")]
    assert not [path for path in paths if path.endswith(name)]


def test_clients_that_train_at_once_share_constants():
    people = blobs(3, sizes=(20,))
    ends = []
    for width in (1, 3):
        server, _ = simulate(blueprint(FedAvg(), people, model=ensure_split(Half(), (6,)), vmap_clients=width), people)
        ends.append(server.state["weights"])
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value)
    seen = []
    with vectorised():
        network, x = Network(Half()), torch.randn(2, 4, 6)
        network.module.first.register_forward_hook(lambda layer, args, out: seen.append(layer.weight))
        block = {name: torch.stack([value, value]) for name, value in weights_of(network.module).items()}
        torch.vmap(lambda weights, x: network(weights, x)[0])(block, x)
    assert seen[0] is network.module.first.weight


def aligned(data):
    """Return bytes as the object store has them: read-only, at an address that is a multiple of 64."""
    room = np.empty(data.nbytes + 64, np.uint8)
    place = room[-room.ctypes.data % 64 :][: data.nbytes]
    place[:] = np.frombuffer(data, np.uint8)
    place.flags.writeable = False
    return place


def test_constants_lie_once_in_a_process_and_are_sent_as_arrays():
    """Tasks share them, also those of wrapped models and channels-last copies; a pickle has them out of band."""
    model = build_model("digits_cnn", {}, (1, 28, 28), 10)
    model.features.requires_grad_(False)
    plan, people = blueprint(FedAvg(), reshaped(blobs(2), (1, 2, 3)), model=model), reshaped(blobs(2), (1, 2, 3))
    one, other = (plan.context(people, "cpu").task for _ in range(2))
    wrapped = with_projection(other, None)
    places = {name: value.data_ptr() for name, value in one.model.constants.items()}
    assert {name for name, value in one.model.constants.items() if value.dim() == 4}
    assert places == {name: value.data_ptr() for name, value in other.model.constants.items()}
    assert set(places.values()) <= {value.data_ptr() for value in wrapped.model.constants.values()}
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(plan, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) >= sum(value.nbytes for value in one.model.constants.values())
    copies = [aligned(buffer.raw()) for buffer in buffers]
    sent = pickle.loads(data, buffers=copies)
    for name, value in model.state_dict().items():
        assert torch.equal(sent.model.state_dict()[name], value)
    there = sent.context(people, "cpu").task.model.constants
    stored = {np.frombuffer(part, np.uint8).ctypes.data for part in copies}
    assert {value.data_ptr() for value in there.values()} <= stored


def test_batch_norm_that_is_frozen_is_a_constant(run):
    result = run(rounds=1, batch_norm="frozen")
    assert set(result.server["weights"]) == {"middle.weight", "middle.bias", *HEAD}
    assert torch.equal(result.model().norm.running_mean, Half().norm.running_mean)


def test_tied_weights_are_frozen_under_all_their_names(run):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.fc = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.other.weight = self.one.weight
            self.one.weight.requires_grad_(False)

        def forward(self, x):
            return self.fc(self.other(torch.relu(self.one(x))))

    model = Tied()
    result = run(model, rounds=1)
    trained = result.model()
    assert not [name for name in result.server["weights"] if name in ("one.weight", "other.weight")]
    assert trained.one.weight is trained.other.weight
    assert torch.equal(trained.one.weight, model.one.weight)
    assert not torch.equal(trained.other.bias, model.other.bias)


class FromFile(nn.Module):
    """A user's model whose frozen layer comes from a file."""

    def __init__(self, shape, num_classes, base):
        super().__init__()
        self.base, self.fc = nn.Linear(6, 4), nn.Linear(4, num_classes)
        self.base.load_state_dict(torch.load(base))
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.fc(torch.relu(self.base(x)))


def test_another_base_is_refused(run, tmp_path):
    values = {"model.name": f"{__name__}:FromFile", "model.base": str(tmp_path / "base.pt"), "resume": True}
    torch.save(nn.Linear(6, 4).state_dict(), tmp_path / "base.pt")
    first = run(None, rounds=1, **values)
    assert run(None, rounds=1, **values).weights_hash == first.weights_hash
    torch.save(nn.Linear(6, 4).state_dict(), tmp_path / "base.pt")
    with pytest.raises(rayfed.UsageError, match="resume=true: the frozen weights of the model changed since fedavg-"):
        run(None, rounds=1, **values)
    with pytest.raises(rayfed.UsageError, match="resume=anyway: the frozen weights of the model changed"):
        run(None, rounds=2, **values | {"resume": "anyway"})
    assert run(None, rounds=1, **values | {"resume": False}).weights_hash


def test_saved_models_have_all_weights(run, tmp_path):
    result = run(lambda: Half(seed=None), rounds=1, **{"algorithm.name": "fedbn"})  # the seed of the run draws the base
    model = result.model(client=1)
    saved = load_file(result.save(tmp_path / "a" / "model", client=1) / "model.safetensors")
    state = model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)
    x, y = map(torch.from_numpy, clients()[1]["test"])
    recorded = result.metrics.query("client == 1 and metric == 'loss' and split == 'test'").value.item()
    assert F.cross_entropy(model(x), y).item() == pytest.approx(recorded, abs=1e-6)


def test_summary_says_what_is_trained_and_sent():
    plan = make_plan(Config.read({"local.batch_size": 10}), Given(clients=clients(), model=Half))
    lines = run_summary(plan)
    assert "135 parameters, 63 trained, 103 multiply-accumulates" in lines
    assert "download per client: weights 324 B" in lines  # 63 parameters, 16 statistics and a counter


@pytest.mark.parametrize(
    ("name", "personal"),
    [
        *((name, "*lora_B*") for name in ("scaffold", "ditto", "feddyn", "fedper", "mixup", "fedadam")),
        ("fedavg", [B]),
        ("fedavg", "*lora_B*, fc.b*"),
    ],
)
def test_personal_weights_stay_with_the_client(name, personal, run):
    """FedSA-LoRA is FedAvg with B personal."""
    at = "algorithm.base" if name == "mixup" else "algorithm"
    inner = {"algorithm.base.name": "scaffold"} if name == "mixup" else {}
    result = run(lambda: adapted(net(False)), rounds=2, **{"algorithm.name": name, f"{at}.personal": personal} | inner)
    kept, sent = set(result.clients[0]["weights"]), set(result.server["weights"])
    assert kept == {B} | ({"fc.bias"} if "fc" in str(personal) else set()) | (set(HEAD) if name == "fedper" else set())
    assert not sent & {*kept, "body.0.base_layer.weight"}
    assert A in sent
    one, other = (result.model(client=client).state_dict() for client in (0, 1))
    assert not torch.equal(one[B], other[B])
    assert torch.equal(one[A], other[A]) is (name != "ditto")  # which scores w_i


def test_a_pattern_is_an_argument_of_the_command():
    assert from_arguments(["algorithm.personal=*lora_B*"]) == {"algorithm.personal": "*lora_B*"}
    config = Config.read({"algorithm.personal": "*lora_B*, a.b"})
    assert config.tree()["algorithm"]["personal"] == ["*lora_B*", "a.b"]
    assert Config.read(config.tree()).algorithm.personal_weights == ("*lora_B*", "a.b")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm.personal": "*lora_C*"}, r"algorithm.personal=\*lora_C\*: matches no weight of the model, such as"),
        ({"algorithm.personal": "body.0.base*"}, "matches no weight"),  # constants stay anyway
        ({"algorithm.name": "erm", "algorithm.personal": "fc.*"}, "algorithm.personal: algorithm.name=erm trains one"),
        ({"algorithm.personal": 3}, "algorithm.personal=3: expected a list of strings"),
        ({"algorithm.name": "mixup", "algorithm.personal": "fc.*"}, "algorithm.personal: .* give it to algorithm.base"),
    ],
)
def test_personal_weights_that_do_not_exist_are_refused(values, message, run):
    with pytest.raises(rayfed.UsageError, match=message):
        run(lambda: adapted(net(False)), rounds=1, **values)
