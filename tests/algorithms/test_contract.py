"""The contract that every algorithm keeps, whatever it computes: pure hooks, determinism, one result at any width,
state that survives a checkpoint, bytes counted as sent, and models that can be scored.

Every entry of ALGORITHMS is tested with its defaults or those of `CASES`, and so are some variants, and a user's own.
"""

import dataclasses
import re
import sys
from typing import Any

import pytest
import torch

from helpers.algorithm_cases import (
    CASES,
    CLIENTS,
    PEOPLE,
    POINTS,
    algorithm_of,
    default_run,
    everything,
    finished,
    people_of,
    plan_of,
    scored_points,
    server_of,
)
from helpers.checkpoints import CheckpointRecorder
from helpers.federations import blobs, blueprint
from helpers.final_weights import assert_as_recorded
from rayfed.algorithm import Algorithm, State
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.optim import SGD, Adam
from rayfed.core.trees import named_tensors
from rayfed.engine.checkpoint import Checkpointer
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.purity import ImpureHook, facts, intercepted, pure
from rayfed.engine.server import Evaluation, Server
from rayfed.experiments.config import build_algorithm
from rayfed.metrics.calibration import Ece
from rayfed.metrics.drift import Drift
from rayfed.metrics.frechet import Frechet
from rayfed.metrics.gradient_norm import GradientNorm

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
MAIN = pytest.mark.parametrize(  # for what depends little on a variant
    "case",
    [pytest.param(case, id=name, marks=() if name in ALGORITHMS else pytest.mark.slow) for name, case in CASES.items()],
)
NAMES = {case: name for name, case in CASES.items()}
ENTRIES = pytest.mark.parametrize("entry", ALGORITHMS)


def assert_finite(server: Server) -> None:
    for path, tensor in named_tensors(everything(server)):
        assert bool(torch.isfinite(tensor.double()).all()), path


@EVERY
def test_hooks_change_nothing_that_they_are_lent(case):
    algorithm = algorithm_of(case)
    people = people_of(algorithm)
    people = dataclasses.replace(people, clients=people.clients[:2])  # inputs are compared around every call
    plan = blueprint(intercepted(algorithm, pure), people, **case.changes)
    plan.check(people)
    server = Server(plan, people, LocalFleet(plan, people), Evaluation(points=tuple(scored_points(case))))
    kinds = {kind: set(vars(kind)) for kind in type(algorithm).__mro__}
    list(server.run())
    assert {kind: set(vars(kind)) for kind in kinds} == kinds  # nothing cached on the class, either


def careless(hook: str) -> type[FedAvg]:
    """FedAvg with one impurity, of the kind that torch's counters of in-place changes do not see."""

    class Careless(FedAvg):
        def aggregate(self, ctx, server, replies):
            if hook == "server":
                server["weights"]["fc.bias"].data.add_(1)
            if hook == "replies":
                replies.mean["weights"]["fc.bias"].data.add_(1)
            if hook == "keys":
                server["more"] = torch.zeros(1)
            return super().aggregate(ctx, server, replies)

        def step(self, ctx, work, down, batch):
            if hook == "batch":
                batch.x.data.mul_(2)
            if hook == "attribute":
                object.__setattr__(self, "seen", True)
            if hook == "template":
                next(ctx.task.model.module.parameters()).data.add_(1)
            return super().step(ctx, work, down, batch)

        def finish(self, ctx, work, client, down, data):
            if hook == "data":
                data.train.y.data.zero_()
            if hook == "down":
                down["weights"]["fc.bias"].data.add_(1)
            return super().finish(ctx, work, client, down, data)

        def start(self, ctx, client, down):
            if hook == "initial":
                ctx.task.initial_weights()["fc.bias"].data.add_(1)
            return super().start(ctx, client, down)

    return Careless


@pytest.mark.parametrize(
    ("hook", "caught"),
    [
        *(("server", "aggregate"), ("replies", "aggregate"), ("keys", "aggregate"), ("batch", "step")),
        *(("attribute", "step"), ("template", "step"), ("data", "finish"), ("down", "finish"), ("initial", "start")),
    ],
)
def test_modified_inputs_are_noticed(hook, caught):
    people = blobs(2)  # its own, since the hook may overwrite the data
    plan = blueprint(intercepted(careless(hook)(), pure), people)
    server = Server(plan, people, LocalFleet(plan, people), Evaluation())
    with pytest.raises(ImpureHook, match=f"^{caught} changed"):
        list(server.run())


# Results


@EVERY
def test_final_weights_are_those_recorded(case):
    assert_as_recorded("cases", NAMES[case], everything(default_run(case).server))


@MAIN
def test_equal_seeds_give_equal_bits_and_others_do_not(case):
    first = default_run(case).server.state_hash()
    again, other = (finished(plan_of(case, seed=seed)).state_hash() for seed in (0, 4))
    assert first == again
    assert first != other


@EVERY
def test_any_width_gives_the_same_result(case):
    alone = everything(default_run(case).server)
    together = everything(finished(plan_of(case, vmap_clients=3)))  # of four clients, a block of three and one alone
    for (path, a), (other, b) in zip(named_tensors(alone), named_tensors(together), strict=True):
        assert (path, a.dtype, a.shape) == (other, b.dtype, b.shape)
        assert bool(torch.isfinite(b.double()).all()), path
        if not case.noisy:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.parametrize(
    ("case", "cohort"),
    [
        pytest.param(case, cohort, id=f"{cohort}-{name}")
        for name, case in CASES.items()
        for cohort in ((2, 4) if case.sampled else (4,))
    ],
)
def test_checkpoints_resume_and_clients_that_are_not_asked_keep_their_state(case, cohort, tmp_path):
    plan = plan_of(case, rounds=4, cohort=cohort)
    server = server_of(plan)
    recorder = CheckpointRecorder(str(tmp_path), "e")
    before = facts(dict(server.fleet.states))
    for record in server.run():
        after = facts(dict(server.fleet.states))
        if record.stage == "round":
            idle = set(before) - set(server.sample(record.round))
            assert all(after[i] == before[i] for i in idle)
        if record.stage == "round" and record.round == 2:
            half = server.state_hash()
            Checkpointer(server, recorder, "t", "configuration", "0").save()
        before = after
    assert_finite(server)
    resumed = server_of(plan)
    Checkpointer(resumed, recorder, "t", "configuration", "0").restore(recorder.saved("t"))
    assert resumed.round == 2
    assert resumed.state_hash() == half != server.state_hash()
    list(resumed.run())
    assert resumed.state_hash() == server.state_hash()


@EVERY
def test_algorithms_that_need_everyone_refuse_cohorts(case):
    plan = plan_of(case, cohort=2)
    if case.sampled:
        plan.check(people_of(plan.algorithm))
    else:
        with pytest.raises(UsageError, match=r"^(cohort=2|algorithm\.name=\w+): "):
            plan.check(PEOPLE)


@EVERY
def test_logged_scalars_are_recorded_after_each_round(case):
    run = default_run(case)
    names = set(run.server.algorithm.logged_scalars)
    for record, scalars in zip(run.records, run.scalars, strict=True):
        scores = [s for s in record.scores if s.client == -1 and s.metric in names]
        assert {s.metric for s in scores} == (names if record.stage == "round" else set())
        where = (-1, "", "train", "global", sum(run.server.examples))
        assert all((s.client, s.domain, s.split, s.point, s.n) == where for s in scores)
        assert all(s.value == scalars[s.metric] for s in scores)


@EVERY
@pytest.mark.parametrize("width", [1, 3])
def test_bytes_counted_are_bytes_sent(case, width):
    up: dict[str, int] = {}
    down: dict[str, int] = {}

    def count(total: dict[str, int], payload: State, times: int = 1) -> None:
        for field, tree in payload.items():
            size = sum(t.numel() * t.element_size() for _, t in named_tensors(tree))
            if size:
                total[field] = total.get(field, 0) + size * times

    def spy(name: str, hook: Any, self: Algorithm, *args: Any, **kwargs: Any) -> Any:
        result = hook(self, *args, **kwargs)
        if name == "finish":
            count(up, result[1])
        if name == "broadcast":
            count(down, result, len(args[0].cohort))
        if name == "unicast":
            count(down, result)
        return result

    algorithm = algorithm_of(case)
    changes = {"cohort": 2} if case.sampled else {}
    plan = plan_of(case, algorithm=intercepted(algorithm, spy), vmap_clients=width, rounds=3, **changes)
    records = []
    for record in server_of(plan).run():
        assert record.bytes_up == up
        assert record.bytes_down == down
        records.append(dict(up))
        up.clear()
        down.clear()
    assert any(records) == (algorithm.name != "solo")


@EVERY
def test_every_point_can_be_scored(case):
    algorithm, points = algorithm_of(case), scored_points(case)
    shapes = set()

    def spy(name: str, hook: Any, self: Algorithm, *args: Any, **kwargs: Any) -> Any:
        result = hook(self, *args, **kwargs)
        if name == "predict":
            shapes.add((result.shape[0] == len(args[2]), tuple(result.shape[1:]), result.requires_grad))
        return result

    record = list(server_of(plan_of(case, algorithm=intercepted(algorithm, spy)), points=points).run())[-1]
    if record.stage == "final":  # scores what is downloaded after it; the last round has the rest
        points = [point for point in points if point != "trained"]
    assert shapes == {(True, (3,), False)}
    found = {(s.point, s.client, s.split, s.metric): s for s in record.scores if s.split != "train"}
    wanted = {
        (p, i, split, m) for p in points for i in CLIENTS for split in ("val", "test") for m in ("accuracy", "loss")
    }
    assert set(found) == wanted
    assert all(0 <= s.value <= 1 for s in found.values() if s.metric == "accuracy")
    assert all(0 <= s.value < 100 for s in found.values())
    assert algorithm.default_eval_point in POINTS
    if not case.changes.get("batch_norm"):  # a policy may take the global model away
        assert algorithm.default_eval_point in scored_points(case)


@MAIN
@pytest.mark.parametrize(
    ("optimizer", "width"),
    [
        (SGD(lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True), 1),
        (Adam(lr=0.005, weight_decay=0.01), 4),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_momentum_and_adam_work(case, optimizer, width):
    server = server_of(plan_of(case, optimizer=optimizer, vmap_clients=width))
    start = server.state_hash()
    list(server.run())
    assert_finite(server)
    assert server.state_hash() != start


# Metrics


@MAIN
def test_every_kind_of_metric_can_be_taken_and_changes_nothing(case):
    """Of predictions and representations at every point, of training, and of gradients at global weights."""
    points = scored_points(case)
    metrics = {"ece": Ece(), "frechet": Frechet(layers=["features", "logits"]), "drift": Drift()}
    plan = plan_of(case)
    _, whole = plan.global_model(people_of(plan.algorithm))
    if whole:
        metrics["gradient_norm"] = GradientNorm(splits=["val"])
    server = server_of(plan, points, metrics=metrics, every=2)
    found = {(score.point, score.metric) for record in server.run() for score in record.scores}
    of_models = ("ece", "frechet", "frechet_mean", "frechet@logits", "frechet_mean@logits")
    wanted = {(p, metric) for p in points for metric in of_models} | {("trained", "drift")}
    if whole:
        wanted |= {("global", "gradient_norm"), ("global", "gradient_norm_mean")}
    assert wanted <= found
    assert server.state_hash() == default_run(case).server.state_hash()


# Newcomers


@MAIN
def test_unseens_change_nothing_and_are_scored_in_the_end(case):
    """One client more that takes no part: training ends with the same bits as without it; then it joins."""
    algorithm = algorithm_of(case)
    people = people_of(algorithm)
    fewer = dataclasses.replace(people, clients=people.clients[:3])
    plan = blueprint(algorithm, fewer, **case.changes)
    with_one = dataclasses.replace(people, unseen_clients=1)
    if algorithm.refuses_unseen_clients:
        with pytest.raises(
            UsageError, match=rf"^unseen_clients=1: algorithm\.name={algorithm.name} .*; use unseen_clients=0$"
        ):
            plan.check(with_one)
        return
    plan.check(with_one)
    servers, last = [], []
    for population in (fewer, with_one):
        server = Server(plan, population, LocalFleet(plan, population), Evaluation(points=("downloaded",)))
        servers.append(server)
        last.append(list(server.run())[-1].scores)
    states = [server.fleet.states for server in servers]
    joined = {3} if servers[1].algorithm.setup_exchanges else set()  # a state comes with the first exchange
    assert set(states[1]) == {*states[0], *joined}
    assert facts([servers[1].state, {i: states[1][i] for i in states[0]}]) == facts([servers[0].state, dict(states[0])])
    assert [score for score in last[1] if not score.unseen] == last[0]
    found = {(s.client, s.point, s.split, s.metric): s.value for s in last[1] if s.unseen}
    pairs = [(p, split) for p in ("downloaded", "adapted") for split in ("val", "test")]
    assert set(found) == {(3, p, split, m) for p, split in pairs for m in ("accuracy", "loss")}
    adapted = found[3, "adapted", "test", "loss"]
    assert 0 <= adapted < 100
    assert adapted != found[3, "downloaded", "test", "loss"]


# What is said


@ENTRIES
def test_every_algorithm_says_what_it_is(entry):
    kind = type(build_algorithm({"name": entry}, where="algorithm"))
    assert kind.name == entry
    assert kind.reference
    text = sys.modules[kind.__module__].__doc__ or ""
    assert re.search(r"\b20[12]\d\b", text), "the module's text names the paper with its year"
    assert len(text.splitlines()) > 3
    assert kind.__dataclass_params__.frozen
    for field in dataclasses.fields(kind):
        assert field.kw_only, field.name
        assert len(field.metadata.get("help", "")) > 3 or not field.init, field.name


def test_no_two_entries_are_one_class():
    assert len(set(ALGORITHMS.values())) == len(ALGORITHMS)
