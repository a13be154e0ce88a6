"""A finished trial goes on with more rounds, and ends as if it had all of them from the start."""

import pandas as pd
import pytest

import rayfed
from helpers.commands import TWO_CLIENTS, command
from helpers.outcomes import assert_same_results
from helpers.slow import slow_but

run = command("run")

COMMON = (
    "data={domains: [plain, font], per_domain: 60}",
    "partition={name: dirichlet, clients: 5, alpha: 10}",
    "model={name: mlp, hidden: [8], batch_norm: true}",
    "local={batch_size: 6, lr: 0.1}",
)
FOLDERS = ("results", "straight")
pytestmark = pytest.mark.usefixtures("here")


def longer(*arguments, rounds=6, results="results"):
    """Run with more rounds, as somebody would who has seen the curve still rise."""
    assert run([*COMMON, f"rounds={rounds}", "resume=true", f"results={results}", *arguments]) == 0


def shorter(*arguments, rounds=4, results="results"):
    assert run([*COMMON, f"rounds={rounds}", f"results={results}", *arguments]) == 0


def table(name, results="results"):
    return pd.read_parquet(f"{results}/run/{name}")


ARMS = {
    "a server's and clients' states": ("algorithm.name=scaffold", "cohort=2"),
    "a stage after the last round": ("algorithm.name=fedbabu",),
    "a setup before the first": ("algorithm={name: dbe, base: fedprox}", "evaluate.initial=true"),
    "a sampler that remembers": ("sampling={name: power_of_choice, losses: last}", "cohort=2"),
    "clients that are late": ("availability={dropout: 0.3}", "clock={step_seconds: 1, speed_spread: 1}"),
    "a schedule that looks back only": ("lr_schedule={name: step, decay: 0.5, every: 3}",),
    "unseen clients without a setup": ("unseen_clients=1",),
    "early stopping": ("early_stopping.patience=6", "algorithm.name=fedprox"),
}
FAST = ("a server's and clients' states", "a setup before the first", "a sampler that remembers", "early stopping")


@pytest.mark.parametrize("arguments", slow_but(FAST, ARMS))
def test_it_ends_as_if_it_had_all_rounds_from_the_start(arguments, capsys):
    shorter("checkpoint.every=2", "evaluate.every=2", *arguments)
    longer("checkpoint.every=2", "evaluate.every=2", *arguments)
    assert "continues after round 4\n" in capsys.readouterr().err
    shorter("evaluate.every=2", *arguments, rounds=6, results="straight")
    assert_same_results(*FOLDERS, left=[4])
    (event,) = rayfed.read_events("results").itertuples()
    assert (event.event, event.round, event.detail) == ("rounds added", 4, "goes on with rounds=6, after rounds=4")


ANEW = {
    "a schedule": ("lr_schedule.name=cosine",),
    "a wrapped method with a budget for all rounds": ("algorithm={name: mixup, base: dp_fedbn}",),
}


@pytest.mark.parametrize("arguments", ANEW.values(), ids=ANEW)
def test_where_rounds_depend_on_how_many_follow_it_is_another_trial(arguments):
    shorter("checkpoint.every=2", *arguments)
    longer("checkpoint.every=2", *arguments)
    shorter(*arguments, rounds=6, results="straight")
    trials, straight = (table("trials", folder).set_index("rounds")["weights_hash"] for folder in FOLDERS)
    assert sorted(trials.index) == [4, 6]
    assert trials[6] == straight[6]


@pytest.mark.parametrize("resume", ["true", "false"])
def test_with_fewer_rounds_nothing_is_lost(resume, capsys):
    shorter("checkpoint.every=2", rounds=6)
    capsys.readouterr()
    assert run([*COMMON, "rounds=4", f"resume={resume}"]) == 2
    trial = table("trials")["trial"].item()
    assert capsys.readouterr().err.startswith(f"rayfed: rounds=4: {trial} has 6 rounds in results/run")
    assert table("rounds")["round"].max() == 6


@pytest.mark.parametrize(
    "arguments",
    [
        ("algorithm={name: dbe}", "unseen_clients=1", "evaluate.every=2"),  # whose unseen clients have joined
        ("early_stopping.patience=2", "evaluate.every=3"),  # whose last score is not due in a trial of six rounds
    ],
)
def test_the_end_of_a_trial_is_no_state_of_a_longer_one(capsys, arguments):
    """The checkpoint before the last one, from round 2, is."""
    shorter("checkpoint.every=2", *arguments)
    longer("checkpoint.every=2", *arguments)
    assert "continues after round 2\n" in capsys.readouterr().err
    shorter(*arguments, rounds=6, results="straight")
    assert_same_results(*FOLDERS)


def test_a_trial_that_stopped_early_has_ended(capsys):
    arguments = ("early_stopping.patience=1", "unseen_clients=1", "local.lr=1e-9", "checkpoint.every=1")
    shorter(*arguments)
    longer(*arguments)
    assert "already finished: nothing to do" in capsys.readouterr().err
    longer(*arguments, results="straight")
    assert_same_results(*FOLDERS)


def test_a_sweep_adds_rounds_to_each_of_its_trials(capsys):
    space = TWO_CLIENTS | {"algorithm": {"name": "fedprox", "mu": {"grid": [0, 1]}}, "seeds": [0, 1]}
    space |= {"checkpoint.every": 2, "search.max_concurrent": 1}
    rayfed.sweep(space, rounds=2)
    assert rayfed.sweep(space, rounds=4, resume=True).failed == 0
    assert rayfed.read_events("results")["event"].tolist() == ["rounds added"] * 4
    rayfed.sweep(space, rounds=4, experiment="straight")
    ends = [
        pd.read_parquet(f"results/{name}/trials").set_index("trial")["weights_hash"].sort_index()
        for name in ("run", "straight")
    ]
    pd.testing.assert_series_equal(*ends)
    assert rayfed.sweep(space, rounds=4, resume=True, quiet=False).failed == 0
    assert "4 already done" in capsys.readouterr().err


def test_a_sweep_over_rounds_alone_is_refused():
    with pytest.raises(rayfed.UsageError, match=r"^arms: two trials have the same configuration .* more than rounds$"):
        rayfed.sweep({"rounds": {"grid": [1, 2]}})
