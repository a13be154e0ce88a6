"""Blocks of clients that train at once: what a step costs, and how many clients a measurement chooses."""

from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.algorithm_cases import MAIN_CASES, finished, people_of, plan_of
from helpers.commands import TWO_CLIENTS, command
from helpers.federations import Busy, blobs, blueprint, new_server, reshaped, simulate
from rayfed.algorithms.fedavg import FedAvg
from rayfed.augment.images import Crop, Rotation
from rayfed.core.network import vectorised
from rayfed.core.optim import SGD, Adam
from rayfed.core.rng import Streams
from rayfed.core.trees import named_tensors
from rayfed.data.population import Client, Examples, Population
from rayfed.engine import host, training
from rayfed.engine.device_data import Normalise, Part
from rayfed.engine.training import Pool, fastest_width, train_block
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.run_summary import run_summary
from rayfed.models.base import build_model

BATCH, SHAPE = 2, (1, 16, 16)
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "lift_fresh"}
"""Operations that wait for a GPU; the last one is a value that is copied to it."""
LAYOUT = {"view", "_unsafe_view", "clone"}
"""What reshapes a tensor, which needs no copy where there is one client."""


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched to a device, but for some."""

    def __init__(self, left_out=LAYOUT):
        super().__init__()
        self.counts, self.left_out = Counter[str](), left_out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) not in self.left_out:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def operations_of_a_step(plan, people, clients):
    """Return the operations of one more step of a block: its batch, the step itself, and the sums of metrics."""
    ctx = plan.context(people, "cpu")
    (exchange,) = plan.algorithm.exchanges("round")
    down = exchange.broadcast(ctx, plan.algorithm.init(ctx))
    normalise = Normalise(people, torch.device("cpu"), channels_last=ctx.task.channels_last)
    parts = [Part(people.clients[0].train, torch.device("cpu"), normalise)] * clients
    work = [exchange.start(ctx, plan.algorithm.join(ctx), down)] * clients
    counted = []
    for steps in (2, 3):
        rows, seeds = [[np.arange(BATCH)] * steps] * clients, [partial(Streams(0).begin, "batch")] * clients
        batches = Pool(parts, plan.augment).batches(rows, range(clients), seeds)
        with Operations() as operations:
            train_block(exchange, ctx, work, down, batches, [steps] * clients)
        counted.append(operations.counts)
    return counted[1] - counted[0]


def zeros():
    x, y = np.zeros((BATCH, *SHAPE), np.uint8), np.zeros(BATCH, np.int64)
    client = Client(0, "all", Examples(x, y), Examples(x[:0], y[:0]), Examples(x[:0], y[:0]))
    return Population("zeros", (client,), 10, SHAPE, (0.5,), (0.5,))


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    ("network", "options"), [("mlp", {"hidden": [8]}), ("cnn", {}), ("digits_cnn", {"width": 0.02})]
)
def test_a_step_takes_as_many_operations_for_any_number_of_clients(network, options, optimizer):
    people, model = zeros(), build_model(network, options, SHAPE, 10)
    plan = blueprint(FedAvg(), people, model=model, optimizer=optimizer, batch_size=BATCH)
    alone = operations_of_a_step(plan, people, 1)
    assert alone["index_select"] == 2  # the inputs and the labels of all clients
    assert not WAITING & {*alone}
    for clients in (3, 64):
        assert operations_of_a_step(plan, people, clients) == alone


@pytest.mark.parametrize(
    ("augment", "draws"),
    [(Rotation(), {"empty": 61, "uniform_": 61}), (Crop(), {"rand": 61, "randint": 61, "permute": 61})],
)
def test_only_the_draws_of_an_augmentation_take_more_operations_for_more_clients(augment, draws):
    people, model = zeros(), build_model("mlp", {"hidden": [8]}, SHAPE, 10)
    plan = blueprint(FedAvg(), people, model=model, augment=augment, batch_size=BATCH)
    few, many = (operations_of_a_step(plan, people, clients) for clients in (3, 64))
    assert many - few == draws
    assert not few - many
    assert not WAITING & {*many}


def test_group_norm_behind_a_convolution_can_be_trained_at_once():
    """On a CPU its inputs are in the memory format channels-last, for which torch's kernel cannot be vectorised."""
    people = reshaped(blobs(3, sizes=(4, 4, 4)), (1, 2, 3))
    model = build_model("cnn_domainbed", {}, people.shape, people.num_classes)
    alone, together = (
        simulate(blueprint(FedAvg(), people, model=model, vmap_clients=width, rounds=1, batch_size=2), people)[0]
        for width in (1, 3)
    )
    torch.testing.assert_close(together.state["weights"], alone.state["weights"], rtol=1e-4, atol=1e-6)
    assert not torch.equal(alone.state["weights"]["head.bias"], model.head.bias)


class Shared(FedAvg):
    """FedAvg whose step returns the same tensor for all clients, which change, send and keep theirs at the end."""

    averaged = ("weights", "same")

    def start(self, ctx, client, down):
        return super().start(ctx, client, down) | {"same": torch.zeros(3)}

    def step(self, ctx, work, down, batch):
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"same": torch.ones(3)}, metrics

    def finish(self, ctx, work, client, down, data):
        work["same"] += ctx.client
        state, up = super().finish(ctx, work, client, down, data)
        return state | {"same": work["same"], "head": work["weights"]["fc.weight"]}, up | {"same": work["same"]}


def test_clients_of_a_block_share_no_memory_and_keep_none_of_it():
    plan = blueprint(Shared(), people := blobs(4), vmap_clients=4, rounds=1)
    server, _ = simulate(plan, people)
    for client, state in server.fleet.states.items():
        assert state["same"].tolist() == [1.0 + client] * 3
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for _, tensor in named_tensors(state))


@MAIN_CASES
def test_no_step_of_any_method_waits_for_the_device(case, monkeypatch):
    seen, current = defaultdict(list), []

    def watched(exchange, ctx, *others):
        current[:] = [(type(exchange).__name__, ctx.moment.stage, ctx.phase)]
        return train_block(exchange, ctx, *others)

    @contextmanager
    def counted():
        with vectorised(), Operations() as operations:
            yield
        seen[current[0]].append(operations.counts)

    monkeypatch.setattr(training, "train_block", watched)
    monkeypatch.setattr(training, "vectorised", counted)
    finished(plan_of(case, vmap_clients=4, rounds=1))
    assert seen
    for name, steps in seen.items():
        assert not WAITING & {operation for counts in steps for operation in counts}, name


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def chosen(each, most=256):
    """The width that is chosen where clients take `each[width]` milliseconds, and the widths that were tried."""
    now, tried = [0.0], []

    def block(width):
        tried.append(width)
        if isinstance(each[width], Exception):
            raise each[width]
        now[0] += each[width] * width / 1000

    return fastest_width(most, block, lambda: now[0]), sorted(set(tried))


@pytest.mark.parametrize(
    ("each", "most", "width"),
    [
        ({1: 10, 4: 11, 16: 7, 64: 8, 256: 9}, 256, 16),
        ({1: 10, 4: 9.6, 16: 9.6, 64: 9.6}, 64, 1),  # not worth it
        ({1: 10, 4: 5, 16: 4.9, 64: 4.8}, 64, 4),
        ({1: 10, 4: 14.9, 16: 15.1}, 256, 1),
        ({1: 90, 4: 80, 16: 70}, 256, 16),  # in more than a second
        ({1: 10, 4: 5, 16: OUT_OF_MEMORY}, 256, 4),
        ({1: 10, 4: 5, 10: 3}, 10, 10),
        ({}, 1, 1),
    ],
)
def test_the_narrowest_of_the_fastest_is_chosen(each, most, width):
    assert chosen(each, most) == (width, sorted(each))


@pytest.mark.parametrize("each", [{1: OUT_OF_MEMORY}, {1: 10, 4: RuntimeError("CUDA error: device-side assert")}])
def test_what_ends_a_run_anyway_is_raised(each):
    with pytest.raises(RuntimeError, match="CUDA"):
        chosen(each)


def test_steps_that_cost_the_same_for_any_number_train_the_whole_cohort_at_once():
    people = blobs(6)
    server, (first, second) = simulate(blueprint(Busy(), people, vmap_clients=None, rounds=2, cohort=4), people)
    assert (server.fleet.vmap_clients, first.vmap_clients, second.vmap_clients) == (4, 4, None)


def test_a_block_has_room_in_half_of_the_memory(monkeypatch):
    """The largest client has 41 inputs of 6 floats, and trains 263 floats and the counter of a batch norm, 4 times."""
    one = 41 * 6 * 4 + 4 * (263 * 4 + 8)
    monkeypatch.setattr(host, "room_for", lambda *_: 3.5 * one / 2)
    people = blobs(6)
    server, _ = simulate(blueprint(Busy(), people, vmap_clients=None, rounds=1), people)
    assert server.fleet.vmap_clients == 3


def measured(width):
    """A `fastest_width` that trains blocks as the real one does, and returns `width`."""

    def fastest(most, block, clock):
        block(1)
        block(most)
        return min(width, most)

    return fastest


def outcome(plan, **evaluation):
    """The hash of the final state, the scores, and the number of clients that trained at once."""
    server = new_server(plan, people_of(plan.algorithm), points=("adapted",), **evaluation)
    records = list(server.run())
    return server.state_hash(), [sorted(record.scores) for record in records], server.fleet.vmap_clients


@MAIN_CASES
def test_the_same_number_given_ends_with_the_same_bits(case, monkeypatch):
    """With scores before the first round, which every method has."""
    monkeypatch.setattr(host, "fastest_width", measured(3))
    chosen, given = (outcome(plan_of(case, vmap_clients=width), initial=True) for width in (None, 3))
    assert chosen == given


@pytest.mark.parametrize(
    ("more", "number", "text"),
    [
        ({}, None, "vmap_clients auto (measured before the first training)"),
        ({"local.drop_last": False}, 1, "vmap_clients auto (1: clients cannot train at once)"),
        ({"algorithm.name": "per_fedavg", "local.drop_last": False}, 1, "vmap_clients auto (1: "),
        ({"local.batch_size": 1000}, 1, "vmap_clients auto (1: "),
    ],
)
def test_clients_that_cannot_train_at_once_train_alone(more, number, text):
    plan = make_plan(Config.read(TWO_CLIENTS, {"placement.vmap_clients": "auto", **more}))
    assert plan.blueprint.vmap_clients == number
    assert text in run_summary(plan)


def test_a_resumed_trial_keeps_its_number(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, common = command("run"), ["data={domains: [plain, font], per_domain: 60}", "model={name: mlp, hidden: [8]}"]
    common += ["partition={name: iid, clients: 4}", "local.batch_size=6", "checkpoint.every=1"]
    monkeypatch.setattr(host, "fastest_width", measured(3))
    assert run([*common, "placement.vmap_clients=auto", "rounds=2"]) == 0
    assert "placement.vmap_clients=auto: measured 3" in capsys.readouterr().err
    monkeypatch.setattr(host, "fastest_width", measured(2))
    assert run([*common, "placement.vmap_clients=auto", "rounds=3", "resume=true"]) == 0
    assert run([*common, "placement.vmap_clients=3", "rounds=3", "results=explicit"]) == 0
    rows = [pd.read_parquet(f"{folder}/run/trials").iloc[0] for folder in ("results", "explicit")]
    assert [row["vmap_clients"] for row in rows] == [3, 3]
    assert rows[0]["weights_hash"] == rows[1]["weights_hash"]
    assert rows[0]["trial"] != rows[1]["trial"]
