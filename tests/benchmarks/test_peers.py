"""`make bench-peers`: every engine is given the same work, and what is printed about it is right."""

import dataclasses
import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.federations import simulate

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _without_data(monkeypatch):
    monkeypatch.delenv("RAYFED_DATA", raising=False)


def module(name):
    return importlib.import_module(f"peers.{name}")


def small_job(network="mlp", rounds=2):
    """Return a job of three clients with 25, 10 and 39 images of noise: 2, 1 and 3 steps of 10 images, or sentences."""
    rng = np.random.default_rng(3)
    sizes = np.array([25, 10, 39])
    x, y = rng.integers(0, 256, (114, 1, 28, 28), dtype=np.uint8), rng.integers(0, 10, 114)
    if network == "unet":
        y = (x[:, 0] > 99).astype(np.int64)
    if network == "gru":
        x = rng.integers(0, 200, (114, 6))
        y = x[:, ::-1].copy()
    return module("jobs")._with_initial_weights(
        name="small",
        network=network,
        x=x[:74],
        y=y[:74],
        sizes=sizes,
        test_x=x[74:],
        test_y=y[74:],
        width={"mlp": 200}.get(network, 8),
        mean=0.5,
        std=0.25,
        rounds=rounds,
        channels_last=network in ("cnn", "unet"),
    )


def outcome(*seconds, steps=12, parameters=(), **others):
    stamps = list(itertools.accumulate(seconds, initial=5.0))
    return module("job").Outcome(version="1", stamps=stamps, steps=steps, parameters=list(parameters), **others)


@pytest.mark.parametrize("network", ["cnn", "mlp", "unet", "gru"])
def test_the_network_is_rayfeds(network):
    job = small_job(network)
    model = module("jobs").plan_of(job, hosts=0, results="results").blueprint.model
    x, _ = job.data(2)
    assert torch.allclose(job.model()(x), model(x), atol=1e-6)
    assert len(job.initial) == len(list(model.parameters()))


@pytest.mark.parametrize("network", ["mlp", "unet", "gru"])
def test_training_by_hand_gives_rayfeds_model(network):
    """Flower's clients train with `job.train`; the weighted mean of what it returns must be rayfed's model."""
    job_module, job = module("job"), small_job(network)
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
    assert not np.allclose(values[0], job.initial[0], atol=1e-5)
    with torch.no_grad():
        job_module.set_parameters(model, values)
        right = model(job.normalised(job.test_x)).argmax(1).numpy() == job.test_y
    assert job.accuracy(values) == right.mean()


def test_ratios_are_of_paired_repetitions():
    report = module("report")
    runs = {"bare": [outcome(1.0, 2.0, 9.0), outcome(4.0)], "rayfed": [outcome(3.0), outcome(4.0, 4.0)]}
    assert report.ratio(runs, "rayfed", "bare") == (1.25, 1.0, 1.5)
    assert report.seconds(runs, "bare") == (3.0, 1.0, 9.0)
    assert f"{report.ratio(runs, 'rayfed', 'bare'):.2f}" == "1.25 (1.00 to 1.50)"


def test_rounds_with_an_evaluation_are_timed_in_whole_cycles():
    run = outcome(*[1.0] * 9, 11.0, *[2.0] * 9, 12.0, *[1.0] * 9, 1.0, cycle=10)
    assert run.stamps.pop() == run.stamps[-1] + 1  # 30 rounds
    assert run.seconds == pytest.approx([(11 + 2 * 9) / 10, (12 + 9) / 10])


def test_the_yardstick_is_evaluated_on_the_test_images_in_every_tenth_round():
    jobs = module("jobs")
    job = jobs.cifar10(2, users=6, cohort=2)
    assert (job.rounds, job.steps, len(job.test_x)) == (20, 2 * 5, 10_000)
    assert sum(value.size for value in job.initial) == 1_676_842
    assert [round for round in range(1, 21) if job.is_evaluated(round)] == [10, 20]
    small = dataclasses.replace(job, test_x=job.test_x[:50], test_y=job.test_y[:50], rounds=2, evaluate_every=2)
    plan = jobs.plan_of(small, hosts=0, results="results")
    server, records = simulate(plan.blueprint, plan.population, every=2)
    scores = {score.metric: score.value for score in records[-1].scores if score.point == "global"}
    weights = [server.state["weights"][name].numpy() for name, _ in plan.blueprint.model.named_parameters()]
    assert scores["accuracy"] == pytest.approx(small.accuracy(weights))
    assert not [score for score in records[0].scores if score.point == "global"]


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
