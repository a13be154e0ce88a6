"""The harness of `python -m references`: it finds agreement and difference, with no checkout of another project."""

import copy
import importlib
from pathlib import Path

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


def test_agreement_without_training_is_refused():
    with pytest.raises(module("harness").OutOfStep, match="moved no weight"):
        module("harness").compare(case(fedavg(), lr=1e-7), None)


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
