"""Standardised columns: by training rows alone, for all clients or each, in the plan, in models and in saved models."""

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import rayfed
from rayfed.core.errors import UsageError
from rayfed.data.standardise import standardised
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.plan_data import load_data
from rayfed.experiments.run_summary import run_summary


@pytest.fixture
def values(tmp_path, here):
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"age": random.normal(50, 9, 120), "chol": random.normal(200, 50, 120), "same": 3.0})
    frame["hospital"] = ["a"] * 40 + ["b"] * 80
    frame.loc[frame["hospital"] == "b", "age"] += 20
    frame["ill"] = ["no", "yes"] * 60
    frame.to_csv(tmp_path / "heart.csv", index=False)
    data = {"name": "csv", "file": str(tmp_path / "heart.csv"), "features": ["age", "chol", "same"], "label": "ill"}
    return {
        "data": {**data, "client": "hospital"},
        "model": {"name": "mlp", "hidden": [4]},
        "local.batch_size": 8,
        "rounds": 2,
    }


def plan_with(values, **more):
    return make_plan(Config.read(values, more))


def by_hand(values, kind: str, place: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the standard deviation of the training rows that standardise the client at `place`."""
    clients = load_data(Config.read(values)).clients
    chosen = [clients[place]] if kind == "client" else list(clients)
    rows = np.concatenate([client.train.x for client in chosen]).astype(np.float64)
    scale = rows.std(0)
    scale[2] = 1.0  # of equal numbers
    return rows.mean(0), scale


@pytest.mark.parametrize("kind", ["client", "global"])
def test_by_training_rows_alone(values, kind: str) -> None:
    raw = load_data(Config.read(values)).clients
    found = plan_with(values, **{"data.standardize": kind}).population.clients
    for place in range(2):
        mean, scale = by_hand(values, kind, place)
        for part, before in zip(found[place].parts, raw[place].parts, strict=True):
            assert part.x == pytest.approx((before.x - mean) / scale, abs=1e-4)
            assert part.x.dtype == np.float32
    if kind == "client":
        assert found[0].train.x.mean(0) == pytest.approx(0, abs=1e-5)
        assert found[0].test.x.mean(0) != pytest.approx(0, abs=1e-5)


def test_unseen_clients_have_no_say(values, tmp_path) -> None:
    frame = pd.read_csv(tmp_path / "heart.csv")
    frame["hospital"] = [f"h{number}" for number in np.arange(120) // 40]
    frame.to_csv(tmp_path / "heart.csv", index=False)
    plan = plan_with(values, **{"data.standardize": "global", "unseen_clients": 1})
    raw = load_data(plan.config).clients
    seen = [raw[raw.place(client.id)] for client in plan.population.participants]
    rows = np.concatenate([client.train.x for client in seen])
    assert len(seen) == 2
    assert plan.population.standardisation.mean == pytest.approx(rows.mean(0), rel=1e-5)


def test_the_plan_says_it(values) -> None:
    text = run_summary(plan_with(values, **{"data.standardize": "client"}))
    assert "input shape 3, standardised by the training rows of the client" in text
    assert "2 classes (0 no, 1 yes)" in text
    assert "times as large" not in text


@pytest.mark.parametrize("kind", ["client", "global"])
def test_a_trained_model_takes_the_rows_of_the_table(values, kind: str, tmp_path) -> None:
    """The accuracy of the returned model on the raw test rows is the recorded one."""
    more = {"data.standardize": kind, "algorithm.name": "fedavg", "evaluate.points": ["downloaded"]}
    result = rayfed.run({**values, **more})
    raw = load_data(Config.read(values)).clients
    last = result.metrics.query("metric == 'accuracy' and split == 'test' and round == 2").set_index("client")
    for client in (0, 1):
        model = result.model(client)
        with torch.no_grad():
            logits = model(torch.from_numpy(raw[client].test.x))
        accuracy = (logits.argmax(1).numpy() == raw[client].test.y).mean()
        assert accuracy == pytest.approx(last.loc[client, "value"])
        saved = load_file(result.save(tmp_path / str(client), client) / "model.safetensors")
        mean, scale = by_hand(values, kind, client)
        assert saved["standardise.mean"].numpy() == pytest.approx(mean, rel=1e-5)
        assert saved["standardise.scale"].numpy() == pytest.approx(scale, rel=1e-5)
        assert any(name.startswith("model.") for name in saved)
    if kind == "global":
        assert result.model()[0].mean.numpy() == pytest.approx(mean, rel=1e-5)
    else:
        with pytest.raises(UsageError, match="standardises each client's inputs by its own; give client="):
            result.model()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data.standardize": "both"}, "data.standardize='both': known: client, global"),
        ({"data": {"name": "mini_digits", "standardize": "global"}}, "data.standardize: no such key"),
    ],
)
def test_other_words_and_datasets_are_refused(values, more, words: str) -> None:
    given = values | more if "data" in more else {**values, **more}
    with pytest.raises(UsageError) as refused:
        make_plan(Config.read(given))
    assert str(refused.value).startswith(words)


def test_images_are_refused(tmp_path, here) -> None:
    """As a table may have them."""
    import io

    from PIL import Image

    rows = []
    for number in range(20):
        stream = io.BytesIO()
        Image.new("RGB", (8, 8), (number, 0, 0)).save(stream, "PNG")
        rows.append({"image": {"bytes": stream.getvalue()}, "label": number % 2, "who": "ab"[number % 2 // 1]})
    pd.DataFrame(rows).to_parquet(tmp_path / "scans.parquet")
    data = {"name": "parquet", "file": str(tmp_path / "scans.parquet"), "client": "who", "standardize": "global"}
    with pytest.raises(
        UsageError, match=r"data\.standardize=global: takes columns of numbers, and the inputs of scans are"
    ):
        make_plan(Config.read({"data": data, "model.name": "mlp"}))


def test_several_parts_are_refused(values) -> None:
    values["data"]["features"] = {"vitals": ["age"], "labs": ["chol"]}
    population = load_data(Config.read(values))
    with pytest.raises(UsageError, match=r"data\.standardize=client: takes columns of numbers.*of several parts"):
        standardised(population, "client")
