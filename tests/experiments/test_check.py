"""`rayfed check` passes what keeps the contract, and finds what breaks it."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import rayfed
from rayfed.algorithms.common.soft_labels import one_hot
from rayfed.algorithms.fedavg import FedAvg
from rayfed.cli.main import main
from rayfed.core.options import option
from rayfed.core.trees import scale
from rayfed.experiments.contract import CHECKS
from rayfed.experiments.contract_tasks import TASKS

SMALL = {"data.per_domain": 60, "model.name": "mlp", "model.hidden": [8], "model.batch_norm": True, "rounds": 2}


def broken(algorithm: str, **options: Any) -> dict[str, str]:
    """Return the parts of the contract that an algorithm of this module breaks, and what was found."""
    found = rayfed.check(SMALL, algorithm={"name": f"{__name__}:{algorithm}", **options})
    assert [finding.subject for finding in found] == list(CHECKS)
    return {finding.subject: finding.found for finding in found if not finding.kept}


@dataclass(frozen=True, kw_only=True)
class Kind(FedAvg):
    """Keeps the contract."""

    name = "kind"
    pull: float = option(0.5, low=0, help="towards zero")

    def correct(self, ctx, grads, work, down):
        return {name: grad + self.pull * work["weights"][name] for name, grad in grads.items()}


class Zeroes(FedAvg):
    def finish(self, ctx, work, client, down, data):
        data.train.y.data.zero_()  # which torch's counters of changes do not see
        return super().finish(ctx, work, client, down, data)


ROUNDS: list[int] = []


class Counts(FedAvg):
    """Keeps a state of its own, which another process or a resumed run does not have."""

    def aggregate(self, ctx, server, replies):
        ROUNDS.append(1)
        return server | {"weights": scale(replies.mean["weights"], 1 + 0.1 * (len(ROUNDS) % 7))}


class Branches(FedAvg):
    """Looks at a value, which torch.vmap cannot."""

    def loss(self, ctx, weights, work, down, batch):
        value, output = super().loss(ctx, weights, work, down, batch)
        return (value * 2 if value > 1e9 else value), output


class Halves(FedAvg):
    def predict(self, ctx, model, x):
        return super().predict(ctx, model, x)[: len(x) // 2]


class ReadsClient(FedAvg):
    """Makes a weight of client 1 larger by 0.04, though in a step of several clients `ctx` has no client."""

    def step(self, ctx, work, down, batch):
        work, metrics = super().step(ctx, work, down, batch)
        if ctx.client == 1 and ctx.round == 2 and ctx.step == 0:
            name = ctx.task.trainable[-1]
            weight = work["weights"][name].clone()
            weight.view(-1)[0] += 0.04
            work["weights"] = work["weights"] | {name: weight}
        return work, metrics


class Noisy(FedAvg):
    """Draws noise of 0.04 in `step`, which differs between clients trained at once and alone."""

    def correct(self, ctx, grads, work, down):
        return {name: grad + 0.04 * torch.randn_like(grad) for name, grad in grads.items()}


class Misspelt(FedAvg):
    traits = replace(FedAvg.traits, default_eval_point="train")


class AnyArguments(FedAvg):
    def predict(self, *args):
        return super().predict(*args)


class Explodes(FedAvg):
    def aggregate(self, ctx, server, replies):
        return super().aggregate(ctx, server, replies.median)


class OneHot(FedAvg):
    """Takes it for granted that labels are [n]."""

    def loss(self, ctx, weights, work, down, batch):
        value, output = super().loss(ctx, weights, work, down, batch)
        return value + (output.logits.softmax(1) - one_hot(batch.y, output.logits.shape[1])).square().mean(), output


def test_an_algorithm_of_a_user_that_keeps_it():
    assert broken("Kind", pull=0.1) == broken("AnyArguments") == {}


@pytest.mark.parametrize(
    ("algorithm", "subjects", "words"),
    [
        ("Zeroes", {"hooks", "seeds"}, "finish changed `ctx` and `data`; other clients and rounds share it"),
        ("Counts", {"seeds", "resume"}, "two runs with the same seed end with different bits"),
        ("Branches", {"at once"}, "data-dependent control flow"),
        ("ReadsClient", {"at once"}, "end with another server.weights than when trained alone"),
        ("Halves", {"hooks"}, "predict returned 8 rows for 16 inputs"),
        ("Misspelt", {"hooks"}, "default_eval_point is train; known: global, downloaded, trained, adapted"),
        ("OneHot", {"pixels", "next words"}, "must match the size of tensor b"),
        ("Explodes", {"hooks", "seeds", "resume", "at once"}, "test_check.py, line "),
    ],
)
def test_what_breaks_it_is_found(algorithm, subjects, words):
    found = broken(algorithm)
    assert subjects <= set(found)
    assert any(words in text for text in found.values()), found
    if algorithm in ("Zeroes", "Branches", "ReadsClient", "OneHot"):
        assert set(found) == subjects | ({*TASKS} if algorithm == "Zeroes" else set())


def test_numbers_drawn_in_step_may_differ_between_clients_at_once_and_alone():
    found = {finding.subject: finding for finding in rayfed.check(SMALL, algorithm={"name": f"{__name__}:Noisy"})}
    assert found["at once"].kept
    assert "`step` draws random numbers" in found["at once"].found


def test_nothing_is_kept_and_random_numbers_go_on(here):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    rayfed.check(SMALL, algorithm={"name": "fedavg"})
    assert list(here.iterdir()) == []
    assert torch.equal(torch.rand(2), expected)


def test_the_command(capsys):
    keys = [f"{key}={value}" for key, value in SMALL.items()]
    assert main(["check", *keys, "algorithm.name=fedprox", "algorithm.mu=0.1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ok       hooks       no hook modified its inputs; scored as global, downloaded, trained, ")
    assert out.splitlines()[-1] == "the contract is kept"
    assert main(["check", *keys, f"algorithm.name={__name__}:Branches"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN   at once     " in out
    assert out.splitlines()[-1] == "the contract is broken in 1 part"
    assert main(["check", *keys, "cohort=100000"]) == 2
    assert capsys.readouterr().err.startswith("rayfed: cohort=100000: there are ")


@pytest.mark.slow
@pytest.mark.ray
def test_hosts_are_compared_with_this_process():
    found = rayfed.check({**SMALL, "placement.hosts": 2, "placement.cpus": 0.5}, algorithm={"name": "scaffold"})
    assert found[-1].subject == "hosts"
    assert found[-1].kept
    assert found[-1].found == "with 2 hosts on Ray, it ends with the same bits as in this process"
