"""What Ray Tune cannot do with the trials of a sweep is refused before Ray starts."""

import pytest

from helpers.commands import TWO_CLIENTS
from rayfed.core.errors import UsageError
from rayfed.experiments.space import configurations, read_space
from rayfed.experiments.sweep import plan_sweep, shown_values
from rayfed.experiments.tuning import Tuning, check_tuning

SPACE = TWO_CLIENTS | {
    "rounds": 20,
    "local.lr": {"loguniform": [0.001, 0.1]},
    "search": {"kind": "random", "samples": 4},
}
PBT = {"search.scheduler": "pbt"}


def checked(tuning=None, **changes):
    space = read_space(SPACE, changes)
    check_tuning(space, configurations(space), tuning or Tuning())
    return space


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search.scheduler": "ahsa"}, "search.scheduler='ahsa': did you mean asha?, or module:Name"),
        ({"search.scheduler": {"interval": 2}}, "search.scheduler.name: required beside the options"),
        ({"search.scheduler": {"name": "pbt", "interval": 0}}, "search.scheduler.interval=0: must be at least 1"),
        ({"search.scheduler": {"name": "pbt", "quantile": 0.2}}, "search.scheduler.quantile: no such key"),
        ({"search.scheduler": {"name": "asha", "grace": 1}}, "search.scheduler.grace: asha has no options here"),
        (
            PBT | {"seeds": [0, 1]},
            "search.scheduler=pbt: trials take over the state of others, so they must have one seed",
        ),
        (
            PBT | {"arms": [{}, {"algorithm.name": "scaffold"}]},
            "search.scheduler=pbt: trials take over the state of others",
        ),
        (PBT | {"local.lr": 0.1, "rounds": {"choice": [5, 6]}}, "rounds: search.scheduler=pbt cannot change it while"),
        (PBT | {"data.per_domain": {"choice": [50, 60]}}, "data.per_domain: search.scheduler=pbt cannot change it"),
        (PBT | {"local.lr": 0.1}, "search.scheduler=pbt: has nothing to change; give a space"),
        (PBT | {"search.samples": 1}, "search.scheduler=pbt: compares trials, and there is one"),
        (PBT | {"resume": True}, "resume=true: what search.scheduler=pbt has exchanged is lost"),
        (PBT | {"search.kind": "optuna"}, "search.scheduler=pbt: changes hyperparameters itself"),
        (
            {"search.scheduler": "hyperband", "evaluate.every": 2},
            "search.scheduler=hyperband: compares trials after any",
        ),
        ({"search.scheduler": "nosuch:Thing"}, "search.scheduler=nosuch:Thing: no module 'nosuch' in"),
        ({"search.kind": "tune"}, "search.kind=tune: the search algorithm is given as rayfed.sweep"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(UsageError) as error:
        checked(**changes)
    assert str(error.value).startswith(message), str(error.value)


@pytest.mark.parametrize(
    ("tuning", "changes", "message"),
    [
        (
            Tuning(scheduler=object()),
            {"search.scheduler": "asha"},
            "search.scheduler=asha: scheduler= is given as well",
        ),
        (Tuning(search_alg=object()), {"search.kind": "tune", "arms": [{}, {"rounds": 3}]}, "search_alg: a search"),
        (Tuning(search_alg=object()), {"search.kind": "tune", "resume": True}, "resume=true: a search algorithm of"),
    ],
)
def test_refusals_of_what_is_given_in_python(tuning, changes, message):
    with pytest.raises(UsageError) as error:
        checked(tuning, **changes)
    assert str(error.value).startswith(message)


def test_options_of_a_scheduler():
    search = checked(**{"search.scheduler": {"name": "pbt", "interval": 3}}).search
    assert (search.scheduler_name, search.population.interval, search.population.share) == ("pbt", 3, 0.25)


def test_tune_is_told_what_differs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arms = [{"algorithm.name": "fedavg"}, {"algorithm.name": "fedprox", "algorithm.mu": {"grid": [0.1, 1]}}]
    space = read_space(TWO_CLIENTS | {"arms": arms, "seeds": [0, 1]})
    plan = plan_sweep(space, configurations(space))
    assert plan.varied == ["algorithm.name", "seed", "algorithm.mu"]
    shown = [shown_values(config, plan.varied) for config in plan.configs[:3]]
    assert shown[0] == {"algorithm.name": "fedavg", "seed": 0}
    assert shown[2] == {"algorithm.name": "fedprox", "seed": 0, "algorithm.mu": 1.0}
