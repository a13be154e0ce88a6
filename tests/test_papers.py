"""The papers' tables: every file is whole and consistent, the columns are worked out rightly, and the command runs."""

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rayfed.config import Config
from rayfed.errors import UsageError
from rayfed.results.read import Tables
from rayfed.sources import merged

HOME = Path(__file__).parents[1] / "benchmarks" / "papers"
NAMES = sorted(path.stem for path in HOME.glob("*.yaml"))


@pytest.fixture(autouse=True)
def _folder_of_scripts(monkeypatch):
    """As Python does for a script: its own folder comes first."""
    monkeypatch.setattr(sys, "path", [str(HOME), *sys.path])


@pytest.fixture
def papers():
    return importlib.import_module("_tables")


@pytest.fixture
def command():
    return importlib.import_module("run")


@pytest.fixture
def file_of_clients(tmp_path, monkeypatch):
    """A file like the published split, with five clients of 10 i + 10 examples, the last of each for testing."""
    sizes = [10 * client + 10 for client in range(5)]
    client = np.repeat(np.arange(5), sizes)
    is_test = np.concatenate([np.arange(size) >= size - 5 for size in sizes])
    images = np.random.default_rng(0).integers(0, 255, (len(client), 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "few.npz", images=images, labels=np.arange(len(client)) % 10, client=client, is_test=is_test)
    monkeypatch.setenv("RAYFED_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # the cut copy goes into data/ there
    return "few.npz"


def fake_table(papers, **content):
    row = {"arm": {"algorithm.name": "fedavg"}, "published": {"a": 50.0}}
    other = {"arm": {"algorithm.name": "scaffold"}, "published": {"a": [60.0, 1.0]}}
    values = {
        "title": "T",
        "paper": "P",
        "setting": "S.",
        "columns": {"a": {"split": "test", "over": "mean", "rounds": "last"}},
        "rows": {"one": row, "two": other},
        "claims": ["a: two > one + 5"],
        "small": {"note": "N.", "seeds": [0, 1]},
        "full": {"note": "N."},
    } | content
    return papers.PaperTable("t", values, tuple(papers._claim("t", values, text) for text in values["claims"]))


def lines(rows):
    columns = ["row", "seed", "column", "value"]
    return pd.DataFrame(rows, columns=columns)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["full", "small"])
def test_configurations_are_valid_and_differ(name, scale, papers, monkeypatch, tmp_path):
    table = papers.read_table(name)
    monkeypatch.setenv("RAYFED_DATA", str(tmp_path))
    monkeypatch.setattr(papers, "_capped", lambda path, train, test: path)
    space = table.space(scale, {})
    trees = [Config.read(values).tree() for values in space.trials()]
    assert len(trees) == len(space.seeds) * len(table.arms(scale)) > 3
    assert all(trees.count(tree) == 1 for tree in trees)
    assert len(space.seeds) >= 3
    assert {tree["experiment"] for tree in trees} == {f"{name}_{scale}"}
    assert table.content[scale]["note"].endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_claims_are_what_the_paper_printed(name, papers):
    """The order, that is: margins are for other data. Rows that the paper did not print are left out."""
    table = papers.read_table(name)
    assert len(table.claims) > 3
    for claim in table.claims:
        more, less = (table.published(row, claim.column) for row in (claim.more, claim.less))
        assert more is None or less is None or more[0] > less[0], claim.text
    assert any(table.published(c.more, c.column) and table.published(c.less, c.column) for c in table.claims)


def test_published_numbers_are_those_printed(papers):
    tables = [papers.read_table(name) for name in NAMES]
    assert [row for table in tables for row in table.rows if not table.rows[row]["published"]] == ["ADCOL mu=0"]
    assert papers.read_table("dbe_table2").published("DBE", "accuracy") == (43.32, None)
    assert papers.read_table("adcol_table1").published("ADCOL", "AVG") == (80.2, 0.5)
    assert papers.read_table("feddebias_table3").published("full", "worst") == (77.13, None)
    assert papers.read_table("feddebias_table3").published("C1", "worst") is None
    assert papers.read_table("augmentation_table3").published("VM 45", "OOD") == (98.3, None)


def test_columns_are_worked_out_by_hand(papers):
    table = fake_table(
        papers,
        columns={
            "mean": {"split": "test", "over": "mean", "rounds": "last"},
            "weighted": {"split": "test", "over": "weighted", "rounds": "best"},
            "worst": {"split": "test", "over": "worst", "rounds": "best5"},
            "x": {"split": "test", "over": {"domain": "x"}, "rounds": "last"},
            "ood": {"split": "ood", "over": "mean", "rounds": "last"},
        },
        rows={"one": {"arm": {"algorithm.name": "fedavg"}, "published": {"mean": 1}}},
        claims=[],
    )
    space = table.space("small", {"seeds": [3]})
    trial = papers.trial_name(Config.read(merged(space.arms[0][0], {"seed": 3})))
    x = dict(enumerate([0.1, 0.9, 0.5, 0.6, 0.7, 0.8, 0.2], start=1))  # by round; y is 0.3 throughout
    point = {"trial": trial, "metric": "accuracy", "point": "global", "split": "test"}
    rows = [point | {"round": r, "domain": "x", "value": v, "n": 30} for r, v in x.items()]
    rows += [point | {"round": r, "domain": "y", "value": 0.3, "n": 10} for r in x]
    rows += [point | {"round": 7, "domain": "x", "value": 1.0, "n": 9, **other} for other in NOT_COUNTED]
    trials = pd.DataFrame([{"trial": trial, "status": "done", "scored": "global"}])
    found = papers.measure(table, "small", space, Tables(pd.DataFrame(rows), pd.DataFrame(), trials))
    by_column = found.set_index("column")["value"]
    assert set(found["seed"]) == {3}
    assert by_column["mean"] == pytest.approx(25)
    assert by_column["weighted"] == pytest.approx(100 * (0.9 * 30 + 0.3 * 10) / 40)
    assert by_column["worst"] == pytest.approx(30)  # the lower of 0.3 and x: five rounds at 0.3, then 0.2 and 0.1
    assert by_column["x"] == pytest.approx(20)
    assert "ood" not in by_column


NOT_COUNTED = ({"metric": "loss"}, {"point": "trained"}, {"split": "val"}, {"trial": "another"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([50, 52, 60, 64], "holds (difference +11.0 ± 1.4, 2 seeds)"),
        ([50, 52, 52, 54], "does not hold (difference +2.0 ± 0.0, 2 seeds)"),
        ([50, 52, 52, 64], "holds, within one sd (difference +7.0 ± 7.1, 2 seeds)"),
        ([50, None, 70, 64], "holds (difference +20.0; one seed)"),
        ([50, 52, None, None], "not measured"),
    ],
)
def test_claims_compare_rows_at_the_same_seed(values, words, papers, command):
    claim = papers.Claim("a: two > one + 5", "a", "two", "one", 5.0)
    rows = [("one", 0), ("one", 1), ("two", 0), ("two", 1)]
    found = lines([(*row, "a", value) for row, value in zip(rows, values, strict=True) if value is not None])
    assert command.verdict(claim, found) == f"a: two > one + 5: {words}"


def test_measured_numbers_stand_beside_published_ones(papers, command):
    found = lines([("one", 0, "a", 40.0), ("one", 1, "a", 42.0), ("two", 0, "a", 70.0)])
    shown = command.render(fake_table(papers), "small", found, "the command", markdown=True)
    assert "| one | a | 50.00 | 41.0 ± 1.4 | -9.0 |" in shown
    assert "| two | a | 60.00 ± 1.00 | 70.0 | +10.0 |" in shown
    assert "Seeds 0, 1;" in shown
    assert shown.endswith("\n    the command")


def test_claims_name_columns_and_rows(papers):
    for wrong in ("b: two > one", "a: two > three", "a: two < one", "two > one"):
        with pytest.raises(UsageError, match="claims"):
            fake_table(papers, claims=[wrong])


def test_a_capped_file_keeps_that_many_of_every_client(papers, file_of_clients, tmp_path):
    table = fake_table(
        papers, small={"cap": {"train": 12, "test": 2}, "data": {"name": "npz", "file": file_of_clients}}
    )
    values = table.space("small", {}).arms[0][0]
    with np.load(values["data"]["file"]) as cut, np.load(tmp_path / file_of_clients) as whole:
        sizes = pd.crosstab(cut["client"], cut["is_test"])
        assert sizes[False].tolist() == [5, 12, 12, 12, 12]
        assert sizes[True].tolist() == [2] * 5
        kept = {image.tobytes() for image in cut["images"]}
        assert len(kept) == len(cut["images"])
        assert kept <= {image.tobytes() for image in whole["images"]}


def test_without_the_folder_of_data_the_command_says_so(command, monkeypatch, capsys):
    monkeypatch.delenv("RAYFED_DATA", raising=False)
    assert command.main(["dbe_table2", "--small"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: data.file=fashion_mnist_dir0.1_20clients.npz: set the environment"
    )


def test_unknown_tables_are_refused_and_known_ones_listed(command, capsys):
    assert command.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == NAMES
    assert command.main(["table9"]) == 2
    assert "adcol_table1" in capsys.readouterr().err


@pytest.mark.ray
def test_a_table_is_measured_and_printed(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "RAYFED_DATA", str(tmp_path))
    tiny = ["rounds=1", "seeds=[0]", "placement.hosts=0", "data.per_domain=60", "model.width=0.1", "local.epochs=1"]
    assert command.main(["adcol_table1", "--small", "--markdown", *tiny, "local.batch_size=8"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("| ADCOL | AVG | 80.20 ± 0.50 |"))
    here = float(row.split("|")[4])
    assert 0 <= here <= 100
    assert row.split("|")[5].strip() == f"{here - 80.2:+.1f}"
    assert "- AVG: ADCOL > SOLO: " in out
    assert "    python benchmarks/papers/run.py adcol_table1 --small rounds=1" in out
