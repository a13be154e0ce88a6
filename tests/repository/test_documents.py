"""Documents that are made from the code, and the README's and the pages' own methods, are what they say."""

import re
from itertools import takewhile
from pathlib import Path

import pandas as pd
import pytest
import torch
from algorithms_page import after_a_round, algorithms_page

import rayfed
from helpers.algorithm_cases import build_algorithm
from helpers.commands import command
from helpers.federations import blobs, blueprint, simulate
from rayfed.augment import AUGMENTS
from rayfed.data.partitions import PARTITIONS
from rayfed.data.sets import DATASETS
from rayfed.experiments.sources import from_file
from rayfed.experiments.space import read_space
from rayfed.metrics import METRICS
from rayfed.records.tables import METRICS_SCHEMA, ROUNDS_SCHEMA
from rayfed.records.trial_rows import FIXED
from rayfed.reports.render import render
from rayfed.sampling import SAMPLERS

main = command("run")

ROOT = Path(__file__).parents[2]
DOCS, DEMO = ROOT / "docs", ROOT / "tune_spaces" / "demo.yaml"
README, EXTENDING = (ROOT / "README.md").read_text(), (DOCS / "extending.md").read_text()


def test_algorithm_pages_are_up_to_date():
    assert (DOCS / "algorithms.md").read_text() == algorithms_page(), "run make docs"


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


def write_module(page: str, name: str) -> str:
    """Write the module of that name on a page into the working directory, and return its code."""
    (code,) = re.findall(rf"```python\n(# {name}\.py\n.*?)```", page, re.S)
    Path(f"{name}.py").write_text(code)
    return code


@pytest.fixture
def anchored(here):
    """Return the final weights by an algorithm's keys."""
    write_module(EXTENDING, "anchored")
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


def test_own_pieces_work_as_they_stand_there(here, capsys):
    write_module(EXTENDING, "own")
    (command,) = re.findall(r"^    rayfed run (data.name=own:.*)$", EXTENDING, re.M)
    assert main([*command.split(), "data.classes=4", "model.width=8", "augment.share=0.2", "rounds=1"]) == 0
    metrics = pd.read_parquet("results/run/metrics")
    assert {"accuracy", "loss", "margin"} == set(metrics["metric"])
    assert set(metrics["client"]) == {0, 1, 2}
    (row,) = pd.read_parquet("results/run/trials").to_dict("records")
    assert (row["data.classes"], row["model.width"], row["augment.share"]) == (4, 8, 0.2)
    assert "augmented by own:Dropped" in capsys.readouterr().err


def test_the_sampler_works_as_it_stands_there(here):
    write_module(EXTENDING, "stale")
    quick = ["data={domains: [plain, font], per_domain: 60}", "model={name: mlp, hidden: [8]}", "local.batch_size=4"]
    clients = ["partition.name=iid", "partition.clients=4", "cohort=2", "rounds=2"]
    assert main([*quick, *clients, "sampling.name=stale:NewcomersFirst", "sampling.share=1"]) == 0
    metrics = pd.read_parquet("results/run/metrics").query("point == 'trained'")
    assert set(metrics["client"]) == {0, 1, 2, 3}
    (row,) = pd.read_parquet("results/run/trials").to_dict("records")
    assert (row["sampling.name"], row["sampling.share"]) == ("stale:NewcomersFirst", 1)
    assert row["code_hash"]


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
    text = (DOCS / page).read_text()
    assert [name for name in parts if f"`{name}`" not in text and name != "none"] == [], f"add a line to docs/{page}"


@pytest.mark.parametrize(
    ("table", "columns"), [("metrics", METRICS_SCHEMA.names), ("rounds", ROUNDS_SCHEMA.names), ("trials", list(FIXED))]
)
def test_every_column_is_documented(table, columns):
    section = (DOCS / "results.md").read_text().split(f"## Columns of `{table}`\n")[1].split("\n## ")[0]
    first = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z_]+)`", first)) == set(columns)


def demo_table() -> list[list[str]]:
    """Return the rows of the README's table of the demo, the header and the line below it first."""
    lines = README.splitlines()
    start = next(i for i, line in enumerate(lines) if "| AVG | worst |" in line and "blended" in line)
    return [line.split(" | ") for line in takewhile(lambda line: line[:1] == "|", lines[start:])]


def test_the_table_has_the_demos_rows_in_the_reports_order():
    trials = list(read_space(from_file(DEMO)).trials())
    settings = [(trial["algorithm"]["name"], trial["algorithm"].get("mu")) for trial in trials]
    expected = [name if mu is None else f"{name} mu={mu:g}" for name, mu in sorted(set(settings), key=str)]
    rows = [line[0].removeprefix("| ").removesuffix(" †") for line in demo_table()[2:]]
    assert rows == expected
    assert {trial["seed"] for trial in trials} == {0, 1, 2}  # "over three seeds"


@pytest.mark.slow
def test_the_demo_prints_the_table(here):
    """The same rows and columns in the same order; another type of CPU may change decimals."""
    for values in read_space(from_file(DEMO)).trials():
        rayfed.run(values, keep_state=False)
    printed = [
        line.split(" | ") for line in render("results", "demo", format="markdown").splitlines() if line[:1] == "|"
    ]
    shown = demo_table()
    assert [line[0] for line in shown] == [line[0] for line in printed]
    assert shown[:2] == printed[:2]
    average = shown[0].index("AVG")
    for one, other in zip(shown[2:], printed[2:], strict=True):
        means = [float(line[average].strip("*").split(" ± ")[0]) for line in (one, other)]
        assert means[0] == pytest.approx(means[1], abs=2.0)


def test_own_method_is_short_and_runs(here):
    assert len(write_module(README, "mine").splitlines()) < 40
    algorithm = build_algorithm({"name": "mine:Median", "step_size": 0.8})
    population = blobs(3)
    server, records = simulate(blueprint(algorithm, population, rounds=1), population)
    assert {score.point for score in records[-1].scores} >= {"global"}
    assert all(torch.isfinite(tensor).all() for tensor in server.state["weights"].values())


def test_own_method_takes_the_median(here):
    write_module(README, "mine")
    algorithm = build_algorithm({"name": "mine:Median"})
    from rayfed.algorithm import Replies, Reply

    each = [Reply(i, 1, {"weights": {"w": torch.tensor([value])}}) for i, value in enumerate((0.0, 1.0, 50.0))]
    new = algorithm.aggregate(None, {"weights": {"w": torch.tensor([9.0])}}, Replies({}, each))
    assert new["weights"]["w"].item() == 1.0
