"""The trials of a server's process, without Ray: rounds, checkpoints that other trials go on from, and names.

The clients minimise (w - 1)² from w = 0 with one step per round, so a learning rate r leaves the error (1 - 2 r) after
each.
"""

import pytest
import ray
import torch

import rayfed
from helpers import one_weight
from helpers.one_weight import GIVEN, ROUNDS
from rayfed.core.errors import UsageError
from rayfed.distributed import server_trials as module
from rayfed.distributed.server_trials import LAST_GAIN, Trials
from rayfed.distributed.start import Start
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan_identity import trial_name
from rayfed.experiments.simulation import Simulation, local_fleet
from rayfed.experiments.sweep import Job
from rayfed.records.recorder import Recorder

QUICK = one_weight.QUICK | {"local.lr": 0.1}


class Here(Recorder):
    """The recorder of this process, as `RemoteRecorder` is used."""

    def settle(self):
        pass


def here(plan, sink, pool, saved=(), *, at_once, change=None):
    """Return what `simulation_on` does, without Ray."""
    device = torch.device("cpu")
    fleet = lambda: local_fleet(plan, device, 0.0)  # noqa: E731
    return Simulation(plan, sink, fleet, device, saved=saved, replaceable=True, change=change)


@pytest.fixture
def trials(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "simulation_on", here)
    monkeypatch.setattr(module, "this_process", lambda: None)
    monkeypatch.setattr(module, "opened", lambda shared: shared)
    recorder = Here("results", "run")
    monkeypatch.setattr(module, "RemoteRecorder", lambda actor: recorder)
    monkeypatch.setattr(module, "is_private", lambda: True)

    def make(**options):
        return Trials(None, given=Given(**GIVEN), **options)

    make.recorder = recorder
    yield make
    recorder.close()


def start(name, lr=0.1, *, values=None, checkpoint=None, tuner_id="", **changes):
    config = Config.read(QUICK | {"local.lr": lr} | changes)
    job = ray.cloudpickle.dumps(Job(trial=name, config=config, identity={"trial": name} if not tuner_id else {}))
    values = values or {}
    return Start(name, job, values, values, checkpoint, tuner_id)


def stepped(trials, start, times=1):
    for _ in range(times):
        result, failed = trials.step(start, None)
        assert not failed, result
    return result


def loss(lr, rounds, error=1.0):
    return (error * (1 - 2 * lr) ** rounds) ** 2


def test_every_round_is_reported_until_the_trial_is_done(trials):
    process = trials()
    results = [stepped(process, start("a")) for _ in range(ROUNDS)]
    assert [result["training_iteration"] for result in results] == list(range(1, ROUNDS + 1))
    assert [result["done"] for result in results] == [False] * 5 + [True]
    for number, result in enumerate(results, 1):
        assert result["global/val/loss"] == pytest.approx(loss(0.1, number), rel=1e-4)
        assert result[LAST_GAIN] == result["gain"] == -result["val"]
        assert result["round/clients"] == 2
    (row,) = rayfed.read_results("results").trials.to_dict("records")
    assert (row["trial"], row["status"]) == ("a", "done")
    assert row["weights_hash"] == rayfed.run(QUICK, **GIVEN, experiment="alone", quiet=True).weights_hash


def test_a_trial_goes_on_from_its_own_checkpoint_without_a_change_of_a_bit(trials):
    process = trials()
    first = start("a")
    stepped(process, first, 2)
    pointer = process.save(first)
    assert (pointer["trial"], pointer["number"]) == ("a", 1)
    process.leave()
    stepped(process, start("b"), ROUNDS)
    last = stepped(process, start("a", checkpoint=pointer), ROUNDS - 2)
    assert (last["round"], last["done"]) == (ROUNDS, True)
    trials = rayfed.read_results("results").trials
    assert trials["weights_hash"].nunique() == 1
    assert rayfed.read_events("results").empty


def test_a_trial_takes_over_the_state_of_another_one_with_its_own_rate(trials):
    process = trials()
    stepped(process, start("worse", 0.01), 2)
    process.leave()
    best = start("better", 0.4)
    stepped(process, best, 2)
    pointer = process.save(best)
    stepped(process, best, ROUNDS - 2)  # it ends, and its checkpoint must stay
    changed = {"local.lr": 0.3}
    after = start("worse", 0.4, values=changed, checkpoint=pointer)
    error = (1 - 2 * 0.4) ** 2
    for number in range(1, ROUNDS - 1):
        result = stepped(process, after)
        assert result["round"] == 2 + number
        assert result["val"] == pytest.approx(loss(0.3, number, error), rel=1e-3, abs=1e-12)
    tables = rayfed.read_results("results")
    rows = tables.trials.set_index("trial")
    assert (rows.loc["worse", "status"], rows.loc["worse", "local.lr"]) == ("done", 0.3)
    assert sorted(tables.rounds.query("trial == 'worse'")["round"]) == list(range(1, ROUNDS + 1))
    (event,) = rayfed.read_events("results").to_dict("records")
    assert (event["trial"], event["round"], event["event"]) == ("worse", 2, "hyperparameters changed")
    assert event["detail"] == "local.lr=0.3; goes on from the state of better"


def test_what_cannot_change_while_a_trial_runs_is_refused(trials):
    process = trials()
    first = start("a")
    stepped(process, first, 2)
    pointer = process.save(first)
    process.leave()
    result, failed = process.step(start("a", checkpoint=pointer, rounds=20), None)
    assert (failed, result["done"]) == (True, True)
    (row,) = rayfed.read_results("results").trials.to_dict("records")
    assert row["error"].startswith("UsageError: rounds: search.scheduler cannot change it while a trial runs")


def test_trials_of_a_tuner_have_names_of_their_own(trials):
    process = trials(raises=True)
    name = trial_name(Config.read(QUICK))
    first = start(name, tuner_id="t_1")
    stepped(process, first, 2)
    process.leave()  # paused, and recorded as stopped
    stepped(process, start(name, tuner_id="t_2"), ROUNDS)
    last = stepped(process, first, 1)
    assert last["round"] == 1  # no checkpoint was due
    rows = rayfed.read_results("results").trials.set_index("trial")
    assert rows["status"].value_counts().to_dict() == {"done": 1, "running": 1}
    assert {name.endswith("-t_2") for name, row in rows.iterrows() if row["status"] == "done"} == {True}


def test_a_tuner_sees_errors(trials):
    process = trials(raises=True)
    with pytest.raises(UsageError, match=r"^cohort=9: there are 2 clients"):
        process.step(start("x", tuner_id="t_1", cohort=9), None)
