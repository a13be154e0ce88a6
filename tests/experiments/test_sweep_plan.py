"""The plan of a sweep, made without Ray: which trials run, what is printed before, and what is refused."""

import pytest
import torch

import rayfed
from helpers.commands import TWO_CLIENTS
from rayfed.core.errors import UsageError
from rayfed.experiments import sweep as module
from rayfed.experiments.space import configurations, read_space
from rayfed.experiments.sweep import plan_sweep

SPACE = TWO_CLIENTS | {
    "rounds": 1,
    "seeds": [0, 1],
    "arms": [{"algorithm.name": "fedavg"}, {"algorithm.name": "fedprox", "algorithm.mu": {"grid": [0.1, 1]}}],
}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def plan(**changes):
        space = read_space(SPACE, changes)
        return plan_sweep(space, configurations(space))

    return plan


def test_a_resumed_sweep_leaves_out_what_is_done(plan):
    first = plan().jobs[0]
    rayfed.run(first["config"])
    assert len(plan().jobs) == 6
    sweep = plan(resume=True)
    assert first["trial"] not in {job["trial"] for job in sweep.jobs}
    assert sweep.summary().splitlines()[0].endswith("; each with 2 seeds; 1 already done")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": [{}, {}]}, "arms: two trials have the same configuration"),
        ({"arms": [{"experiment": "a"}, {"experiment": "b"}]}, "experiment: all arms"),
        ({"arms": [{"results": "a"}, {"results": "b", "rounds": 2}]}, "results: all arms"),
        ({"search.scheduler": "asha", "partition.validation": 0}, "search.scheduler=asha: needs validation"),
    ],
)
def test_refuses_what_cannot_work(plan, changes, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        plan(**changes)


class TestKinds:
    """Configurations that differ in rates alone are planned once."""

    ARMS = (
        {"algorithm.name": "fedprox", "algorithm.mu": {"grid": [0, 0.1, 1]}, "local.lr": {"grid": [0.01, 0.1]}},
        {
            "algorithm.name": "dp_fedbn",
            "algorithm.epsilon": {"grid": [1, 8]},
            "model.batch_norm": True,
        },  # its notes name ε
        {"algorithm.name": "fedavg", "local.batch_size": {"grid": [4, 5000]}},
    )

    def test_what_is_said_is_as_if_each_was_planned(self, plan, monkeypatch):
        by_kind = plan(arms=self.ARMS)
        monkeypatch.setattr(module, "plan_kind", repr)
        each = plan(arms=self.ARMS)
        assert by_kind.notes == each.notes
        assert by_kind.jobs == each.jobs
        assert "ε" in "".join(each.notes)
