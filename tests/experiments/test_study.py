"""Search with Optuna: budgets, what is optimised, seeds, failures, resuming, and refusals."""

import math
from collections import Counter

import pandas as pd
import pytest

import rayfed
from rayfed.core.best_round import Selection
from rayfed.core.errors import UsageError
from rayfed.experiments import study as module
from rayfed.experiments.space import configurations, read_space
from rayfed.experiments.study import Study, check_search
from rayfed.experiments.sweep import plan_sweep
from rayfed.records.storage import open_storage
from rayfed.records.validation import best_validation

QUICK = {
    "data": {"domains": ["plain", "font"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"batch_size": 8, "lr": {"loguniform": [1e-4, 1.0]}},
    "rounds": 2,
    "seeds": [0, 1],
    "search": {"kind": "optuna", "samples": 3, "max_concurrent": 1},
    "arms": [{"algorithm.name": "fedavg"}, {"algorithm.name": "fedprox", "algorithm.mu": {"choice": [0.01, 0.1]}}],
}


def space(**changes):
    return read_space(QUICK, changes)


def goodness(config):
    """The best rate is 0.03; one seed is worse than the other by a constant."""
    return 1 - math.log10(config.local.lr / 0.03) ** 2 - config.seed / 10


def searched(study, stop_after=None):
    """Run a study to its end, or for a number of trials, and return the jobs."""
    jobs = []
    while (stop_after is None or len(jobs) < stop_after) and (job := study.next_job()) is not None:
        jobs.append(job)
        study.ended(job["trial"], goodness(job["config"]))
    return jobs


def choices(jobs):
    return [(job["config"].algorithm, job["config"].local.lr, job["config"].seed) for job in jobs]


@pytest.fixture
def study(tmp_path):
    pytest.importorskip("optuna")
    return lambda resume=False, **changes: Study(space(**changes), open_storage(tmp_path), resume=resume)


class TestStudy:
    def test_every_arm_has_the_same_budget_with_every_seed(self, study):
        jobs = searched(study())
        assert Counter((job["config"].algorithm_name, job["config"].seed) for job in jobs) == {
            ("fedavg", 0): 3,
            ("fedavg", 1): 3,
            ("fedprox", 0): 3,
            ("fedprox", 1): 3,
        }
        assert len({job["trial"] for job in jobs}) == 12

    def test_the_search_follows_its_seed(self, study):
        first, again, other = (choices(searched(study(**{"search.seed": seed}))) for seed in (0, 0, 1))
        assert first == again
        assert first != other

    def test_optuna_is_told_means_over_seeds(self, study):
        made = study()
        searched(made)
        for trial in made._studies[0].trials:
            rate = trial.params["local.lr"]
            assert trial.value == pytest.approx(1 - math.log10(rate / 0.03) ** 2 - 0.05)

    def test_it_searches_where_scores_are_good(self, study):
        """Of 30 configurations, the first ten are random. Over five searches, the last ten are nearer to the best."""
        first = last = 0.0
        for seed in range(5):
            made = study(**{"search.samples": 30, "search.seed": seed, "seeds": [0], "arms": [{}]})
            distances = [abs(math.log10(job["config"].local.lr / 0.03)) for job in searched(made)]
            first, last = first + sum(distances[:10]), last + sum(distances[-10:])
        assert last < 0.7 * first

    def test_a_failed_trial_fails_its_configuration(self, study):
        made = study()
        first, second = made.next_job(), made.next_job()
        made.ended(first["trial"], 0.5)
        made.ended(second["trial"])  # no score anywhere
        assert made._studies[0].trials[0].state.name == "FAIL"

    def test_a_configuration_that_is_chosen_twice_runs_once(self, study):
        arms = [{"algorithm.name": "fedprox", "algorithm.mu": {"choice": [0.1, 0.2]}}]
        made = study(arms=arms, **{"search.samples": 6, "local.lr": 0.1})
        assert len(searched(made)) == 4  # two configurations with two seeds
        assert [trial.state.name for trial in made._studies[0].trials] == ["COMPLETE"] * 6

    @pytest.mark.parametrize("stop_after", [1, 2, 5, 8, 12])
    def test_a_resumed_search_goes_on_as_without_the_interruption(self, study, monkeypatch, stop_after):
        whole = searched(study())
        before = searched(study(), stop_after)
        scores = {job["trial"]: goodness(job["config"]) for job in before}
        rows = [{"trial": name, "status": "done", "default_eval_point": "global"} for name in scores]
        monkeypatch.setattr(module, "read_trials", lambda folder: rows)
        monkeypatch.setattr(module, "best_validation", lambda home, name, point: scores.get(name))
        again = study(resume=True)
        assert again.finished_before == stop_after
        assert choices([*before, *searched(again)]) == choices(whole)

    def test_a_log_of_another_space_is_not_used(self, study):
        searched(study())
        other = study(resume=True, **{"local.lr": {"loguniform": [1e-3, 1.0]}})
        assert (other.finished_before, len(searched(other))) == (0, 12)


class TestSweep:
    def test_validation_scores_alone_are_told_and_resuming_adds_nothing(self, tmp_path, capsys):
        pytest.importorskip("optuna")
        given = QUICK | {"results": str(tmp_path), "experiment": "s"}
        said = "12 trials: Optuna chooses 3 configurations of each of 2 arms; each with 2 seeds"
        swept = rayfed.sweep(given, quiet=False)
        assert said in capsys.readouterr().err
        assert (swept.failed, len(swept.trials), set(swept.trials["status"])) == (0, 12, {"done"})
        home = open_storage(tmp_path).child("s")
        values = pd.read_parquet(tmp_path / "s" / "metrics").query("metric == 'accuracy' and split == 'val'")
        for trial, rows in values.groupby("trial"):
            means = rows.groupby("round")["value"].mean()
            assert best_validation(home, trial, Selection()) == means.max()
            assert best_validation(home, trial, Selection(higher_is_better=False)) == -means.min()
        rayfed.sweep(given | {"resume": True}, quiet=False)
        assert "12 already done" in capsys.readouterr().err
        assert len(pd.read_parquet(tmp_path / "s" / "trials")) == 12

    @pytest.mark.slow
    def test_an_interrupted_sweep_is_completed(self, tmp_path, monkeypatch):
        pytest.importorskip("optuna")
        from rayfed.experiments import local_sweep

        small = QUICK | {"search": QUICK["search"] | {"samples": 2}, "rounds": 1}
        whole = rayfed.sweep(small | {"results": str(tmp_path / "whole")}).trials
        run, calls = local_sweep._run, []

        def interrupted(*given):
            calls.append(given)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return run(*given)

        given = small | {"results": str(tmp_path / "cut")}
        with monkeypatch.context() as patch:
            patch.setattr(local_sweep, "_run", interrupted)
            with pytest.raises(KeyboardInterrupt, match="after 3 of 8 trials"):
                rayfed.sweep(given)
        completed = rayfed.sweep(given | {"resume": True}).trials
        keys = ["trial", "weights_hash"]
        assert completed[keys].sort_values("trial").values.tolist() == whole[keys].sort_values("trial").values.tolist()


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"search": {"kind": "optuna"}}, "search.samples: required for search.kind=optuna"),
            (
                {"data.per_domain": {"randint": [20, 40]}},
                "data.per_domain: search.kind=optuna cannot choose it; give one value, or separate arms",
            ),
            ({"placement.hosts": {"choice": [0, 1]}}, "placement.hosts: search.kind=optuna cannot choose it"),
        ],
    )
    def test_spaces(self, changes, message):
        given = {key: value for key, value in QUICK.items() if key not in changes}
        with pytest.raises(UsageError) as error:
            read_space(given, changes)
        assert str(error.value).startswith(message)

    def test_a_missing_package(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UsageError, match=r"^search.kind=optuna: the package optuna is not installed; pip install"):
            check_search(space())

    @pytest.mark.parametrize("changes", [{"partition.validation": 0.0}, {"evaluate.splits": ["test"]}])
    def test_no_validation_scores(self, tmp_path, monkeypatch, changes):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(module, "check_search", lambda space: None)
        monkeypatch.setattr("rayfed.experiments.sweep.check_search", lambda space: None)
        with pytest.raises(UsageError, match=r"^search.kind=optuna: needs validation scores; give"):
            plan_sweep(space(**changes), configurations(space(**changes)))

    def test_corners_have_every_bound_and_choice(self):
        corners = list(space().adaptive[1].corners())
        assert [(c["local"]["lr"], c["algorithm"]["mu"]) for c in corners] == [(1e-4, 0.01), (1.0, 0.1)]
        refused = read_space(QUICK | {"local": {"lr": {"uniform": [-1, 1]}}})
        with pytest.raises(UsageError, match=r"^local.lr=-1.0: must be more than 0"):
            configurations(refused)


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_with_several_trials_at_a_time(tmp_path):
    pytest.importorskip("optuna")
    from helpers.ray_session import start_ray

    start_ray()
    search = {"kind": "optuna", "samples": 4, "max_concurrent": 2, "scheduler": "asha"}
    given = QUICK | {"results": str(tmp_path), "search": search}
    swept = rayfed.sweep(given)
    assert (swept.failed, len(swept.trials)) == (0, 16)
    assert set(swept.trials["status"]) <= {"done", "stopped"}
    done = int((swept.trials["status"] == "done").sum())
    again = rayfed.sweep(given | {"resume": True, "search": search | {"scheduler": "none"}})
    assert (len(again.trials), int((again.trials["status"] == "done").sum())) == (16, 16)
    assert done <= 16
