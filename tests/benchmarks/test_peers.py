"""`make bench-peers`: every engine is given the same work, and what is printed about it is right."""

import dataclasses
import importlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.federations import simulate

ROOT = Path(__file__).parents[2]
HOME = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _without_data(monkeypatch):
    monkeypatch.delenv("RAYFED_DATA", raising=False)


def module(name):
    return importlib.import_module(f"peers.{name}")


def small_job(network="mlp", rounds=2):
    """Return a job of three clients with 25, 10 and 39 images of noise: 2, 1 and 3 steps of 10 images."""
    rng = np.random.default_rng(3)
    sizes = np.array([25, 10, 39])
    return module("jobs")._with_initial_weights(
        name="small",
        network=network,
        x=rng.integers(0, 256, (74, 1, 28, 28), dtype=np.uint8),
        y=rng.integers(0, 10, 74),
        sizes=sizes,
        test_x=rng.integers(0, 256, (40, 1, 28, 28), dtype=np.uint8),
        test_y=rng.integers(0, 10, 40),
        mean=0.5,
        std=0.25,
        rounds=rounds,
        channels_last=network == "cnn",
    )


def outcome(*seconds, steps=12, parameters=(), **others):
    stamps = list(itertools.accumulate(seconds, initial=5.0))
    return module("job").Outcome(version="1", stamps=stamps, steps=steps, parameters=list(parameters), **others)


@pytest.mark.parametrize("network", ["cnn", "mlp"])
def test_the_network_is_rayfeds(network):
    job = small_job(network)
    model = module("jobs").plan_of(job, hosts=0, results="results").blueprint.model
    x, _ = job.data(2)
    assert torch.allclose(job.model()(x), model(x), atol=1e-6)
    assert len(job.initial) == len(list(model.parameters()))


def test_a_file_holds_the_whole_job(tmp_path):
    job = small_job()
    job.save(tmp_path / "job.npz")
    loaded = module("job").Job.load(tmp_path / "job.npz")
    for field in dataclasses.fields(job):
        before, after = getattr(job, field.name), getattr(loaded, field.name)
        assert type(after) is type(before)
        if field.name == "initial":
            assert [value.tolist() for value in after] == [value.tolist() for value in before]
        else:
            assert np.array_equal(after, before)


def test_training_by_hand_gives_rayfeds_model():
    """Flower's clients train with `job.train`; the weighted mean of what it returns must be rayfed's model."""
    job_module, job = module("job"), small_job()
    plan = module("jobs").plan_of(job, hosts=0, results="results")
    server, _ = simulate(plan.blueprint, plan.population)
    values, model, steps = job.initial, job.model(), 0
    for round in range(1, job.rounds + 1):
        trained = []
        for client in range(3):
            job_module.set_parameters(model, values)
            steps += job_module.train(model, *job.data(client), job.batches(client, round), job.lr)
            trained.append(job_module.parameters_of(model))
        weights = job.sizes / job.sizes.sum()
        values = [sum(w * v for w, v in zip(weights, one, strict=True)) for one in zip(*trained, strict=True)]
    assert steps == job.steps * job.rounds == 12
    for value, expected in zip(values, server.state["weights"].values(), strict=True):
        assert np.allclose(value, expected.numpy(), atol=1e-6)
    assert not np.allclose(values[0], job.initial[0], atol=1e-4)


def test_ratios_are_of_paired_repetitions():
    report = module("report")
    runs = {"bare": [outcome(1.0, 2.0, 9.0), outcome(4.0)], "rayfed": [outcome(3.0), outcome(4.0, 4.0)]}
    assert report.ratio(runs, "rayfed", "bare") == (1.25, 1.0, 1.5)
    assert report.seconds(runs, "bare") == (3.0, 1.0, 9.0)
    assert f"{report.ratio(runs, 'rayfed', 'bare'):.2f}" == "1.25 (1.00 to 1.50)"


def test_a_goal_is_a_bound_from_above_or_below():
    goal = module("report").Goal
    assert goal("rayfed", "bare", "≤", 1.02).met(1.02)
    assert not goal("rayfed", "bare", "≤", 1.02).met(1.03)
    assert goal("pfl", "rayfed", "≥", 1.3).met(1.31)
    assert not goal("pfl", "rayfed", "≥", 1.3).met(1.2)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"steps": 11}, "pfl: 11 steps instead of 12"),
        ({"parameters": 0.01}, "pfl: weights differ from those of bare by 0.01"),
        ({"parameters": np.nan}, "pfl: weights differ from those of bare by nan"),
        ({}, None),
    ],
)
def test_other_work_is_pointed_out(change, line, capsys):
    job = dataclasses.replace(small_job(), name="many-clients")
    moved = [value + change.get("parameters", 0) for value in job.initial]
    runs = {
        "bare": [outcome(1.0, parameters=job.initial)],
        "rayfed": [outcome(1.0, parameters=job.initial)],
        "pfl": [outcome(1.5, parameters=moved, steps=change.get("steps", 12))],
    }
    same = module("report").show(job, runs)
    lines = capsys.readouterr().out.splitlines()
    assert same == (line is None)
    said = next(text for text in lines if "work" in text.lower())
    assert said.startswith(f"THE WORK DIFFERS: {line}") if line else said == "all engines did the same work"
    assert lines[-2:] == [
        "rayfed / bare loop: 1.000 (1.000 to 1.000), goal ≤ 1.05: met",
        "pfl-research / rayfed: 1.500 (1.500 to 1.500), goal ≥ 1.3: met",
    ]


def test_users_are_made_on_demand_and_drawn_by_the_engine():
    job = module("jobs").many_users(3, users=200_000)
    assert (len(job.x), len(job.sizes), job.participants, job.steps) == (0, 200_000, 100, 100)
    x, y = job.data(123_456)
    rows = job.batches(123_456, 2)
    plan = module("jobs").plan_of(job, hosts=0, results="results")
    examples = plan.population.clients[123_456].train
    assert np.array_equal(x, examples.x)
    assert np.array_equal(y, examples.y)
    assert rows.tolist() == [list(range(8))]
    assert plan.config.cohort == 100
    assert torch.allclose(job.model()(x), plan.blueprint.model(x), atol=1e-6)
    assert np.allclose(job.normalised(job.test_x), job.test_x)


def test_a_large_model_has_about_as_many_parameters_as_asked_for():
    job = module("jobs").large_model(2, parameters=1_000_000)
    assert sum(value.size for value in job.initial) == pytest.approx(1_000_000, rel=0.01)
    model = module("jobs").plan_of(job, hosts=0, results="results").blueprint.model
    assert [value.shape for value in job.initial] == [tuple(value.shape) for value in model.parameters()]


@pytest.mark.parametrize(
    ("steps", "said"), [(12, "all engines did as many steps, each on clients that it drew"), (11, None)]
)
def test_start_up_and_memory_are_shown_and_drawn_clients_may_end_with_other_weights(steps, said, capsys):
    job = dataclasses.replace(small_job(rounds=2), name="many-users-3", cohort=6, watched=True)
    moved = [value + 1 for value in job.initial]
    memory = {"began": 2.0, "memory": (4_000_000_000, 1_500_000_000)}
    runs = {
        "rayfed": [outcome(1.0, parameters=job.initial, **memory)],
        "pfl": [outcome(1.0, parameters=moved, steps=steps, **memory)],
    }
    assert module("report").show(job, runs) == (said is not None)
    lines = capsys.readouterr().out.splitlines()
    assert "memory, GB" in lines[2]
    assert lines[3].split()[-4:] == ["3.0", "s", "4", "1.5"]
    assert lines[-1] == (said or "THE WORK DIFFERS: pfl: 11 steps instead of 12")


def test_memory_counts_until_the_last_round_is_over():
    samples = [(1.0, []), (2.0, [3, 4]), (3.0, [5, 1]), (9.0, [50, 50])]
    assert module("engines")._highest(samples, 3.5) == (7, 5)
    assert module("engines")._highest([], 3.5) == (0, 0)


class FakeEngine:
    """Writes down when it runs, and fails in the run `fails`."""

    def __init__(self, name, calls, fails=None):
        self.name, self.calls, self.fails = name, calls, fails

    def run(self, python, job, folder, timeout, *, watched):
        self.calls.append(self.name)
        if self.calls.count(self.name) == self.fails:
            raise module("environments").Unavailable(f"{self.name}: failed")
        return outcome(1.0)


def test_engines_take_turns_and_one_that_fails_is_left_out(monkeypatch, capsys, tmp_path):
    main = module("__main__")
    calls = []
    engines = {name: FakeEngine(name, calls, fails=2 if name == "pfl" else None) for name in ("bare", "rayfed", "pfl")}
    monkeypatch.setattr(main, "ENGINES", engines)
    args = main._arguments(["--repeats", "3", "--engines", *engines])
    runs = main._run(small_job(), dict.fromkeys(engines, Path(sys.executable)), tmp_path, args)
    assert calls == ["bare", "rayfed", "pfl", "rayfed", "pfl", "bare", "bare", "rayfed"]
    assert {name: len(outcomes) for name, outcomes in runs.items()} == {"bare": 3, "rayfed": 3}
    assert "pfl: failed" in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_process_that_fails_or_takes_too_long_ends_in_one_line(tmp_path):
    engine, unavailable = module("engines").ENGINES["bare"], module("environments").Unavailable
    job = tmp_path / "job.npz"
    job.write_text("not an archive")
    with pytest.raises(unavailable, match=r"^bare: failed on job: \w*Error: .* \(see .*job-bare.log\)$"):
        engine.run(Path(sys.executable), job, tmp_path, 100)
    with pytest.raises(unavailable, match=r"^bare: took longer than 0.01 s on job"):
        engine.run(Path(sys.executable), job, tmp_path, 0.01)


@pytest.mark.parametrize("engine", ["flower", "pfl"])
def test_packages_are_pinned_and_torch_is_rayfeds(engine):
    def lines(path):
        text = [line.strip() for line in path.read_text().splitlines()]
        return [line for line in text if line and not line.startswith("#")]

    pins = lines(HOME / "peers" / f"{engine}.txt")
    assert [line for line in pins if "==" not in line] == []
    (torch_pin,) = [line for line in pins if line.startswith("torch==")]
    assert torch_pin in lines(ROOT / "constraints.txt")


def test_without_data_a_job_is_skipped(tmp_path, capsys):
    assert module("__main__").main(["--jobs", "mnist-cnn", "--engines", "bare", "--cache", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("skipped: set the environment variable RAYFED_DATA")


def test_missing_data_and_engines_are_named_in_one_line_each(tmp_path, monkeypatch, capsys):
    main = module("__main__")
    monkeypatch.setenv("RAYFED_DATA", str(tmp_path / "nowhere"))
    assert main.main(["--jobs", "mnist-cnn", "--engines", "bare", "--cache", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("mnist-cnn: ")
    assert "nowhere" in line

    def unavailable(*_):
        raise module("environments").Unavailable("pfl: cannot be installed: no network")

    monkeypatch.delenv("RAYFED_DATA")
    monkeypatch.setattr(module("engines"), "environment", unavailable)
    assert main.main([*TINY, "--jobs", "many-clients", "--engines", "pfl", "--cache", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pfl: cannot be installed: no network"
    assert lines[-1] == "many-clients: no engine could run it"


TINY = ["--clients", "4", "--images", "20", "--repeats", "1", "--rounds", "1"]


@pytest.mark.ray
@pytest.mark.slow
def test_the_bare_loop_and_rayfed_are_compared(tmp_path, capsys):
    file = tmp_path / "seconds.json"
    options = ["--jobs", "many-clients", "--engines", "rayfed", "bare", "--cache", str(tmp_path), "--json", str(file)]
    assert module("__main__").main([*TINY, *options]) == 0
    out = capsys.readouterr().out
    assert "many-clients: 4 clients, 8 steps per round; 1 × 1 timed rounds" in out
    assert "all engines did the same work" in out
    assert "rayfed / bare loop: " in out
    written = json.loads(file.read_text())["many-clients"]
    assert [(name, run["steps"], len(run["seconds"])) for name, (run,) in written.items()] == [
        ("bare", 16, 1),
        ("rayfed", 16, 1),
    ]


@pytest.mark.slow
@pytest.mark.ray
def test_all_engines_do_the_same_work(capsys):
    """This installs Flower and pfl-research into build/peers, unless they are there."""
    status = module("__main__").main([*TINY, "--jobs", "many-clients", "--cache", str(ROOT / "build" / "peers")])
    out = capsys.readouterr().out
    if "cannot be installed" in out:
        pytest.skip(next(line for line in out.splitlines() if "cannot be installed" in line))
    assert status == 0
    assert "all engines did the same work" in out
    assert [name for name in ("bare loop", "rayfed", "pfl-research", "Flower") if f"\n{name} (" not in out] == []
