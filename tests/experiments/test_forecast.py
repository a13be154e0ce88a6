"""`--dry-run`: what would run, what it needs and how long it takes; nothing is written."""

import re

import pytest
import torch

import rayfed
from helpers.commands import command
from rayfed.experiments.capacity import at_once
from rayfed.experiments.config import Config
from rayfed.experiments.forecast import Probe, estimate, probe, unmeasured
from rayfed.experiments.plan import make_plan
from rayfed.experiments.sources import from_arguments

QUICK = {
    "data": {"domains": ["plain", "font"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"batch_size": 8, "lr": 0.1},
    "partition.validation": 0,
    "evaluate.splits": ["test"],
}


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

    def test_rounds_that_are_done_do_not_count(self):
        whole = plan(rounds=5, algorithm={"name": "fedbabu"}, **{"evaluate.every": 2})
        found, left = estimate(whole, self.measured), estimate(whole, self.measured, done=3)
        assert found.total - left.total == pytest.approx(3 * found.round + found.scores)  # after round 2
        assert estimate(whole, self.measured, done=5).total > 0  # the fine-tuning after the last round

    def test_hosts_share_the_work(self):
        one, two = (estimate(plan(**{"placement.hosts": hosts}), self.measured) for hosts in (1, 2))
        assert two.total == pytest.approx(one.total / 2)

    def test_hosts_on_one_gpu_are_one(self, monkeypatch):
        monkeypatch.setattr("rayfed.experiments.capacity.known_nodes", lambda: [{"CPU": 8.0, "GPU": 2.0}])
        shared = [plan(**{"placement.hosts": hosts, "placement.gpus": 0.25}) for hosts in (1, 2, 6)]
        assert [at_once(one.config) for one in shared] == [1, 2, 2]
        alone, on_two, crowded = (estimate(one, self.measured) for one in shared)
        assert on_two.scores == crowded.scores == pytest.approx(alone.scores / 2)

    def test_a_cohort_trains_and_everyone_is_scored(self):
        found = estimate(plan(cohort=1), self.measured)
        assert (found.round, found.scores) == (pytest.approx(0.6), pytest.approx(0.24))

    def test_exchanges_of_an_algorithm_count(self):
        """Ditto trains a second model with as many steps; FedBABU fine-tunes after the last round."""
        plain = estimate(plan(rounds=2), self.measured)
        assert estimate(plan(rounds=2, algorithm={"name": "fedbabu"}), self.measured).total > plain.total


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

    def test_the_steps_of_a_round_that_is_cut_are_counted(self, monkeypatch):
        """A step takes about as long, whether a round has many or few of them."""
        steps = [probe(plan(**{"local.steps": steps})).step for steps in (2, 1000)]
        assert 0.1 < steps[0] / steps[1] < 10

    def test_metrics_of_representations_are_left_out(self):
        planned = plan(metrics={"tsne": True, "ece": True, "gradient_norm": True})
        assert unmeasured(planned) == ["tsne", "gradient_norm"]
        assert probe(planned).score > 0

    @pytest.mark.parametrize("name", ["adcol", "apple", "solo", "scaffold", "dbe", "harmofl"])
    def test_methods_with_states_and_networks_of_their_own(self, name):
        assert probe(plan(algorithm={"name": name}, model={"name": "mlp", "hidden": [8]})).step > 0


SMALL_RUN = ("data={domains: [plain, font], per_domain: 60}", "model={name: mlp, hidden: [8]}")

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
        assert re.search(r"  estimate  about \d.* per round, .* for scores\), from a probe of two clients", out)
        assert [path.name for path in self.folder.iterdir()] == ["space.yaml"]

    def test_a_run_on_gpus_shows_which_process_is_where(self, capsys, monkeypatch):
        for module in ("capacity", "forecast"):
            monkeypatch.setattr(f"rayfed.experiments.{module}.known_nodes", lambda: [{"CPU": 8.0, "GPU": 2.0}])
        monkeypatch.setattr("rayfed.experiments.forecast.device_for", lambda gpus, model: torch.device("cpu"))
        arguments = ["placement.hosts=2", "placement.gpus=1", "algorithm.name=adcol"]
        assert command("run")(["--dry-run", *SMALL_RUN, *arguments]) == 0
        assert "      GPUs  0: server, host 0; 1: host 1\n" in capsys.readouterr().out

    def test_sweep(self, capsys):
        assert command("sweep")(["--dry-run", "space.yaml"]) == 0
        out = capsys.readouterr().out
        rows = [line.split() for line in out.splitlines() if line.startswith("fed")]
        assert [row[0] for row in rows] == ["fedavg", "fedprox", "fedprox"]
        assert [row[1] for row in rows] == ["2", "mu=0.1", "mu=1.0"]
        assert re.search(r"^6 trials to run, \d+ at once: about ", out, re.MULTILINE)
        assert [path.name for path in self.folder.iterdir()] == ["space.yaml"]

    def test_a_cluster_that_is_not_joined_may_run_several_at_once(self, capsys, monkeypatch):
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        words = "one after another, or as many at once as the running cluster has room for: at most "
        for limit, said in (("4", words), ("1", "1 at once: about ")):
            assert command("sweep")(["--dry-run", "space.yaml", f"search.max_concurrent={limit}"]) == 0
            assert f"\n6 trials to run, {said}" in capsys.readouterr().out

    def said(self, capsys, *arguments):
        """What a dry run with resume=true says; it writes nothing."""
        before = {path: path.stat().st_mtime_ns for path in self.folder.rglob("*")}
        assert command("run")(["--dry-run", "resume=true", *SMALL_RUN, *arguments]) == 0
        assert {path: path.stat().st_mtime_ns for path in self.folder.rglob("*")} == before
        lines = capsys.readouterr().out.splitlines()
        return [line.split("  ")[-1] for line in lines if line.startswith(("    resume", "  estimate"))]

    def test_a_run_that_goes_on_counts_what_is_left(self, capsys):
        command("run")([*SMALL_RUN, "checkpoint.every=1", "rounds=2"])
        capsys.readouterr()
        resume, time = self.said(capsys, "rounds=5")
        assert resume == "continues after round 2"
        assert " for 3 rounds more (" in time
        assert self.said(capsys, "rounds=2") == ["already finished: nothing to do"]
        assert self.said(capsys, "rounds=5", "seed=1")[0] == "nothing saved: starts at round 1"

    def test_a_trial_continues_after_its_own_checkpoint(self, capsys):
        rayfed.run(from_arguments([*SMALL_RUN, "checkpoint.every=2", "rounds=3"]))
        manifest = sorted((self.folder / "results").rglob("manifest-*.json"))[-1]
        manifest.unlink()  # that of the last round
        capsys.readouterr()
        resume, time = self.said(capsys, "checkpoint.every=2", "rounds=3")
        assert resume == "continues after round 2"
        assert " for 1 round more (" in time

    def test_a_sweep_that_goes_on_counts_what_is_left(self, capsys):
        sweep = ["space.yaml", "search.max_concurrent=1", "checkpoint.every=1", "seeds=[0]"]
        assert command("sweep")(sweep) == 0
        capsys.readouterr()
        assert command("sweep")(["--dry-run", *sweep, "seeds=[0,1]", "resume=true"]) == 0
        assert "\n3 trials to run, 1 at once: about " in capsys.readouterr().out

    def test_metrics_that_are_left_out_are_named(self, capsys):
        assert command("run")(["--dry-run", *SMALL_RUN, "metrics.mdl=true"]) == 0
        assert "from a probe of two clients, without metrics.mdl\n" in capsys.readouterr().out

    def test_what_cannot_be_probed_is_said(self, capsys, monkeypatch):
        def failing(*given):
            raise RuntimeError("two clients are not enough\nfor me")

        monkeypatch.setattr("rayfed.experiments.forecast.probe", failing)
        assert command("run")(["--dry-run", "data.per_domain=60", "model.name=mlp"]) == 0
        assert "estimate  unknown (RuntimeError: two clients are not enough)" in capsys.readouterr().out
