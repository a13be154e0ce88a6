"""The harness of `python -m references`: it finds agreement and difference, with no checkout of another project."""

import copy
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]

METHODS = {
    *("fedavg", "fedprox", "scaffold", "moon", "feddyn", "fedbn", "fedper", "fedrep", "fedrod", "fedbabu", "ditto"),
    *("apfl", "pfedme", "per_fedavg", "fedfomo", "apple", "fedproto", "fedgen", "dbe", "fedavgm", "fedadam", "fedyogi"),
    *("fedadagrad", "harmofl", "fedreg", "vhl", "afl", "adcol", "gen_afl", "vm", "fed_irm", "feddebias", "fraug"),
    *("fedmix", "erm", "central_group_dro", "mm_rex", "v_rex", "irm"),
}


def module(name):
    return importlib.import_module(f"references.{name}")


def fedavg(*, share=None, lr=None, epochs=None, momentum=0.0):
    """A plain FedAvg loop on the harness's batches; every argument makes it wrong.

    Args:
        share: The weight of a client with n of `total` examples in the mean.
        lr: Another learning rate.
        epochs: Another number of local epochs.
    """
    share = share or (lambda n, total, clients: n / total)

    def theirs(checkout, trace):
        setting, feed = trace.setting, module("harness").Feed(trace)
        weights = {name: value.clone() for name, value in trace.initial.state_dict().items()}
        for round in range(1, setting.rounds + 1):
            feed.start(round)
            cohort, summed = trace.cohort(round), dict.fromkeys(weights, 0.0)
            total = sum(trace.examples(i) for i in cohort)
            for i in cohort:
                model = copy.deepcopy(trace.initial)
                model.load_state_dict(weights)
                sgd = torch.optim.SGD(model.parameters(), lr=lr or setting.lr, momentum=momentum)
                for _ in range(epochs or setting.epochs):
                    for x, y in feed.loader(i):
                        sgd.zero_grad()
                        F.cross_entropy(model(x), y).backward()
                        sgd.step()
                for name, value in model.state_dict().items():
                    summed[name] = summed[name] + share(trace.examples(i), total, len(cohort)) * value
            weights = summed
        feed.finish()
        return {"server": weights}

    return theirs


def case(theirs, differs="", **setting):
    harness = module("harness")
    chosen = harness.Setting({"name": "fedavg"}, **setting)
    return harness.Case("fedavg", "own", chosen, theirs, harness.server_weights, differs=differs)


@pytest.mark.parametrize("setting", [{}, {"cohort": 2, "rounds": 3}, {"network": "cnn", "sizes": (10, 15)}])
def test_an_equal_loop_agrees(setting):
    result = module("harness").compare(case(fedavg(), **setting), None)
    assert result.agrees
    assert result.as_expected
    assert result.difference < 1e-6 < 1e-2 < result.moved


@pytest.mark.parametrize(
    "change",
    [{"share": lambda n, total, clients: 1 / clients}, {"lr": 0.1001}, {"momentum": 0.1}],
    ids=["unweighted mean", "learning rate", "momentum"],
)
def test_a_wrong_loop_is_reported(change):
    result = module("harness").compare(case(fedavg(**change)), None)
    assert not result.agrees
    assert not result.as_expected
    assert result.where.startswith("server: ")
    text = module("report").line(result)
    assert "differs" in text
    assert "NOT EXPECTED" in text


def test_a_known_difference_must_be_there():
    harness = module("harness")
    known = harness.compare(case(fedavg(lr=0.2), differs="they use another learning rate"), None)
    assert known.as_expected
    assert module("report").reasons([known]) == ["fedavg / own: they use another learning rate"]
    assert not harness.compare(case(fedavg(), differs="they use another learning rate"), None).as_expected


@pytest.mark.parametrize(("epochs", "message"), [(1, "left 2 batches of client 0 unused"), (3, "wants more batches")])
def test_other_numbers_of_steps_are_reported(epochs, message):
    with pytest.raises(module("harness").OutOfStep, match=message):
        module("harness").compare(case(fedavg(epochs=epochs)), None)


def test_agreement_without_training_is_refused():
    with pytest.raises(module("harness").OutOfStep, match="moved no weight"):
        module("harness").compare(case(fedavg(), lr=1e-7), None)


def test_differences_are_found():
    harness = module("harness")
    one = {"server": {"w": torch.tensor([1.0, 2.0])}}
    assert harness.largest_difference(one, {"server": {"w": torch.tensor([1.0, 2.5])}}) == (0.5, "server: w")
    assert harness.largest_difference(one, {"server": {"w": torch.tensor([1.0, float("nan")])}})[0] == float("inf")
    for other in ({"client": one["server"]}, {"server": {"v": one["server"]["w"]}}, {"server": {"w": torch.zeros(3)}}):
        with pytest.raises(harness.OutOfStep):
            harness.largest_difference(one, other)
    with pytest.raises(harness.OutOfStep):
        harness.largest_difference({}, {})


# Checkouts


@pytest.fixture
def checkout(tmp_path):
    """A checkout of a project with a module `utils` and a package `flcore`, which imports what is not installed."""
    (tmp_path / "utils.py").write_text("import missing_package\nfrom missing_package.deep import tool\nVALUE = 7\n")
    (tmp_path / "flcore").mkdir()
    (tmp_path / "flcore" / "server.py").write_text("from utils import VALUE\n\nclass Server:\n    value = VALUE\n")
    return module("checkout").Checkout("pfllib", tmp_path, "abc1234")


def test_modules_of_a_checkout_are_imported_and_forgotten(checkout, monkeypatch):
    names = module("checkout")
    own = SimpleNamespace(VALUE=1)
    monkeypatch.setitem(sys.modules, "utils", own)
    before, here = set(sys.modules), os.getcwd()
    state = torch.get_rng_state()
    with checkout.importing(".", names.anything("missing_package.deep")) as load:
        assert load("flcore.server", "Server").value == 7
        torch.rand(3)
    assert sys.modules["utils"] is own
    assert set(sys.modules) == before
    assert os.getcwd() == here
    assert str(checkout.path) not in sys.path
    assert torch.equal(torch.get_rng_state(), state)
    assert not list(checkout.path.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("flcore.client",), "flcore/client.py is missing"),
        (("flcore.server",), "flcore.server cannot be imported (No module named 'missing_package')"),
    ],
)
def test_what_is_missing_is_one_line(checkout, wanted, message):
    with (
        checkout.importing() as load,
        pytest.raises(module("checkout").Unavailable) as error,
    ):
        load(*wanted)
    assert str(error.value) == f"--pfllib {checkout.path}: {message}; this was written for commit abc1234"


def test_lines_of_a_function_are_replaced_in_memory(checkout):
    source = "BASE = 10\n\nclass Server:\n    def value(self, x):\n        return BASE + x\n"
    (checkout.path / "flcore" / "server.py").write_text(source)
    with checkout.importing() as load:
        server = load("flcore.server", "Server")
        server.value = load.mended(server.value, {"BASE + x": "BASE - x"})
        assert server().value(3) == 7
        with pytest.raises(module("checkout").Unavailable, match=r"flcore\.server\.value has no 'BASE \* x'; this"):
            load.mended(server.value, {"BASE * x": "x"})
    assert (checkout.path / "flcore" / "server.py").read_text() == source


# The program


@pytest.fixture
def commit(checkout):
    """The commit of the checkout, a git repository."""
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one")
    return git(checkout, "rev-parse", "--short", "HEAD")


def git(checkout, *arguments):
    done = subprocess.run(["git", *arguments], cwd=checkout.path, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def offer(monkeypatch, commit):
    """Makes cases the only ones of the program."""

    def offer(*cases):
        program = module("__main__")
        source = SimpleNamespace(SOURCE="own", TRIED=commit, cases=lambda: list(cases), __doc__="Own: loops.")
        monkeypatch.setattr(program, "SOURCES", {"own": source})
        monkeypatch.setattr(program, "NAMES", {"own": "own code"})
        return program

    return offer


def test_the_program_compares_and_fails_on_a_difference(checkout, offer, capsys):
    arguments = ["--own", str(checkout.path)]
    assert offer(case(fedavg()), case(fedavg(), cohort=2)).main([*arguments, "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out.count("agrees") == 2
    assert "2 comparisons ran, 0 were skipped, 0 failed" in out
    assert "\n### own code\n" in out
    assert out.splitlines()[-1].startswith("| `fedavg` |  |")
    assert offer(case(fedavg()), case(fedavg(lr=0.2))).main(arguments) == 1
    assert capsys.readouterr().out.count("NOT EXPECTED") == 1
    assert offer(case(fedavg(epochs=1))).main(arguments) == 1
    out = capsys.readouterr().out
    assert "fedavg / own: round 1: the other side left 2 batches of client 0 unused" in out
    assert "0 comparisons ran, 0 were skipped, 1 failed" in out


def without_package(checkout, trace):
    with checkout.importing() as load:
        return load("utils", "VALUE")


def test_a_comparison_without_its_package_is_skipped(checkout, offer, capsys):
    assert offer(case(without_package), case(fedavg())).main(["--own", str(checkout.path)]) == 0
    out = capsys.readouterr().out
    assert "fedavg / own: skipped; " in out
    assert "utils cannot be imported (No module named 'missing_package')" in out
    assert "1 comparisons ran, 1 were skipped, 0 failed" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda checkout: (checkout.path / "utils.py").write_text("VALUE = 8"), "changed files: utils.py;"),
        (
            lambda checkout: git(
                checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "two"
            ),
            "this is commit ",
        ),
        (lambda checkout: shutil.rmtree(checkout.path / ".git"), "this is not the root of a git checkout;"),
        (lambda checkout: shutil.rmtree(checkout.path), "there is no such folder;"),
    ],
    ids=["changed file", "another commit", "no git", "missing"],
)
def test_another_checkout_is_skipped(checkout, commit, offer, capsys, change, message):
    program = offer(case(fedavg()), case(fedavg(), cohort=2))
    change(checkout)
    assert program.main(["--own", str(checkout.path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"--own {checkout.path}: {message}")
    assert commit in out[0]
    assert out[0].endswith("; 2 comparisons skipped")
    assert out[-1] == "0 comparisons ran, 2 were skipped, 0 failed"


def test_every_method_has_a_comparison_in_which_it_agrees():
    program = module("__main__")
    cases = [case for source in program.SOURCES.values() for case in source.cases()]
    assert program.NAMES.keys() == program.SOURCES.keys()
    assert {case.method for case in cases if not case.differs} == METHODS
    assert all(case.setting.algorithm["name"] == case.method for case in cases)
    assert all(len(case.differs) > 40 for case in cases if case.differs)


def test_the_page_has_a_row_for_every_comparison():
    page = (ROOT / "docs" / "fidelity" / "lockstep.md").read_text()
    program = module("__main__")
    for source in program.SOURCES.values():
        for each in source.cases():
            section = page.split(f"### {program.NAMES[each.source]}\n")[1].partition("\n#")[0]
            start = f"| `{each.method}` | {each.variant} |"
            found = [row for row in section.splitlines() if row.startswith(start)]
            assert len(found) == 1, start
            assert ("**" in found[0].removeprefix(start)) == bool(each.differs)
