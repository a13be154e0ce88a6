"""The README's own method is run as it stands there, and its commands exist."""

import re
from itertools import takewhile
from pathlib import Path

import pytest
import torch

import rayfed
from helpers.algorithm_cases import build_algorithm
from helpers.federations import blobs, blueprint, simulate
from rayfed.experiments.sources import from_file
from rayfed.experiments.space import read_space
from rayfed.reports.render import render

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DEMO = ROOT / "tune_spaces" / "demo.yaml"


@pytest.fixture
def own_method(tmp_path, monkeypatch):
    """The README's mine.py, in a folder that the user stands in."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if block.startswith("# mine.py"))
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return code


def test_opens_with_the_two_commands():
    first = re.findall(r"^    (make .*?)(?: +#.*)?$", README, re.M)[:2]
    assert first == ["make demo", "make test"]


def test_says_its_strongest_sentence_first_and_the_files_to_read():
    assert "the same bits on\nany number of hosts" in README.split("\n\n")[1]
    assert len(re.findall(r"\]\((rayfed/[a-z/_]+\.py)\)", README.split("## Where to read on")[1])) == 6
    assert len(README.split()) <= 1000


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
def test_the_demo_prints_the_table(tmp_path, monkeypatch):
    """The same rows and columns in the same order; another type of CPU may change decimals."""
    monkeypatch.chdir(tmp_path)
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


def test_own_method_is_short_and_runs(own_method):
    assert len(own_method.splitlines()) < 40
    algorithm = build_algorithm({"name": "mine:Median", "step_size": 0.8})
    population = blobs(3)
    server, records = simulate(blueprint(algorithm, population, rounds=1), population)
    assert {score.point for score in records[-1].scores} >= {"global"}
    assert all(torch.isfinite(tensor).all() for tensor in server.state["weights"].values())


def test_own_method_takes_the_median(own_method):
    algorithm = build_algorithm({"name": "mine:Median"})
    from rayfed.algorithm import Replies, Reply

    each = [Reply(i, 1, {"weights": {"w": torch.tensor([value])}}) for i, value in enumerate((0.0, 1.0, 50.0))]
    new = algorithm.aggregate(None, {"weights": {"w": torch.tensor([9.0])}}, Replies({}, each))
    assert new["weights"]["w"].item() == 1.0
