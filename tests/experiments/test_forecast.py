"""`--dry-run`: what would run, what it needs and how long it takes; nothing is written."""

import re

import pytest
import torch

from helpers.commands import TWO_CLIENTS, command
from rayfed.experiments.config import Config
from rayfed.experiments.forecast import Probe, estimate, probe
from rayfed.experiments.plan import make_plan

QUICK = TWO_CLIENTS | {"partition.validation": 0, "evaluate.splits": ["test"]}


def plan(**changes):
    return make_plan(Config.read(QUICK, changes))


class TestEstimate:
    """48 training and 12 test examples in each of two clients: 6 batches in an epoch."""

    measured = Probe(step=0.1, score=0.01)

    def test_steps_rounds_and_scores_add_up(self):
        found = estimate(plan(rounds=5, **{"local.epochs": 2, "evaluate.every": 2}), self.measured)
        assert found.round == pytest.approx(2 * 12 * 0.1)
        assert found.scores == pytest.approx(24 * 0.01)
        assert found.total == pytest.approx(5 * found.round + 3 * found.scores)  # after rounds 2, 4 and 5
        found = estimate(plan(cohort=1), self.measured)  # all are scored
        assert (found.round, found.scores) == (pytest.approx(0.6), pytest.approx(0.24))

    def test_hosts_share_the_work_unless_they_share_a_gpu(self):
        places = ({"hosts": 1}, {"hosts": 2}, {"hosts": 2, "gpus": 0.25}, {"hosts": 4, "gpus": 0.5})
        totals = [estimate(plan(placement=place), self.measured).total for place in places]
        assert totals == pytest.approx([totals[0], totals[0] / 2, totals[0], totals[0] / 2])


class TestProbe:
    def test_runs_a_few_steps_and_writes_nothing(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        torch.manual_seed(5)
        state = torch.get_rng_state()
        measured = probe(plan(rounds=1000, **{"local.epochs": 50}))
        assert 0 < measured.step < 1
        assert 0 < measured.score < 1
        assert torch.equal(torch.get_rng_state(), state)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("rule", ["mean", "krum", "bulyan"])
    def test_two_clients_stand_for_a_cohort_with_attackers_and_a_robust_rule(self, rule):
        attacked = {"attack": {"name": "alie", "clients": [5, 7]}, "robust.name": rule}
        twelve = {"partition.name": "iid", "partition.clients": 12}
        assert probe(plan(**twelve, **attacked)).step > 0

    def test_two_clients_stand_for_a_poisson_cohort(self):
        sampled = {"sampling.name": "poisson", "cohort_share": 0.5, "algorithm.weighting": "equal"}
        ten = {"partition.name": "iid", "partition.clients": 10}
        assert probe(plan(**ten, **sampled, **{"privacy.sigma": 1, "privacy.delta": 0.01})).step > 0


SPACE = """
seeds: [0, 1]
rounds: 3
data: {domains: [plain, font], per_domain: 60}
model: {name: mlp, hidden: [8]}
local: {batch_size: 8}
arms:
  - algorithm.name: fedavg
  - algorithm.name: fedprox
    algorithm.mu: {grid: [0.1, 1]}
"""


class TestCommands:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        (tmp_path / "space.yaml").write_text(SPACE)
        self.folder = tmp_path

    def test_run(self, capsys):
        assert command("run")(["--dry-run", "data.per_domain=60", "model.name=mlp", "rounds=50"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "     model  mlp, " in out
        assert "     needs  1 CPU (this process)\n" in out
        assert re.search(r"  estimate  about \d.* per round, .* for scores\), without metrics.*, from a probe of", out)
        assert [path.name for path in self.folder.iterdir()] == ["space.yaml"]

    def test_sweep(self, capsys, monkeypatch):
        assert command("sweep")(["--dry-run", "space.yaml"]) == 0
        out = capsys.readouterr().out
        rows = [line.split() for line in out.splitlines() if line.startswith("fed")]
        assert [row[:2] for row in rows] == [["fedavg", "2"], ["fedprox", "4"]]
        assert re.search(r"^6 trials to run, \d+ at once: about ", out, re.MULTILINE)
        assert [path.name for path in self.folder.iterdir()] == ["space.yaml"]
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # a cluster that is not joined
        assert command("sweep")(["--dry-run", "space.yaml"]) == 0
        assert "\n6 trials to run, one after another at most " in capsys.readouterr().out

    def test_a_sweep_that_goes_on_counts_what_is_left(self, capsys):
        sweep = ["space.yaml", "search.max_concurrent=1", "checkpoint.every=1", "seeds=[0]"]
        assert command("sweep")(sweep) == 0
        capsys.readouterr()
        assert command("sweep")(["--dry-run", *sweep, "seeds=[0,1]", "resume=true"]) == 0
        assert "\n3 trials to run, 1 at once: about " in capsys.readouterr().out
