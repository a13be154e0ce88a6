"""Ray Tune sees hyperparameters and rounds: its tables, its schedulers, its searchers, and a user's own Tuner.

The clients minimise (w - 1)² from w = 0 with one step per round, so a learning rate r leaves the error (1 - 2 r) after
each. The best rate is known, 0.5, and so is every weight.
"""

import math
import os
import re
from pathlib import Path

import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search import Searcher

import rayfed
from helpers.one_weight import GIVEN, QUICK, ROUNDS, squared
from helpers.ray_session import start_ray
from rayfed.core.errors import UsageError

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start_ray()
    return tmp_path


def swept(experiment, values, **options):
    space = QUICK | {"experiment": experiment} | values
    return rayfed.sweep(space, **GIVEN, quiet=True, **options)


def losses(result):
    """The validation loss by trial and round."""
    rows = result.metrics.query("metric == 'loss' and split == 'val'")
    return rows.groupby(["trial", "round"])["value"].mean()


def single_hash(lr, **values):
    return rayfed.run(QUICK | {"experiment": "single", "local.lr": lr} | values, **GIVEN, quiet=True).weights_hash


class Noting(tune.Callback):
    def __init__(self):
        self.seen = []

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.seen.append((str(trial), result["training_iteration"], result["config"]["local.lr"]))


class Failing(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        raise RuntimeError("mine")


def test_tune_has_the_hyperparameters_every_round_and_a_frame_that_equals_the_tables(capsys):
    noting = Noting()
    space = QUICK | {"experiment": "frame", "local.lr": {"grid": [0.1, 0.5]}, "evaluate.every": 2}
    result = rayfed.sweep(space, **GIVEN, quiet=False, callbacks=[Failing(), noting])
    frame = result.tune.get_dataframe().set_index("config/job")
    assert set(frame.columns) >= {"config/local.lr", "config/algorithm.name", "config/seed", "global/val/loss"}
    assert not frame.isna().any().any()
    for row in result.trials.to_dict("records"):
        assert frame.loc[row["trial"], "config/local.lr"] == row["local.lr"]
        last = losses(result)[row["trial"]].iloc[-1]
        assert frame.loc[row["trial"], "global/val/loss"] == pytest.approx(last)
        assert frame.loc[row["trial"], "last_gain"] == pytest.approx(-last)
        assert [seen[1:] for seen in noting.seen if seen[0] == row["trial"]] == [
            (number, row["local.lr"]) for number in range(1, ROUNDS + 1)
        ]
        assert row["weights_hash"] == single_hash(row["local.lr"], **{"evaluate.every": 2})
    rounds = result.tune[0].metrics_dataframe
    assert rounds["training_iteration"].tolist() == list(range(1, ROUNDS + 1))
    assert rounds["gain"].notna().tolist() == [False, True] * 3
    assert rounds["last_gain"].notna().tolist() == [False, *[True] * 5]
    err = capsys.readouterr().err
    assert err.count("callback Failing.on_trial_result failed (RuntimeError: mine") == 1


@pytest.mark.slow
def test_the_grid_of_adcol_in_the_frame_of_tune():
    """A frame of Tune has μ and the last scores of every trial, as the tables have them."""
    space = Path(rayfed.__file__).parents[1] / "tune_spaces" / "adcol.yaml"
    result = rayfed.sweep(space, quiet=True, experiment="adcol", rounds=2, seeds=[0], **{"evaluate.every": 1})
    frame = result.tune.get_dataframe().set_index("config/job")
    assert len(frame) == len(result.trials) == 16
    scores = result.metrics.query("round == 2 and metric == 'accuracy'")
    means = scores.groupby(["trial", "point", "split"])["value"].mean()
    weights = []
    for row in result.trials.to_dict("records"):
        seen = frame.loc[row["trial"]]
        assert seen["config/algorithm.name"] == row["algorithm"]
        if row["algorithm"] in ("adcol", "fedprox"):
            weights.append(seen["config/algorithm.mu"])
            assert seen["config/algorithm.mu"] == row["algorithm.mu"]
        else:
            assert math.isnan(seen["config/algorithm.mu"])
        for point, split in means[row["trial"]].index:
            assert seen[f"{point}/{split}/accuracy"] == pytest.approx(means[row["trial"], point, split])
    assert sorted(weights) == sorted([0, *[10, 1, 0.1, 0.01, 0.001] * 2, 0.1, 0.01])


def replayed(rates, events, interval):
    """The error w - 1 by trial and round, with the exchanges that `events` tell of."""
    errors = dict.fromkeys(rates, -1.0)
    found = {}
    for number in range(1, ROUNDS + 1):
        for trial, rate in rates.items():
            errors[trial] *= 1 - 2 * rate
            found[trial, number] = errors[trial]
        before = dict(errors)
        for event in events:
            if event["round"] == number:
                assert number % interval == 0
                errors[event["trial"]] = before[event["detail"].split("; goes on from the state of ")[1]]
                rates[event["trial"]] = rate_of(event)
    return found


def rate_of(event):
    (rate,) = re.findall(r"local\.lr=([0-9.e-]+)", event["detail"])
    return float(rate)


@pytest.mark.slow
def test_a_population_finds_the_rate_and_its_history_is_in_the_tables():
    rates = [0.001, 0.01, 0.05, 0.4]
    scheduler = {"name": "pbt", "interval": 2, "share": 0.25}
    space = {"local.lr": {"grid": rates}, "search.scheduler": scheduler}
    result = swept("population", space)
    trials = result.trials.set_index("trial")
    assert set(trials["status"]) == {"done"}
    events = rayfed.read_events("results", "population").query("event == 'hyperparameters changed'")
    assert len(events) >= 1
    firsts = {name: row["local.lr"] for name, row in trials.iterrows()}
    changed = {}
    for event in events.to_dict("records"):
        changed[event["trial"]] = rate_of(event)
    for name, now in changed.items():
        assert trials.loc[name, "local.lr"] == now
    # the first rate of a changed trial is the one that no other trial began with
    begun = [rate for name, rate in firsts.items() if name not in changed]
    left = [rate for rate in rates if rate not in begun]
    measured = losses(result)
    for name in changed:
        first = -1 + math.sqrt(measured[name, 1])  # of 1 - 2 r
        firsts[name] = min(left, key=lambda rate: abs(first + 2 * rate))
    expected = replayed(dict(firsts), events.to_dict("records"), 2)
    for key, error in expected.items():
        assert measured[key] == pytest.approx(error**2, rel=1e-3, abs=1e-9), key
    assert measured[list(changed)[-1], ROUNDS] < 0.01
    best = measured.groupby("trial").min().idxmin()
    assert trials.loc[best, "local.lr"] in (0.4, 0.05)
    assert not list(Path("results/population/checkpoints").rglob("*.json"))


@pytest.mark.slow
def test_pausing_changes_no_bit():
    rates = [0.01, 0.1, 0.2, 0.3, 0.4, 0.45, 0.05, 0.15]
    space = {"local.lr": {"grid": rates}, "search.scheduler": "hyperband", "search.reduction_factor": 2}
    result = swept("hyperband", space)
    trials = result.trials.set_index("local.lr")
    assert set(trials["status"]) == {"done", "stopped"}
    for rate, row in trials[trials["status"] == "done"].iterrows():
        assert row["weights_hash"] == single_hash(rate)
        assert losses(result)[row["trial"], ROUNDS] == pytest.approx((1 - 2 * rate) ** (2 * ROUNDS), rel=1e-4, abs=1e-9)


class TakesTheNext(Searcher):
    """Suggests listed rates, one of them twice, and keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.left, self.told, self.space = [0.1, 0.5, 0.1], {}, None

    def set_search_properties(self, metric, mode, config, **spec):
        self.space = metric, mode, config
        return True

    def suggest(self, trial_id):
        self.told[trial_id] = self.left[0], None
        return {"local.lr": self.left.pop(0)}

    def on_trial_complete(self, trial_id, result=None, error=False):
        self.told[trial_id] = self.told[trial_id][0], result["best"]


def test_a_searcher_of_tune_is_told_means_over_the_seeds():
    searcher = TakesTheNext()
    space = {"local.lr": {"loguniform": [0.01, 0.5]}, "seeds": [0, 1], "search": {"samples": 3, "max_concurrent": 1}}
    result = swept("searcher", space, search_alg=searcher)
    assert sorted(result.trials["local.lr"]) == [0.1, 0.1, 0.5, 0.5]
    assert searcher.space[:2] == ("best", "max")
    assert isinstance(searcher.space[2]["local.lr"].sampler, type(tune.loguniform(1, 2).sampler))
    told = sorted(searcher.told.values())
    means = [pytest.approx(-(0.8 ** (2 * ROUNDS)), rel=1e-4), pytest.approx(0, abs=1e-9)]
    assert [rate for rate, _ in told] == [0.1, 0.1, 0.5]
    assert [score for _, score in told] == [means[0], means[0], means[1]]


def test_a_population_in_python_cannot_change_what_a_trial_cannot_change():
    scheduler = PopulationBasedTraining(time_attr="round", hyperparam_mutations={"rounds": [10, 20]})
    with pytest.raises(UsageError, match=r"^rounds: PopulationBasedTraining cannot change it while a trial runs"):
        swept("refused", {"local.lr": {"grid": [0.1, 0.5]}}, scheduler=scheduler)


def tuner(trainable, space, *, name, callbacks=(), **options):
    run = tune.RunConfig(
        name=name,
        storage_path=os.path.abspath("ray"),
        verbose=0,
        callbacks=list(callbacks),
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
    )
    config = tune.TuneConfig(metric="last_gain", mode="max", **options)
    return tune.Tuner(trainable, param_space=space, tune_config=config, run_config=run)


def test_a_users_own_tuner():
    trainable = rayfed.trainable(QUICK | {"experiment": "own"}, **GIVEN)
    space = {"local.lr": tune.grid_search([0.1, 0.1, 0.5]), "local": {"momentum": 0.0}}
    scheduler = ASHAScheduler(time_attr="round", max_t=ROUNDS, grace_period=ROUNDS)
    grid = tuner(trainable, space, name="a", scheduler=scheduler).fit()
    assert not grid.errors
    assert grid.get_best_result().config["local.lr"] == 0.5
    trials = rayfed.read_results("results", "own").trials
    assert trials["status"].tolist() == ["done"] * 3
    for row in trials.to_dict("records"):
        assert row["weights_hash"] == single_hash(row["local.lr"])
    with pytest.raises(UsageError, match=r"^local\.lr=-1\.0: must be more than 0"):
        tuner(trainable, {"local.lr": -1.0}, name="b").fit()


@pytest.mark.slow
def test_a_users_own_tuner_is_restored(tmp_path):
    flag = tmp_path / "breaks"
    flag.touch()

    def breaking(outputs, y):
        if flag.exists() and outputs.requires_grad and outputs.mean() > 0.4:  # in the fourth round
            raise ZeroDivisionError("mine")
        return squared(outputs, y)

    given = GIVEN | {"loss": breaking}
    config = QUICK | {"experiment": "restored", "local.lr": 0.1}
    space = {"local.weight_decay": 0.0}
    failed = tuner(rayfed.trainable(config, **given), space, name="c").fit()
    assert "ZeroDivisionError: mine" in str(failed.errors[0])
    (row,) = rayfed.read_results("results", "restored").trials.to_dict("records")
    assert (row["status"], row["rounds_done"]) == ("failed", 3)
    flag.unlink()
    again = rayfed.trainable(config, **given)
    grid = tune.Tuner.restore(os.path.abspath("ray/c"), again, param_space=space, resume_errored=True).fit()
    after = rayfed.read_results("results", "restored")
    (row,) = after.trials.to_dict("records")
    assert (row["status"], row["weights_hash"]) == ("done", single_hash(0.1))
    assert grid[0].metrics["round"] == ROUNDS
    assert after.rounds["round"].tolist() == list(range(1, ROUNDS + 1))


def test_the_folder_of_a_sweep_is_not_for_tuner_restore():
    swept("folder", {"local.lr": {"grid": [0.1, 0.5]}})
    path = os.path.abspath("results/folder/tune")
    words = r"^Tuner\.restore: the folder is one of rayfed; the same command with resume=true continues it$"
    for trainable in (rayfed.trainable(QUICK, **GIVEN), lambda config: None):
        with pytest.raises(UsageError, match=words):
            tune.Tuner.restore(path, trainable, restart_errored=True)
