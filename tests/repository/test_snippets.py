"""The snippets of the documentation are run page by page and in order, as a reader would run them.

A Python block whose first line is `# name.py`, and a YAML block whose first line is `# name.yaml`, are also written to
that file. Commands are run in `test_commands_run`, with fewer rounds where a page's own are many.
"""

import functools
import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import rayfed
from helpers.commands import command
from helpers.ray_session import start_ray
from rayfed.algorithms.fedavg import FedAvg
from rayfed.experiments.config import Config
from rayfed.experiments.space import read_space
from rayfed.reports.render import render

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PART = re.compile(
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$|^    (?P<command>(?:rayfed |make demo)[^\n]*)$",
    re.DOTALL | re.MULTILINE,
)
NAME = re.compile(r"# (\w+\.(?:py|yaml))\b")
IN_ONE_PROCESS = ["placement.hosts=0", "search.max_concurrent=1"]


class Snippet(NamedTuple):
    language: str  # "python", "yaml" or "command"
    text: str


def snippets(page: str) -> list[Snippet]:
    found = []
    for match in PART.finditer((ROOT / page).read_text()):
        language, code, line = match.group("language", "code", "command")
        if line is not None:
            line = line.replace("make demo", "rayfed sweep demo")
            found.append(Snippet("command", re.sub(r"\s+#.*$", "", line)))
        elif language in ("python", "yaml"):
            found.append(Snippet(language, code))
    return found


def of_language(language: str) -> list[str]:
    return [page for page in PAGES if any(snippet.language == language for snippet in snippets(page))]


def write_named(snippet: Snippet) -> None:
    name = NAME.match(snippet.text)
    if name:
        Path(name[1]).write_text(snippet.text)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "local")  # another test's cluster may be running
    yield tmp_path
    for path in tmp_path.glob("*.py"):  # so that another page's module of this name is imported anew
        sys.modules.pop(path.stem, None)


QUICK = ["data={domains: [plain, font], per_domain: 60}", "model={name: mlp, hidden: [8]}"]


def methods() -> None:
    """Write results of three methods: one is scored once more after its fine-tuning, as round 4, and one has mu."""
    for method in ("seed=0", "seed=1", "algorithm.name=fedbabu", "algorithm={name: fedprox, mu: 0.1}"):
        assert command("run")([*QUICK, "rounds=3", "experiment=scanners", method]) == 0


def question() -> None:
    assert command("run")([*QUICK, "rounds=6", "experiment=question"]) == 0


def skew() -> None:
    values = ["partition={name: dirichlet, clients: 2, min_size: 20, alpha: 1}", "data={per_domain: 60}"]
    quick = ["model={name: mlp, hidden: [8]}", "rounds=2"]
    assert command("run")([*values, *quick, "experiment=skew", "algorithm={name: fedprox, mu: 0.1}"]) == 0


HOSPITALS = {"cleveland": 60, "hungarian": 60, "switzerland": 40, "va": 50}


def heart_disease() -> None:
    """Put the four files of UCI's Heart Disease into the folder, or else random ones of the same form."""
    folder = Path("heart_disease")
    folder.mkdir()
    real = Path(os.environ.get("RAYFED_DATA", "")) / "heart_disease"
    random = np.random.default_rng(0)
    for hospital, patients in HOSPITALS.items():
        name = f"processed.{hospital}.data"
        if (real / name).is_file():
            (folder / name).write_bytes((real / name).read_bytes())
            continue
        rows = random.normal(50, 10, (patients, 14)).round(1)
        rows[:, 13] = (rows[:, 0] > 50) * 2
        cells = [["?" if column in (10, 11, 12) else f"{value:g}" for column, value in enumerate(row)] for row in rows]
        (folder / name).write_text("".join(",".join(row) + "\n" for row in cells))


BEFORE = {
    "docs/results.md": methods,
    "docs/tour.md": question,
    "docs/compare-fairly.md": skew,
    "docs/a-study.md": heart_disease,
}


def executed(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page in one namespace, and return it."""
    if page in BEFORE:
        BEFORE[page]()
    namespace: dict[str, Any] = {}
    for snippet in snippets(page):
        if snippet.language == "python":
            write_named(snippet)
            exec(compile(snippet.text, page, "exec"), namespace)
    return namespace


SEEN = {
    "docs/python.md",
    "docs/results.md",
    "docs/migrating.md",
    "docs/extending.md",
    "docs/ray-tune.md",
}  # run below, where their outcome is looked at
WITH_COMMANDS = {"docs/own-data.md", "docs/debug-a-number.md"}  # run below, between their commands


@pytest.mark.parametrize("page", sorted(set(of_language("python")) - SEEN - WITH_COMMANDS))
def test_python_blocks_run(page):
    executed(page)


def test_the_method_of_the_page_on_extending_keeps_the_contract():
    executed("docs/extending.md")["test_the_contract"]()


@pytest.mark.parametrize("page", of_language("yaml"))
def test_search_spaces_are_valid(page):
    spaces = [snippet.text for snippet in snippets(page) if snippet.language == "yaml"]
    for code in spaces:
        space = read_space(yaml.safe_load(code))
        assert [Config.read(values) for values in space.trials()]


def test_the_python_page_does_what_it_says():
    found = executed("docs/python.md")
    assert set(found["result"].metrics["domain"]) == {"0", "1", "3"}
    assert set(found["tables"].trials["trial"]) == {found["result"].trial}
    assert len(found["swept"].trials) == 8
    assert isinstance(found["trained"], torch.nn.Sequential)


def test_the_recipes_agree_with_the_report():
    found = executed("docs/results.md")
    assert list(found["table"].columns) == ["mean", "std", "count"]
    assert found["table"]["count"].to_dict() == {("fedavg", "-"): 2, ("fedbabu", "-"): 1, ("fedprox", 0.1): 1}
    assert list(found["domains"].index) == list(found["table"].index)
    assert list(found["curve"].columns) == list(found["table"].index)
    assert found["curve"].index.tolist() == [1, 2, 3, 4]
    for recipe, rule in (("table", "final"), ("selected", "selected")):
        report = pd.read_csv(io.StringIO(render("results", "scanners", format="csv")))
        average = report[report["rule"] == rule].query("quantity == 'mean' and split == 'test' and not unseen")
        assert found[recipe]["mean"].tolist() == pytest.approx(average["mean"].tolist())
        assert found[recipe]["std"].tolist() == pytest.approx(average["sd"].tolist(), nan_ok=True)
    assert found["failed"].empty
    assert list(found["restarts"].columns) == ["trial", "event", "detail", "redone", "seconds"]


class Spy(FedAvg):
    averaged = ()

    def aggregate(self, ctx, server, replies):
        each = {str(i): reply.up["weights"] for i, reply in enumerate(replies.each)}
        return server | {"each": each, "first": server["weights"]}


def test_the_update_of_fednova_on_the_page_on_migrating_is_the_papers():
    """By the rule, computed from the clients' own weights, after 1, 2 and 4 steps."""
    executed("docs/migrating.md")
    generator = torch.Generator().manual_seed(0)
    clients = []
    for size in (10, 20, 40):
        x = torch.randn(size, 4, generator=generator)
        clients.append({"train": (x, (x[:, 0] > 0).long()), "test": (x, (x[:, 0] > 0).long())})

    def run(name: str, **more: Any) -> Any:
        config = {"algorithm.name": name, "experiment": name.replace(":", "_"), "rounds": 1, "local.batch_size": 10}
        return rayfed.run(config | more, clients=clients, model=lambda: torch.nn.Linear(4, 2), quiet=True).server

    spied, nova = run(f"{__name__}:Spy"), run("fednova:FedNova")
    shares, steps = torch.tensor([10, 20, 40]) / 70, torch.tensor([1.0, 2.0, 4.0])
    for name, first in spied["first"].items():
        changes = torch.stack([(spied["each"][str(i)][name] - first) / steps[i] for i in range(3)])
        mean = torch.tensordot(shares, changes, dims=1)
        torch.testing.assert_close(nova["weights"][name], first + (shares * steps).sum() * mean)
    with pytest.raises(rayfed.UsageError, match=r"needs plain SGD \(local.momentum=0\)"):
        run("fednova:FedNova", **{"local.momentum": 0.9})


def test_files_of_pfllib_are_clients(own_folder):
    """Files as PFLlib's `save_file` writes them: one pickled dict for each client and split."""
    rng = np.random.default_rng(0)
    sizes = {"train": (30, 20), "test": (10, 6)}
    for split, of_clients in sizes.items():
        (own_folder / split).mkdir()
        for number, size in enumerate(of_clients):
            part = {"x": rng.normal(size=(size, 1, 4, 4)), "y": rng.integers(0, 3, size)}
            np.savez_compressed(own_folder / split / f"{number}.npz", data=part)
    clients = executed("docs/migrating.md")["pfllib_clients"](own_folder)
    assert [{split: len(client[split][1]) for split in sizes} for client in clients] == [
        {"train": 30, "test": 10},
        {"train": 20, "test": 6},
    ]
    result = rayfed.run({"model": {"name": "mlp", "hidden": [4]}, "rounds": 1}, clients=clients, quiet=True)
    assert result.metrics.query("split == 'test' and metric == 'accuracy'")["n"].tolist() == [10, 6]
    assert "at the last evaluated round" in result.report()


# Pages whose commands are run, with values that are appended to each `rayfed run` and `rayfed sweep`
RUN = {
    "README.md": ["rounds=1", "data.per_domain=60", "seeds=[0,1]"],
    "docs/tour.md": [],
    "docs/own-data.md": ["rounds=1", "seeds=[0,1]"],
    "docs/a-study.md": ["rounds=1", "seeds=[0,1]"],
    "docs/choose-a-partition.md": [],
    "docs/compare-fairly.md": ["rounds=2", "seeds=[0,1]"],
    "docs/debug-a-number.md": [],
    "docs/migrating.md": ["data.per_domain=60"],
}
LONG = {"README.md", "docs/tour.md", "docs/compare-fairly.md"}


@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.slow if page in LONG else ()) for page in RUN])
def test_commands_run(page):
    """Every command of a page, in order, after the files and among the blocks that precede it."""
    run_commands(page, ("run", "sweep", "partition", "report"), RUN[page], IN_ONE_PROCESS)
    assert list(Path("results").iterdir())


@pytest.mark.ray
def test_the_page_on_ray_tune(own_folder):
    start_ray()
    namespace = executed("docs/ray-tune.md")
    assert namespace["frame"]["config/algorithm.mu"].dropna().tolist() == [0.1, 1.0]
    assert not namespace["grid"].errors
    assert len(rayfed.read_results("results", "own").trials) == 2


@pytest.mark.ray
@pytest.mark.parametrize("page", ["docs/tour.md", pytest.param("docs/own-data.md", marks=pytest.mark.slow)])
def test_sweeps_run_on_ray(page, capsys):
    """As they stand, though shortened, and in another folder than the one in which Ray was started."""
    start_ray()
    run_commands(page, ("sweep",), ["rounds=1", "seeds=[0]"], [])
    trials = pd.concat([rayfed.read_results("results", home.name).trials for home in Path("results").iterdir()])
    assert trials["status"].unique().tolist() == ["done"]


def run_commands(page: str, names: Sequence[str], extra: Sequence[str], of_sweeps: Sequence[str]) -> None:
    """Run the commands `names` of a page, with values that are appended, and its blocks; their sweeps are small.

    No HTML page is written: that takes ten seconds, and test_page.py looks at one.
    """
    if page == "docs/a-study.md":
        heart_disease()
    small_sweep = functools.partial(rayfed.sweep, rounds=1, seeds=[0], search={"max_concurrent": 1})
    namespace: dict[str, Any] = {}
    for snippet in snippets(page):
        if snippet.language != "command":
            write_named(snippet)
            if snippet.language == "python":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(rayfed, "sweep", small_sweep)
                    exec(compile(re.sub(r', html="[^"]*"', "", snippet.text), page, "exec"), namespace)
            continue
        _, name, *arguments = shlex.split(re.sub(r" --html \S+", "", snippet.text))
        if name not in names or "--help" in arguments:
            continue
        if name in ("run", "sweep"):
            has_other_data = "flamby_heart" in arguments
            left_out = [key for key, is_out in (("seeds", name != "sweep"), ("data.", has_other_data)) if is_out]
            arguments += [value for value in extra if not value.startswith(tuple(left_out))]
            arguments += of_sweeps if name == "sweep" else []
        assert command(name)(arguments) == 0, snippet.text
