"""The contract that every algorithm keeps, whatever it computes: pure hooks, determinism, one result at any width,
state that survives a checkpoint, bytes counted as sent, and models that can be scored.

Every entry of ALGORITHMS is tested with its defaults or those of `CASES`, and so are some variants, and a user's own.
"""

import dataclasses
import functools
import re
import sys
from typing import Any

import pytest

from helpers.algorithm_cases import (
    CASES,
    MAIN_CASES,
    PEOPLE,
    algorithm_of,
    build_algorithm,
    default_run,
    everything,
    people_of,
    plan_of,
    scored_points,
    server_of,
)
from helpers.final_weights import assert_as_recorded
from rayfed.algorithm import Algorithm, State
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.common.wrapper import innermost
from rayfed.core.errors import UsageError
from rayfed.core.trees import named_tensors
from rayfed.engine.purity import intercepted
from rayfed.experiments.checks import check_trial
from rayfed.experiments.components import choose
from rayfed.experiments.config import Config
from rayfed.experiments.contract import findings
from rayfed.experiments.plan import make_plan
from rayfed.metrics.heterogeneity import Drift, GradientNorm
from rayfed.metrics.predictions import Ece
from rayfed.metrics.representations import Frechet

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
NAMES = {case: name for name, case in CASES.items()}
ENTRIES = pytest.mark.parametrize("entry", ALGORITHMS)


@MAIN_CASES
@pytest.mark.usefixtures("few_orders")
def test_rayfed_check_finds_nothing(case, here):
    algorithm = algorithm_of(case)
    plan = dataclasses.replace(small_plan(), blueprint=plan_of(case), population=people_of(algorithm))
    if isinstance(case.options, dict):
        chosen = choose("algorithm", case.options, None)
        plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, chosen_algorithm=chosen))
    found = {finding.subject: finding for finding in findings(plan, launch=lambda small: "")}
    broken = {subject: finding.found for subject, finding in found.items() if not finding.kept}
    assert broken == {}
    refused = {subject for subject, finding in found.items() if finding.found.startswith("refused: ")}
    of_classes = algorithm.traits.requires_classes or innermost(algorithm).name in ("moon", "fedproto")
    assert refused - {"at once"} == {
        *(("pixels",) if of_classes else ()),
        *(("next words",) if of_classes or algorithm.traits.computes_with_inputs else ()),
        *(("two inputs",) if algorithm.traits.computes_with_inputs else ()),
        *(() if case.sampled else ("cohorts",)),
        *(("newcomers",) if algorithm.traits.refuses_unseen_clients else ()),
    }
    assert case.noisy or "at once" in refused or found["at once"].found.endswith("end as when trained alone")


@functools.cache
def small_plan():
    return make_plan(Config.read({"data.name": "mini_digits", "model.name": "mlp"}))


# Results


@EVERY
def test_final_weights_are_those_recorded(case):
    assert_as_recorded("cases", NAMES[case], everything(default_run(case).server))


@EVERY
def test_algorithms_that_need_everyone_refuse_cohorts(case):
    plan = plan_of(case, cohort=2)
    if case.sampled:
        check_trial(plan, people_of(plan.algorithm))
    else:
        with pytest.raises(UsageError, match=r"^(cohort=2|algorithm\.name=\w+): "):
            check_trial(plan, PEOPLE)


@EVERY
def test_logged_scalars_are_recorded_after_each_round(case):
    run = default_run(case)
    names = set(run.server.algorithm.traits.logged_scalars)
    for record, scalars in zip(run.records, run.scalars, strict=True):
        scores = [s for s in record.scores if s.client == -1 and s.metric in names]
        assert {s.metric for s in scores} == (names if record.stage == "round" else set())
        where = (-1, "", "train", "global", sum(run.server.examples))
        assert all((s.client, s.domain, s.split, s.point, s.n) == where for s in scores)
        assert all(s.value == scalars[s.metric] for s in scores)


@MAIN_CASES
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


# Metrics


@MAIN_CASES
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


# What is said


@ENTRIES
def test_every_algorithm_says_what_it_is(entry):
    kind = type(build_algorithm({"name": entry}))
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
