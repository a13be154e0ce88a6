"""Steps replayed from graphs give what the steps give, and a step that a graph cannot replay runs by itself.

CUDA is not needed: `helpers.taped_graphs` repeats recorded operations as a graph does.
"""

import contextlib
import dataclasses
import logging
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import rayfed
from helpers import taped_graphs
from helpers.algorithm_cases import MAIN_CASES, algorithm_of, everything, people_of, plan_of
from helpers.federations import blobs, blueprint, net
from rayfed.algorithm import Delegate, Phase
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedprox import FedProx
from rayfed.core.errors import UsageError
from rayfed.core.lr_schedule import Exponential
from rayfed.core.optim import SGD, Adam
from rayfed.core.trees import clone, tree_map
from rayfed.data.clients import Client, Examples
from rayfed.data.population import Population
from rayfed.engine import graphs
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.graphs import REPLAYED, CudaCapture, StepGraphs
from rayfed.engine.purity import facts
from rayfed.engine.server import Evaluation, Server
from rayfed.models.build import build_model

BATCH, SHAPE, STEPS = 4, (1, 16, 16), (3, 5, 4, 5)
FEW = "fewer than 20 steps alike"


def pictures(extra=0):
    """One client for each of `STEPS`, with `extra` examples beyond full batches."""
    rng = np.random.default_rng(0)

    def client(i, n):
        x = rng.integers(0, 256, (n, *SHAPE), dtype=np.uint8)
        train = Examples(x, rng.integers(0, 10, n))
        none = Examples(x[:0], train.y[:0])
        return Client(i, "all", train, none, none)

    clients = tuple(client(i, count * BATCH + extra) for i, count in enumerate(STEPS))
    return Population("noise", clients, 10, SHAPE, (0.5,), (0.5,))


def finished(plan, people, capture=None, points=()):
    """Run to the end; return all states and scores, and what became of the steps, which `capture` replays."""
    server = Server(plan, people, LocalFleet(plan, people), Evaluation(points=points))
    assert server.fleet.host.graphs is None  # on a CPU
    if capture is not None:
        server.fleet.host.graphs = StepGraphs(capture)
    records = list(server.run())
    counts = sum((record.graphs for record in records), Counter())
    return (facts(everything(server)), [record.scores for record in records]), counts


def replayed(plan, people, capture=taped_graphs.capture, points=()):
    """Return what became of the steps of a run with graphs, whose states and scores are those of a run without."""
    found, counts = finished(plan, people, capture, points)
    wanted, none = finished(plan, people, points=points)
    assert found == wanted
    assert not none
    return dict(counts)


@pytest.fixture
def soon(monkeypatch):
    """Capture the second step of a kind."""
    monkeypatch.setattr(graphs, "ENOUGH_STEPS", 2)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.05, momentum=0.9), Adam(lr=0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    ("network", "options"), [("mlp", {"hidden": [8]}), ("cnn", {}), ("digits_cnn", {"width": 0.02})]
)
def test_weights_are_those_of_the_steps(network, options, optimizer, width):
    people, rounds = pictures(), 4
    changes = {"model": build_model(network, options, SHAPE, 10), "optimizer": optimizer, "vmap_clients": width}
    counts = replayed(blueprint(FedAvg(), people, batch_size=BATCH, rounds=rounds, **changes), people)
    if width == 1:  # the first 20 of 68 steps are none of a graph
        assert counts == {FEW: 20, REPLAYED: rounds * sum(STEPS) - 20}
    else:  # five steps a round, of four clients, of three and of two: each kind has too few
        assert counts == {FEW: rounds * max(STEPS)}


@pytest.mark.parametrize("network", ["mlp", "digits_cnn"])
def test_clients_of_a_block_that_end_earlier_have_graphs_of_their_own(network, soon):
    people, rounds = pictures(), 4
    options = {"hidden": [8]} if network == "mlp" else {"width": 0.02}
    model = build_model(network, options, SHAPE, 10)
    plan = blueprint(FedAvg(), people, model=model, batch_size=BATCH, rounds=rounds, vmap_clients=4)
    # three steps a round with four clients, one with three, one with two: the first two of each kind are no replays
    assert replayed(plan, people) == {"fewer than 2 steps alike": 3 * 2, REPLAYED: rounds * 5 - 3 * 2}


def test_a_short_last_batch_is_of_a_kind_of_its_own(soon):
    people = pictures(extra=1)
    model = build_model("mlp", {"hidden": [8]}, SHAPE, 10)
    local = Phase("train", epochs=2)  # a short batch in the middle, too
    plan = blueprint(FedProx(), people, model=model, batch_size=BATCH, drop_last=False, local=local)
    taken = 2 * 2 * (sum(STEPS) + len(STEPS))
    assert replayed(plan, people) == {"fewer than 2 steps alike": 4, REPLAYED: taken - 4}


def test_a_rate_that_falls_has_a_graph_in_each_round(soon):
    people = blobs()
    plan = blueprint(FedAvg(), people, schedule=Exponential(decay=0.5), rounds=3)
    steps = 4 + 5 + 6 + 8  # batches of 5 of 20, 26, 33 and 41 examples
    assert replayed(plan, people) == {"fewer than 2 steps alike": 3 * 2, REPLAYED: 3 * (steps - 2)}


class Halved(Delegate):
    """The same training with half of the rate."""

    def step(self, ctx, work, down, batch):
        before = clone(work["weights"])
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"weights": {k: (v + before[k]) / 2 for k, v in work["weights"].items()}}, metrics

    def phases(self, ctx):
        return (ctx.local,)


class Closes(FedAvg):
    """Trains in another way after the last round, as its clients do not for a score before."""

    @property
    def final_exchanges(self):
        return (Halved(self),)


def test_each_exchange_has_a_graph(soon):
    people = blobs()
    plan = blueprint(Closes(), people, model=net(batch_norm=False))
    evaluation = replayed(plan, people, points=("adapted",))
    assert evaluation["fewer than 2 steps alike"] == 3 * 2  # of the rounds, of the scores, and after the last round


@pytest.mark.parametrize("width", [1, pytest.param(4, marks=pytest.mark.slow)])
@MAIN_CASES
def test_every_method_has_the_same_state(case, width, soon):
    plan, people = plan_of(case, vmap_clients=width, rounds=3), people_of(algorithm_of(case))
    assert sum(replayed(plan, people).values()) > 0


# What is not replayed


def reasons(algorithm, capture=taped_graphs.capture, **changes):
    people = blobs()
    counts = replayed(blueprint(algorithm, people, **changes), people, capture)
    return {reason for reason in counts if not reason.startswith("fewer")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads(FedAvg):
    attribute: str

    def correct(self, ctx, grads, work, down):
        return tree_map(lambda g: g * (1 + getattr(ctx, self.attribute) / 10), grads)


@pytest.mark.parametrize("attribute", ["step", "client", "round", "examples"])
def test_a_step_that_reads_what_changes(attribute, soon):
    assert reasons(Reads(attribute=attribute)) == {f"the step reads ctx.{attribute}"}
    assert reasons(Reads(attribute="exchange")) == {REPLAYED}


def test_a_step_that_draws(soon):
    assert reasons(FedAvg(), model=Dropping()) == {"the step draws random numbers"}


class Dropping(nn.Module):
    feature_shape = (6,)

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def features(self, x):
        return nn.functional.dropout(x, training=self.training)

    def head(self, features):
        return self.fc(features)

    def forward(self, x):
        return self.head(self.features(x))


class Waits(FedAvg):
    def correct(self, ctx, grads, work, down):
        return grads if next(iter(grads.values())).sum().item() > 99 else dict(grads)


def test_a_step_that_waits(soon, caplog):
    caplog.set_level(logging.INFO)
    graphs._log_once.cache_clear()
    captures = mock.Mock(side_effect=taped_graphs.capture)
    (reason,) = reasons(
        Waits(), captures, model=net(batch_norm=False), drop_last=False
    )  # whose short batches are not tried after that
    captures.assert_called_once()
    assert reason.startswith("a capture failed with RuntimeError: operation not permitted when stream is capturing")
    assert [record.getMessage() for record in caplog.records] == [f"steps run without a CUDA graph: {reason}"]


class Remembers(FedAvg):
    """Keeps the weights before the step, as another name of the tensors that the next step changes in place."""

    def start(self, ctx, client, down):
        work = super().start(ctx, client, down)
        return work | {"last": work["weights"]}

    def step(self, ctx, work, down, batch):
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"last": work["weights"]}, metrics


class Grows(FedAvg):
    def step(self, ctx, work, down, batch):
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"seen": [*work.get("seen", []), batch.y]}, metrics


class Begins(FedAvg):
    """Has another form after its first step."""

    def step(self, ctx, work, down, batch):
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"begun": torch.ones(1)}, metrics


def test_a_state_that_no_memory_can_hold(soon):
    assert reasons(Remembers()) == {"tensors of the state share memory"}
    assert reasons(Grows()) == {"the step changes the form of its state"}
    assert reasons(Begins()) == {"the step changes the form of its state"}


class Swaps(FedAvg):
    """Two tensors of the state change places in each step."""

    def start(self, ctx, client, down):
        return super().start(ctx, client, down) | {"a": torch.zeros(2), "b": torch.ones(2)}

    def step(self, ctx, work, down, batch):
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"a": work["b"], "b": work["a"]}, metrics | {"a": work["a"].sum()}

    def finish(self, ctx, work, client, down, data):
        kept, up = super().finish(ctx, work, client, down, data)
        return kept | {"a": work["a"], "b": work["b"]}, up


@pytest.mark.parametrize("width", [1, 4])
def test_tensors_that_change_places(width, soon):
    assert reasons(Swaps(), vmap_clients=width) == {REPLAYED}


def wrong(factor):
    """A graph whose first result is not that of the step."""

    def capture(run):
        replay, metrics = taped_graphs.capture(run)

        def repeat():
            replay()
            metrics["loss"].mul_(factor)

        return repeat, metrics

    return capture


class Imprecise(FedAvg):
    """A kernel that adds in any order: its last bits differ each time."""

    def correct(self, ctx, grads, work, down):
        global calls
        calls += 1
        return tree_map(lambda g: g * (1 + 1e-6 * (calls % 7)), grads)


calls = 0


def test_a_graph_with_other_numbers_is_not_used(soon):
    assert reasons(FedAvg(), wrong(1.001)) == {"a graph of the step gives other numbers"}
    assert reasons(FedAvg(), wrong(1 + 1e-6)) == {"a graph of the step gives other numbers"}
    people = blobs()
    plan = blueprint(Imprecise(), people)
    assert REPLAYED in finished(plan, people, wrong(1 + 1e-6))[1]
    assert "a graph of the step gives other numbers" in finished(plan, people, wrong(1.001))[1]


def test_a_host_keeps_few_graphs(soon):
    people, captures = pictures(extra=1), mock.Mock(side_effect=taped_graphs.capture)
    model = build_model("mlp", {"hidden": [8]}, SHAPE, 10)
    plan = blueprint(FedAvg(), people, model=model, batch_size=BATCH, drop_last=False, rounds=3)
    with mock.patch.object(graphs, "_MOST_KINDS", 1):  # each short batch drives out the graph of the others
        replayed(plan, people, captures)
    assert captures.call_count == 3 * len(STEPS)


# CUDA


class FakeCuda:
    """What a capture calls of `torch.cuda`, written down."""

    def __init__(self, monkeypatch):
        self.done = []
        self.stream = "main"
        for name in ("current_stream", "get_sync_debug_mode", "set_sync_debug_mode", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: mock.Mock(wait_stream=lambda of: None, name="side"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: mock.Mock(replay=lambda: self.done.append("replay")))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def current_stream(self):
        return mock.Mock(wait_stream=lambda of: None)

    def get_sync_debug_mode(self):
        return 0

    def set_sync_debug_mode(self, mode):
        self.done.append(f"mode {mode}")

    def graph_pool_handle(self):
        return "pool"

    @contextlib.contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def graph(self, graph, pool, stream):
        assert (pool, stream) == ("pool", self.stream)
        self.done.append("begin")
        self.stream = stream  # which torch does not undo after an error
        yield
        self.done.append("end")


def test_a_step_is_warmed_up_and_captured_on_a_stream_of_its_own(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    capture = CudaCapture()

    def run():
        assert cuda.stream != "main"
        cuda.done.append("run")
        return {"loss": 1}

    replay, result = capture(run)
    assert result == {"loss": 1}
    replay()
    assert cuda.done == ["mode error", *["run"] * 3, "mode 0", "begin", "run", "end", "replay"]

    def fails():
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        capture(fails)
    assert (cuda.stream, cuda.done[-1]) == ("main", "mode 0")


def test_graphs_can_be_switched_off(tmp_path):
    def chosen(value):
        with mock.patch("rayfed.experiments.plan.Blueprint", side_effect=Stop) as made, pytest.raises(Stop):
            rayfed.run({"placement.graphs": value, "results": str(tmp_path)})
        return made.call_args.kwargs["graphs"]

    assert chosen("auto") is True
    assert chosen(False) is chosen("off") is False  # False is what YAML makes of off
    with pytest.raises(UsageError, match=r"placement.graphs='on': known: auto, false, off"):
        chosen("on")


class Stop(Exception):
    pass
