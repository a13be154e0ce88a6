"""Documents that are made from the code are those that the code makes."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from algorithms_page import after_a_round, algorithms_page

import rayfed
from helpers.algorithm_cases import build_algorithm
from helpers.commands import command
from rayfed.augment import AUGMENTS
from rayfed.data.partitions import PARTITIONS
from rayfed.data.sets import DATASETS
from rayfed.metrics import METRICS
from rayfed.records.files import METRICS_SCHEMA, ROUNDS_SCHEMA
from rayfed.records.trials import FIXED
from rayfed.sampling import SAMPLERS

main = command("run")

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_algorithm_pages_are_up_to_date():
    assert PAGE.read_text() == algorithms_page(), "run make docs"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("fedavg", {}),
        ("harmofl", {"weights": 3 * 28 * 28}),  # the common amplitude, which comes in the setup
        ("faug", {"generated": 200 * (3 * 28 * 28 + 1)}),  # images and their classes
        ("fed_irm", {"updates": 1}),
        # the whole model with its projection head, which is there after the first round
        ("moon", {"previous": 224903 - 650 + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 10 + 10)}),
    ],
)
def test_what_a_client_keeps_is_what_it_has_after_the_setup_and_a_round(name, kept):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert after_a_round(build_algorithm({"name": name}))[1] == kept
    assert torch.equal(torch.get_rng_state(), state)


EXTENDING = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def anchored(tmp_path, monkeypatch):
    """Return the final weights by an algorithm's keys; the page's anchored.py is in the working directory."""
    (code,) = re.findall(r"```python\n# anchored.py\n(.*?)```", EXTENDING.read_text(), re.S)
    (tmp_path / "anchored.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(2):
        x = torch.randn(10, 4, generator=generator)
        clients.append({"train": (x, (x[:, 0] > 0).long()), "test": (x, (x[:, 0] > 0).long())})
    config = {"model": {"name": "mlp", "hidden": [3]}, "local": {"batch_size": 10, "lr": 0.5}}

    def weights(**algorithm: object) -> dict[str, torch.Tensor]:
        given = config | {"algorithm": algorithm, "rounds": 2}
        return rayfed.run(given, clients=clients, quiet=True).server["weights"]

    return weights


def test_the_clients_state_there_pulls_towards_where_the_client_left(anchored):
    fedper, free, pulled = (
        anchored(**algorithm)
        for algorithm in (
            {"name": "fedper"},
            {"name": "anchored:Anchored", "mu": 0},
            {"name": "anchored:Anchored", "mu": 0.2},
        )
    )
    for name, weights in fedper.items():
        assert torch.equal(free[name], weights)
        # There is one step per round, from the mean of where the clients ended the round before: their pulls cancel.
        torch.testing.assert_close(pulled[name], weights)
    algorithm = build_algorithm({"name": "anchored:Anchored", "mu": 0.2})
    work = {"weights": {"body": torch.tensor(3.0), "head": torch.tensor(1.0)}, "left": {"body": torch.tensor(1.0)}}
    corrected = algorithm.correct(None, {"body": torch.tensor(5.0), "head": torch.tensor(7.0)}, work, {})
    assert {name: value.item() for name, value in corrected.items()} == pytest.approx({"body": 5.4, "head": 7.0})


def test_own_pieces_work_as_they_stand_there(tmp_path, monkeypatch, capsys):
    text = EXTENDING.read_text()
    (code,) = re.findall(r"```python\n# own.py\n(.*?)```", text, re.S)
    (command,) = re.findall(r"^    rayfed run (data.name=own:.*)$", text, re.M)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(code)
    assert main([*command.split(), "data.classes=4", "model.width=8", "augment.share=0.2", "rounds=1"]) == 0
    metrics = pd.read_parquet("results/run/metrics")
    assert {"accuracy", "loss", "margin"} == set(metrics["metric"])
    assert set(metrics["client"]) == {0, 1, 2}
    (row,) = pd.read_parquet("results/run/trials").to_dict("records")
    assert (row["data.classes"], row["model.width"], row["augment.share"]) == (4, 8, 0.2)
    assert "augmented by own:Dropped" in capsys.readouterr().err


def test_the_sampler_works_as_it_stands_there(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n# stale.py\n(.*?)```", EXTENDING.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stale.py").write_text(code)
    quick = ["data={domains: [plain, font], per_domain: 60}", "model={name: mlp, hidden: [8]}", "local.batch_size=4"]
    clients = ["partition.name=iid", "partition.clients=4", "cohort=2", "rounds=2"]
    assert main([*quick, *clients, "sampling.name=stale:NewcomersFirst", "sampling.share=1"]) == 0
    metrics = pd.read_parquet("results/run/metrics").query("point == 'trained'")
    assert set(metrics["client"]) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("page", "parts"),
    [
        ("data.md", DATASETS),
        ("data.md", PARTITIONS),
        ("data.md", AUGMENTS),
        ("evaluation.md", METRICS),
        ("running.md", SAMPLERS),
    ],
)
def test_every_part_is_on_its_page(page, parts):
    text = (EXTENDING.parent / page).read_text()
    assert [name for name in parts if f"`{name}`" not in text and name != "none"] == [], f"add a line to docs/{page}"


RESULTS = Path(__file__).parents[2] / "docs" / "results.md"


@pytest.mark.parametrize(
    ("table", "columns"), [("metrics", METRICS_SCHEMA.names), ("rounds", ROUNDS_SCHEMA.names), ("trials", list(FIXED))]
)
def test_every_column_is_documented(table, columns):
    section = RESULTS.read_text().split(f"## Columns of `{table}`\n")[1].split("\n## ")[0]
    first = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z_]+)`", first)) == set(columns)
