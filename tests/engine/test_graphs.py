"""Steps replayed from graphs give what the steps give, and a step that a graph cannot replay runs by itself.

CUDA is not needed: `helpers.taped_graphs` repeats recorded operations as a graph does.
"""

import dataclasses
import itertools
from collections import Counter
from unittest.mock import Mock

import pytest
import torch

from helpers import taped_graphs
from helpers.algorithm_cases import MAIN_CASES, algorithm_of, everything, people_of, plan_of
from helpers.federations import blobs, blueprint, net
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.ids import Moment
from rayfed.core.lr_schedule import CONSTANT, Exponential
from rayfed.core.optim import SGD, Adam
from rayfed.core.trees import tree_map
from rayfed.engine import graphs, host
from rayfed.engine.fleet import Request
from rayfed.engine.graphs import REPLAYED, NotCaptured, StepGraphs
from rayfed.engine.host import LocalFleet
from rayfed.engine.purity import ImpureHook, facts
from rayfed.engine.server import Evaluation, Server

CHANGED = 1.0
"""A number that steps of `Reads` take from Python."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Capture the second step of a kind."""
    monkeypatch.setattr(graphs, "ENOUGH_STEPS", 2)


def replayed(plan, people, capture=taped_graphs.capture, beside=None):
    """Return what became of the steps of a run with graphs, whose states are those of a run without, or of `beside`."""
    found = []
    for given in (beside, capture):
        server = Server(plan, people, LocalFleet(plan, people), Evaluation(points=()))
        assert server.fleet.host.graphs is None  # on a CPU
        server.fleet.host.graphs = StepGraphs(given) if given else None
        scores = [record.scores for record in server.run()]  # those of training
        found.append((facts(everything(server)), scores))
    assert found[0] == found[1]
    counts = server.fleet.host.graphs.counts
    return Counter({reason: count for reason, count in counts.items() if not reason.startswith("fewer")})


@pytest.mark.parametrize("width", [1, pytest.param(4, marks=pytest.mark.slow)])
@MAIN_CASES
def test_every_method_has_the_same_state(case, width):
    plan, people = plan_of(case, vmap_clients=width, rounds=3), people_of(algorithm_of(case))
    assert replayed(plan, people).total() > 0 or width > 1  # blocks of some methods take a step alike only once


@pytest.mark.parametrize("width", [1, 3, 4])
def test_steps_are_replayed_for_clients_that_end_earlier_and_short_last_batches_too(width):
    people = blobs()
    changes = {"optimizer": Adam(lr=0.01), "rounds": 4, "model": net(batch_norm=False), "drop_last": width > 1}
    counts = replayed(blueprint(FedAvg(), people, vmap_clients=width, **changes), people)
    assert set(counts) == {REPLAYED}
    assert counts[REPLAYED] > {1: 70, 3: 20, 4: 15}[width]


def refused(run):
    """Capture nothing."""
    raise NotCaptured("it is not to be")


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.5), Adam(lr=0.01, weight_decay=0.1, decoupled=True)])
@pytest.mark.parametrize("width", [1, 4])
def test_a_rate_that_falls_is_an_input_of_one_graph(width, optimizer):
    """The steps beside the replayed ones take the rate from a tensor, too."""
    people = blobs()
    taken = 4 + 5 + 6 + 8  # batches of 5 of 20, 26, 33 and 41 examples
    changes = {"schedule": Exponential(decay=0.5), "rounds": 4, "vmap_clients": width, "optimizer": optimizer}
    plan = blueprint(FedAvg(), people, model=net(batch_norm=False), **changes)
    counts = replayed(plan, people, beside=refused)
    assert set(counts) == {REPLAYED}
    if width == 1:
        assert counts[REPLAYED] == 4 * taken - 3
    by_tensor = final_weights(plan, people, taped_graphs.capture)
    by_number = final_weights(plan, people, None)
    for name, value in by_number.items():
        torch.testing.assert_close(by_tensor[name], value, rtol=1e-4, atol=1e-6)
    constant = final_weights(dataclasses.replace(plan, schedule=CONSTANT), people, None)
    assert not torch.allclose(constant["fc.weight"], by_number["fc.weight"], rtol=1e-2)


def final_weights(plan, people, capture):
    """Return the global model after a run, with graphs if a capture is given."""
    server = Server(plan, people, LocalFleet(plan, people), Evaluation(points=()))
    if capture is not None:
        server.fleet.host.graphs = StepGraphs(capture)
    list(server.run())
    return server.state["weights"]


@pytest.mark.parametrize("width", [1, pytest.param(4, marks=pytest.mark.slow)])
@MAIN_CASES
def test_every_method_has_the_same_state_with_a_schedule(case, width):
    plan, people = plan_of(case, vmap_clients=width, rounds=3), people_of(algorithm_of(case))
    plan = dataclasses.replace(plan, schedule=Exponential(decay=0.5))
    assert replayed(plan, people, beside=refused).total() > 0 or width > 1


class Swaps(Scaffold):
    """Scaffold whose steps put tensors in each other's places."""

    def start(self, ctx, client, down):
        return super().start(ctx, client, down) | {"left": torch.full((3,), float(ctx.client)), "right": torch.zeros(3)}

    def step(self, ctx, work, down, batch):
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"left": work["right"] + 1, "right": work["left"]}, metrics

    def finish(self, ctx, work, client, down, data):
        state, up = super().finish(ctx, work, client, down, data)
        return state | {"left": work["left"], "right": work["right"]}, up


@pytest.mark.parametrize("width", [1, 2])
def test_tensors_that_swap_places_and_the_states_of_earlier_blocks_are_kept(width):
    people = blobs(4, sizes=(20, 20, 20, 20))
    assert set(replayed(blueprint(Swaps(), people, vmap_clients=width, rounds=3), people)) == {REPLAYED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads(FedAvg):
    """Its steps take a number from the context, from a tensor, or from a variable."""

    what: str

    def correct(self, ctx, grads, work, down):
        number = {"waits": lambda: grads["fc.bias"].sum().item(), "variable": lambda: CHANGED}
        number = number.get(self.what, lambda: getattr(ctx, self.what))()
        return tree_map(lambda g: g * (1 + number / 10), grads)

    def prepare(self, ctx, batch):
        global CHANGED
        CHANGED = CHANGED + 1.0
        return batch


@pytest.mark.parametrize("attribute", ["step", "client", "round", "examples"])
def test_a_step_that_reads_what_changes_runs_by_itself(attribute):
    people = blobs()
    assert set(replayed(blueprint(Reads(what=attribute), people), people)) == {f"the step reads ctx.{attribute}"}


def test_a_step_that_waits_for_the_device_runs_by_itself_and_others_are_captured():
    people = blobs()
    assert set(replayed(blueprint(Reads(what="waits"), people), people)) == {"the step cannot be captured: it waits"}


def test_nothing_is_captured_after_cuda_broke_off_a_capture():
    broken = Mock(side_effect=RuntimeError("broken off"))
    people = blobs()  # with short last batches, which are steps of another kind
    plan = blueprint(FedAvg(), people, model=net(batch_norm=False), rounds=3, drop_last=False)
    (reason,) = replayed(plan, people, broken)
    assert reason.startswith("a capture failed: RuntimeError: broken off")
    broken.assert_called_once()


def test_memory_that_is_out_in_a_capture_ends_only_its_kind():
    asked = []

    def capture(run):
        asked.append(run)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return taped_graphs.capture(run)

    people = blobs()  # with short last batches, which are steps of another kind
    plan = blueprint(FedAvg(), people, model=net(batch_norm=False), rounds=3, drop_last=False)
    counts = replayed(plan, people, capture)
    (reason,) = set(counts) - {REPLAYED}
    assert reason.startswith("the step cannot be captured: OutOfMemoryError: CUDA out of memory")
    assert counts[REPLAYED] > 0
    assert len(asked) > 1


def test_a_graph_is_compared_with_the_step_on_other_inputs_than_those_it_was_captured_with(monkeypatch):
    """A number that a step takes from a global variable is the same when the captured step is repeated."""
    monkeypatch.setattr(f"{__name__}.CHANGED", 1.0)
    people, counts = blobs(), Counter()
    plan = blueprint(Reads(what="variable"), people)
    server = Server(plan, people, LocalFleet(plan, people), Evaluation(points=()))
    server.fleet.host.graphs = StepGraphs(taped_graphs.capture)
    list(server.run())
    counts = server.fleet.host.graphs.counts
    assert "a graph of the step gives other numbers" in counts
    assert REPLAYED not in counts


def test_a_step_that_draws_random_numbers_runs_by_itself():
    people, model = blobs(), net(batch_norm=False)
    model.body.append(torch.nn.Dropout())
    assert set(replayed(blueprint(FedAvg(), people, model=model), people)) == {"the step draws random numbers"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts(FedAvg):
    """Its gradients are divided by a count that an attribute holds, which one of its hooks increases."""

    where: str
    seen: dict = dataclasses.field(default_factory=dict)

    def count(self, hook):
        if hook == self.where:
            self.seen["calls"] = self.seen.get("calls", 0) + 1

    def correct(self, ctx, grads, work, down):
        self.count("step")
        return tree_map(lambda g: g / (1 + self.seen.get("calls", 0) / 100), grads)

    def finish(self, ctx, work, client, down, data):
        self.count("finish")
        return super().finish(ctx, work, client, down, data)


def counts_of(algorithm, **changes):
    """Return what became of the steps of a run with graphs."""
    people = blobs()
    plan = blueprint(algorithm, people, model=net(batch_norm=False), **changes)
    server = Server(plan, people, LocalFleet(plan, people), Evaluation(points=()))
    server.fleet.host.graphs = StepGraphs(taped_graphs.capture)
    list(server.run())
    return server.fleet.host.graphs.counts


@pytest.mark.parametrize("width", [1, 4])
def test_a_step_that_counts_its_calls_in_an_attribute_runs_by_itself(width):
    assert "the step changes attributes of the algorithm" in (
        counts := counts_of(Counts(where="step"), vmap_clients=width)
    )
    assert REPLAYED not in counts


def test_steps_after_another_hook_has_changed_an_attribute_are_of_another_kind():
    """Twenty steps of a client are alike, and those of the next client are not."""
    people = blobs()
    plan = blueprint(Counts(where="finish"), people, model=net(batch_norm=False), rounds=3)
    weights = []
    for capture in (None, taped_graphs.capture):
        object.__setattr__(plan.algorithm, "seen", {})
        server = Server(plan, people, LocalFleet(plan, people), Evaluation(points=()))
        server.fleet.host.graphs = StepGraphs(capture) if capture else None
        list(server.run())
        weights.append(facts(server.state["weights"]))
    assert weights[0] == weights[1]
    assert server.fleet.host.graphs.counts[REPLAYED] == 3 * (1 + 2 + 3 + 5)  # of 4, 5, 6 and 8 steps, less three each


LEVEL = 1.0
"""A number that steps of `Global` take from Python; it changes once."""


class Global(FedAvg):
    """Multiplies gradients by a global variable, which changes in the fourth round by a hundredth."""

    def broadcast(self, ctx, server):
        global LEVEL
        LEVEL = 1.01 if ctx.round >= 4 else 1.0
        return super().broadcast(ctx, server)

    def correct(self, ctx, grads, work, down):
        return tree_map(lambda g: g * LEVEL, grads)


def test_a_global_variable_that_changes_later_is_found_at_the_next_check_and_ends_the_run(monkeypatch):
    monkeypatch.setattr(graphs, "CHECK_AFTER", 50)  # replays; a round has 23 steps
    assert counts_of(Global(), rounds=3)[REPLAYED] == 3 * 23 - 3 - 1  # one is compared after 50
    with pytest.raises(
        ImpureHook, match=r"^Global\.step: gives other numbers than its CUDA graph, .* 100 times.*global"
    ) as raised:
        counts_of(Global(), rounds=6)
    assert "\n" not in str(raised.value)
    assert "placement.cuda_graphs=false" in str(raised.value)


def test_later_checks_of_a_pure_step_change_nothing(monkeypatch):
    monkeypatch.setattr(graphs, "CHECK_AFTER", 3)
    people = blobs()
    for width in (1, 4):
        plan = blueprint(Scaffold(), people, model=net(batch_norm=False), rounds=4, vmap_clients=width)
        assert replayed(plan, people)[REPLAYED] > 10


NOISE = itertools.count(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noisy(FedAvg):
    """Its steps differ by rounding from call to call, as those of a GPU may; a graph has another rate by a factor."""

    factor: float

    def correct(self, ctx, grads, work, down):
        number = 1 + next(NOISE) % 7 * 1e-8
        if torch.utils._python_dispatch._get_current_dispatch_mode_stack():  # in a capture
            number = self.factor
        return tree_map(lambda g: (g.double() * number).float(), grads)


@pytest.mark.parametrize(("factor", "is_replayed"), [(1.0, True), (1.001, False)])
def test_what_a_noisy_step_changes_is_compared_and_not_its_weights(factor, is_replayed):
    """A step changes weights by a few per cent, and a thousandth of that would be taken for rounding."""
    counts = counts_of(Noisy(factor=factor), rounds=2)
    assert (counts[REPLAYED] > 0) == is_replayed
    assert ("a graph of the step gives other numbers" in counts) != is_replayed


def test_the_number_of_clients_at_once_is_measured_on_replayed_steps(monkeypatch):
    people = blobs()
    plan = blueprint(FedAvg(), people, model=net(batch_norm=False), rounds=2, vmap_clients=4)
    fleet = LocalFleet(plan, people)
    fleet.host.graphs = StepGraphs(taped_graphs.capture)
    made = []

    def noted(capture, enough_steps):
        made.append(StepGraphs(capture, enough_steps))
        return made[-1]

    monkeypatch.setattr(host, "StepGraphs", noted)
    task = fleet.host.ctx.task
    request = Request(moment=Moment("round", 1), cohort=(0,), clients=(0,), vmap_clients=4)
    width = fleet.host.fastest_width(request, {"weights": task.initial_weights()}, {}, {})
    assert 1 <= width <= 4
    (measured,) = made
    assert measured.counts[REPLAYED] > 0
    assert not fleet.host.graphs.counts
    server = Server(plan, people, fleet, Evaluation(points=()))
    list(server.run())
    found = facts(server.state)
    server = Server(plan, people, LocalFleet(plan, people), Evaluation(points=()))
    list(server.run())
    assert facts(server.state) == found
