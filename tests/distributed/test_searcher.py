"""Search with Optuna: budgets, what is optimised, seeds, failures, resuming, and refusals."""

import json
import math
from collections import Counter

import pandas as pd
import pytest

import rayfed
from rayfed.core.errors import UsageError
from rayfed.experiments.given import Given
from rayfed.experiments.space import configurations, read_space
from rayfed.experiments.sweep import SweepPlan

pytest.importorskip("optuna")
pytest.importorskip("ray")
from rayfed.distributed import searcher as searchers
from rayfed.distributed.searcher import SweepSearcher
from rayfed.distributed.server_trials import BEST

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


def searched(search, stop_after=None):
    """Run a search to its end, or for a number of trials, and return the jobs."""
    jobs = []
    while (stop_after is None or len(jobs) < stop_after) and isinstance(
        suggested := search.suggest(f"{len(jobs)}"), dict
    ):
        jobs.append(suggested["job"])
        search.on_trial_complete(f"{len(jobs) - 1}", {BEST: goodness(jobs[-1]["config"])})
    return jobs


def choices(jobs):
    return [(job["config"].algorithm, job["config"].local.lr, job["config"].seed) for job in jobs]


def told(search, arm=0):
    """Return what Optuna knows of an arm: the learning rate, the score and the state of each configuration."""
    return [(t.params.get("local.lr"), t.value, t.state.name) for t in search._studies[arm].trials]


@pytest.fixture
def search(tmp_path, monkeypatch):
    monkeypatch.setattr(searchers, "sent", lambda job, values: {"job": job})

    def make(resume=False, recorded=(), **changes):
        """Return a search; the jobs `recorded` are in the tables."""
        monkeypatch.setattr(searchers, "read_trials", lambda folder: recorded)
        drawn = space(results=str(tmp_path), resume=resume, **changes)
        return SweepSearcher(SweepPlan(drawn, configurations(drawn), (), (), Given()))

    return make


class TestSearch:
    def test_every_arm_has_the_same_budget_with_every_seed(self, search):
        jobs = searched(search())
        assert Counter((job["config"].algorithm_name, job["config"].seed) for job in jobs) == {
            ("fedavg", 0): 3,
            ("fedavg", 1): 3,
            ("fedprox", 0): 3,
            ("fedprox", 1): 3,
        }
        assert len({job["trial"] for job in jobs}) == 12
        assert {job["config"].algorithm.mu for job in jobs if job["config"].algorithm_name == "fedprox"} <= {0.01, 0.1}

    def test_the_search_follows_its_seed(self, search):
        first, again, other = (choices(searched(search(**{"search.seed": seed}))) for seed in (0, 0, 1))
        assert first == again
        assert first != other

    def test_optuna_is_told_means_over_seeds(self, search):
        made = search()
        searched(made)
        for rate, value, state in told(made):
            assert value == pytest.approx(1 - math.log10(rate / 0.03) ** 2 - 0.05)
            assert state == "COMPLETE"

    def test_it_searches_where_scores_are_good(self, search):
        """Of 30 configurations, the first ten are random. Over five searches, the last ten are nearer to the best."""
        first = last = 0.0
        for seed in range(5):
            made = search(**{"search.samples": 30, "search.seed": seed, "seeds": [0], "arms": [{}]})
            distances = [abs(math.log10(job["config"].local.lr / 0.03)) for job in searched(made)]
            first, last = first + sum(distances[:10]), last + sum(distances[-10:])
        assert last < 0.7 * first

    @pytest.mark.parametrize("error", [True, False])
    def test_a_failed_trial_fails_its_configuration(self, search, error):
        made = search()
        made.suggest("a"), made.suggest("b")
        made.on_trial_complete("a", {BEST: 0.5})
        made.on_trial_complete("b", {BEST: 0.5} if error else {}, error=error)  # an error, or no score anywhere
        assert [state for _, _, state in told(made)] == ["FAIL"]

    def test_a_configuration_that_is_chosen_twice_runs_once(self, search):
        arms = [{"algorithm.name": "fedprox", "algorithm.mu": {"choice": [0.1, 0.2]}}]
        made = search(arms=arms, **{"search.samples": 6, "local.lr": 0.1})
        assert len(searched(made)) == 4  # two configurations with two seeds
        assert [state for _, _, state in told(made)] == ["COMPLETE"] * 6

    @pytest.mark.parametrize("stop_after", [1, 4, 5, 12])
    def test_a_resumed_search_knows_the_finished_trials_and_completes_the_others(self, search, stop_after):
        """After five trials, the first configuration of both arms is done, and one seed of the next."""
        first = search()
        before = searched(first, stop_after)
        again = search(resume=True, recorded=before)
        assert again.finished == stop_after
        scored = [(rate, value) for rate, value, state in told(first) if state == "COMPLETE"]
        assert [(rate, value) for rate, value, state in told(again) if state == "COMPLETE"] == scored
        jobs = [*before, *searched(again)]
        assert len({job["trial"] for job in jobs}) == len(jobs) == 12
        assert Counter(job["config"].algorithm_name for job in jobs) == {"fedavg": 6, "fedprox": 6}
        if stop_after == 5:
            assert jobs[5]["config"].local.lr == jobs[4]["config"].local.lr
        assert len(told(again)) == 3

    def test_trials_of_another_space_and_deleted_ones_are_not_used(self, search):
        before = searched(search())
        other = search(resume=True, recorded=before, **{"local.lr": {"loguniform": [1e-3, 1.0]}})
        assert (other.finished, len(searched(other))) == (0, 12)
        searched(search())
        again = search(resume=True, recorded=before[1:])
        assert [job["trial"] for job in searched(again)] == [before[0]["trial"]]

    def test_a_log_of_an_older_version_is_refused(self, search, tmp_path):
        searched(search())
        (log,) = tmp_path.rglob("search.json")
        log.write_text("[]")
        with pytest.raises(UsageError, match=r"^search\.json: was written by an older version; use another experiment"):
            search(resume=True, recorded=[])


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"search": {"kind": "optuna"}}, "search.samples: required for search.kind=optuna"),
            ({"data.per_domain": {"randint": [20, 40]}}, "data.per_domain: search.kind=optuna cannot choose it; give"),
            ({"placement.hosts": {"choice": [0, 1]}}, "placement.hosts: search.kind=optuna cannot choose it"),
        ],
    )
    def test_spaces(self, changes, message):
        given = {key: value for key, value in QUICK.items() if key not in changes}
        with pytest.raises(UsageError) as error:
            read_space(given, changes)
        assert str(error.value).startswith(message)

    def test_corners_have_every_bound_and_choice(self):
        corners = list(space().adaptive[1].corners())
        assert [(c["local"]["lr"], c["algorithm"]["mu"]) for c in corners] == [(1e-4, 0.01), (1.0, 0.1)]
        refused = read_space(QUICK | {"local": {"lr": {"uniform": [-1, 1]}}})
        with pytest.raises(UsageError, match=r"^local.lr=-1.0: must be more than 0"):
            configurations(refused)


@pytest.mark.ray
def test_validation_scores_alone_are_told_and_resuming_adds_nothing(tmp_path, capsys):
    from helpers.ray_session import start_ray

    start_ray()
    given = QUICK | {"results": str(tmp_path), "experiment": "s"}
    swept = rayfed.sweep(given, quiet=False)
    said = "12 trials: Optuna chooses 3 configurations of each of 2 arms; each with 2 seeds"
    assert said in capsys.readouterr().err
    assert (swept.failed, len(swept.trials), set(swept.trials["status"])) == (0, 12, {"done"})
    values = pd.read_parquet(tmp_path / "s" / "metrics").query("metric == 'accuracy' and split == 'val'")
    means = values.groupby(["trial", "round"])["value"].mean().groupby("trial").max()
    assert json.loads((tmp_path / "s" / "search.json").read_text())["scores"] == pytest.approx(means.to_dict())
    rayfed.sweep(given | {"resume": True}, quiet=False)
    assert len(pd.read_parquet(tmp_path / "s" / "trials")) == 12
