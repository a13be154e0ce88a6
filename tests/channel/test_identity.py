"""A channel that changes nothing changes no bit, for every method, and which methods take which part."""

import functools
import math
from typing import Any

import pytest

from helpers.algorithm_cases import CASES, algorithm_of, default_run, everything, people_of, plan_of
from helpers.federations import new_server
from helpers.final_weights import values_hash
from helpers.slow import slow_but
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.common.channelled import Channelled
from rayfed.channel.attacks import Alie, LabelFlip, SignFlip
from rayfed.channel.channel import Channel
from rayfed.channel.compression import TopK
from rayfed.channel.privacy import Gaussian
from rayfed.channel.robust import Mean
from rayfed.experiments.channel_notes import channel_notes
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan

NAMES = [name for name in CASES if name in ALGORITHMS]
UNCHANGED: dict[str, dict[str, Any]] = {
    "privacy": {"privacy": Gaussian(sigma=0.0, clip=math.inf)},
    "compression": {"compression": TopK(share=1.0)},
    "attack": {"attack": Alie(share=0.0), "rule": Mean()},
    "own attack": {"attack": SignFlip(share=0.0)},
    "poisoning": {"attack": LabelFlip(share=0.0)},
}
UNCHANGED["all"] = UNCHANGED["privacy"] | UNCHANGED["compression"] | UNCHANGED["attack"]


@functools.cache
def expected(name):
    return values_hash(everything(default_run(CASES[name]).server))


@pytest.mark.parametrize("parts", slow_but(["all", "poisoning"], UNCHANGED))
@pytest.mark.parametrize("name", NAMES)
def test_a_channel_that_changes_nothing_changes_no_bit(name, parts):
    case = CASES[name]
    method = algorithm_of(case)
    channel = Channel(**parts, exchanges=len(method.round_exchanges))
    plan = plan_of(case, algorithm=Channelled(base=method, channel=channel))
    server = new_server(plan, people_of(method), points=())  # unchecked: this privacy refuses most methods
    for _ in server.run():
        pass
    assert values_hash(everything(server)) == expected(name)


@pytest.mark.parametrize("name", ["dp_fedbn", "gaussian_dp_fedbn"])
def test_a_method_with_a_channel_of_its_own_is_checked_by_itself(name):
    weighting = {"algorithm.weighting": "examples"} if name == "dp_fedbn" else {}
    given = {"algorithm.name": name, "model": {"name": "mlp", "hidden": [4], "batch_norm": True}, **weighting}
    plan = make_plan(Config.read(given, {"data": {"per_domain": 20, "domains": ["plain", "font"]}}))
    assert list(channel_notes(Trial(plan.blueprint, plan.population))) == []
