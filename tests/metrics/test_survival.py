"""Survival: Cox's loss and Harrell's concordance against other implementations, and what is refused.

lifelines and statsmodels are no dependencies; without them, a loop over pairs and risk sets remains.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import rayfed
from rayfed.cli.main import main
from rayfed.core.errors import UsageError
from rayfed.core.outputs import CLASSES, Outputs, meaning_of_outputs
from rayfed.losses.base import build_loss
from rayfed.metrics.survival import Concordance

COX = build_loss("cox", {})
SEEDS = range(20)


def patients(seed, count=60, *, times=12, events=0.5):
    """Return risks [n] and labels [n, 2]; few different `times` make ties, of risks as well."""
    rng = np.random.default_rng(seed)
    risks = rng.normal(size=count).round(1)
    labels = np.stack([rng.random(count) < events, rng.integers(0, times, count)], 1)
    return torch.tensor(risks, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)


def partial_likelihood(risks, labels):
    """Return the loss by a loop over events, each with the sum over those whose time is not shorter."""
    total = 0.0
    for risk, (event, time) in zip(risks, labels, strict=True):
        if event:
            total += float(torch.logsumexp(risks[labels[:, 1] >= time], 0) - risk)
    return total / len(risks)


def harrell(risks, labels):
    """Return the index by a loop over pairs; None if none is comparable."""
    points = pairs = 0
    for risk, (event, time) in zip(risks.tolist(), labels.tolist(), strict=True):
        for other, (other_event, other_time) in zip(risks.tolist(), labels.tolist(), strict=True):
            if event and (time < other_time or (time == other_time and not other_event)):
                pairs += 1
                points += (risk > other) + (risk == other) / 2
    return points / pairs if pairs else None


def concordance(risks, labels):
    return [(value.metric, value.value, value.n) for value in Concordance().measure(risks, labels)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_loss_is_breslows_partial_likelihood(seed):
    risks, labels = patients(seed)
    assert float(COX(risks[:, None], labels)) == pytest.approx(partial_likelihood(risks, labels), rel=1e-5)


def test_the_loss_is_that_of_statsmodels_with_ties():
    model = pytest.importorskip("statsmodels.duration.hazards_regression")
    for seed in SEEDS:
        risks, labels = patients(seed)
        events, times = labels.numpy().T
        fitted = model.PHReg(times, risks.double().numpy()[:, None], status=events, ties="breslow")
        assert float(COX(risks, labels)) == pytest.approx(-fitted.loglike(np.ones(1)) / len(risks), rel=1e-5)


def test_gradients_under_vmap_are_those_of_each_client():
    drawn = [patients(seed) for seed in range(4)]
    risks, labels = (torch.stack(values) for values in zip(*drawn, strict=True))
    together = torch.vmap(torch.func.grad(COX))(risks, labels)
    for own, gradient, y in zip(risks, together, labels, strict=True):
        own = own.clone().requires_grad_()
        expected = sum(torch.logsumexp(own[y[:, 1] >= y[row, 1]], 0) - own[row] for row in range(len(own)) if y[row, 0])
        torch.testing.assert_close(gradient, torch.autograd.grad(expected / len(own), own)[0], rtol=1e-4, atol=1e-6)


def test_large_outputs_stay_finite_and_a_batch_without_events_has_no_loss():
    risks, labels = patients(0)
    assert torch.isfinite(COX(risks * 1e4, labels))
    labels[:, 0] = 0
    risks.requires_grad_()
    loss = COX(risks, labels)
    loss.backward()
    assert loss == 0
    assert not risks.grad.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_concordance_counts_pairs(seed):
    risks, labels = patients(seed, events=0.3)
    assert concordance(risks, labels) == [("concordance", pytest.approx(harrell(risks, labels), abs=1e-12), 60)]


def test_concordance_is_that_of_lifelines_with_ties_and_censoring():
    utils = pytest.importorskip("lifelines.utils")
    for seed in SEEDS:
        risks, labels = patients(seed, events=0.3)
        events, times = labels.numpy().T
        expected = utils.concordance_index(times, -risks.numpy(), events)
        assert concordance(risks, labels)[0][1] == pytest.approx(expected, abs=1e-12)


def test_many_patients_are_compared_in_parts(monkeypatch):
    risks, labels = patients(0, 300)
    monkeypatch.setattr("rayfed.metrics.survival._PAIRS", 1000)
    assert concordance(risks, labels)[0][1] == pytest.approx(harrell(risks, labels), abs=1e-12)


def test_there_is_no_concordance_without_a_comparable_pair():
    risks, labels = patients(0, events=0.0)
    assert concordance(risks, labels) == []
    both = torch.tensor([[1.0, 3.0], [1.0, 3.0]])
    assert concordance(risks[:2], both) == []


def one_by_one(outputs, y):
    """Cox's loss as users write it, by a loop over patients in the order of their times."""
    order = torch.argsort(y[:, 1], descending=True)
    risks, events = outputs[order, 0], y[order, 0]
    terms = [event * (risks[: row + 1].logsumexp(0) - risks[row]) for row, event in enumerate(events)]
    return torch.stack(terms).mean()


@pytest.mark.parametrize("loss", [COX, one_by_one])
def test_a_loss_of_survival_is_recognised(loss):
    _, labels = patients(0)
    assert meaning_of_outputs(loss, (1,), [labels.numpy()]) == Outputs("survival", axis=None)


def test_other_losses_and_labels_are_none_of_survival():
    _, labels = patients(0)

    def squared_error_of_times(outputs, y):
        return (outputs[:, 0] - y[:, 1]).square().mean()

    assert meaning_of_outputs(squared_error_of_times, (1,), [labels.numpy()]).kind == "unknown"
    bits = (labels > 3).float().numpy()
    assert meaning_of_outputs(nn.functional.binary_cross_entropy_with_logits, (2,), [bits]).kind == "labels"
    assert meaning_of_outputs(nn.functional.cross_entropy, (2,), [bits[:, 0].astype(int)]) == CLASSES


# Runs


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A CSV file of three clinics whose patients die the sooner, the larger `dose` is."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    columns = {"dose": rng.normal(size=240).round(3), "age": rng.normal(size=240).round(3)}
    times = rng.exponential(np.exp(-2 * columns["dose"]) * 300).round(1)
    ends = rng.exponential(400, 240).round(1)
    frame = pd.DataFrame(columns | {"E": (times < ends).astype(int), "T": np.minimum(times, ends).round(1)})
    frame["clinic"] = np.repeat(["a", "b", "c"], 80)
    return frame


def values(**changes):
    data = {"name": "csv", "file": "p.csv", "features": ["dose", "age"], "label": ["E", "T"], "client": "clinic"}
    model = {"name": "mlp", "hidden": []}
    local = {"batch_size": 16, "lr": 0.5}
    return {"data": data, "model": model, "local": local, "loss.name": "cox", "rounds": 5} | changes


def test_ones_own_table_is_trained_scored_and_selected_by_concordance(table):
    table.to_csv("p.csv", index=False)
    result = rayfed.run(values(results="r"), quiet=True)
    assert result.trials["selection_metric"].tolist() == ["concordance"]
    assert result.trials["selection_mode"].tolist() == ["max"]
    tests = result.metrics.query("split == 'test' and metric == 'concordance'").groupby("round").value.mean()
    assert tests.iloc[-1] > 0.8
    assert set(result.metrics.query("split == 'test'").metric) == {"concordance", "loss"}


def test_clients_trained_at_once_learn_the_same(table):
    table.to_csv("p.csv", index=False)
    weights = [
        rayfed.run(values(results=f"r{width}", **{"placement.vmap_clients": width}), quiet=True).model().state_dict()
        for width in (1, 3)
    ]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


def test_the_report_and_its_page_show_concordance(table, capsys):
    table.to_csv("p.csv", index=False)
    rayfed.run(values(results="r"), quiet=True)
    assert main(["report", "r", "--html", "p.html"]) == 0
    assert "test concordance" in capsys.readouterr().out
    assert "concordance" in Path("p.html").read_text()


def broken(table, **columns):
    table.assign(**columns).to_csv("p.csv", index=False)


def words(times):
    return ["soon", *times.iloc[1:].astype(str)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"T": [-1.0, *t["T"][1:]]}, r"csv|p has the time -1, as 1 of 240 examples; expected numbers from 0"),
        (lambda t: {"T": words(t["T"])}, r"column 'T' has 'soon', no number"),
        (lambda t: {"T": [np.inf, *t["T"][1:]]}, r"1 of 240 labels hold NaN or infinity|not finite"),
        (lambda t: {"E": [2, *t["E"][1:]]}, r"p has the event 2; expected 0 or 1, and then the time"),
        (lambda t: {"E": t["T"], "T": t["E"]}, r"the columns seem swapped: the event comes first"),
        (lambda t: {"E": 0}, r"^loss: no client of p has an event in its training data, so nothing is learnt$"),
    ],
)
def test_labels_that_are_no_survival_are_refused(table, change, message):
    broken(table, **change(table))
    with pytest.raises(UsageError, match=message):
        rayfed.run(values(results="r"), quiet=True)


def test_classes_are_refused_and_numbers_of_this_form_get_a_hint(table):
    table.to_csv("p.csv", index=False)
    data = values()["data"]
    with pytest.raises(UsageError, match=r"^loss.name=cox: takes an event and a time .* are int64 \[n\]; in a table"):
        rayfed.run(values(data=data | {"label": "E"}), quiet=True)
    with pytest.raises(UsageError, match=r"loss.name=cox takes an event and a time, as these seem to be$"):
        rayfed.run(values(**{"loss.name": "cross_entropy"}), quiet=True)
    with pytest.raises(UsageError, match=r"metrics.concordance: needs outputs that stand for risks of an event"):
        rayfed.run({"metrics.concordance": True}, quiet=True)


def test_batches_of_one_are_refused(table):
    table.to_csv("p.csv", index=False)
    with pytest.raises(UsageError, match=r"^local.batch_size=1: loss.name=cox compares the examples of a batch"):
        rayfed.run(values(**{"local.batch_size": 1}), quiet=True)


def test_events_and_times_are_not_mixed(table):
    table.to_csv("p.csv", index=False)
    with pytest.raises(UsageError, match=r"algorithm.name=fedmix: mixes labels, and an event and a time have no mean"):
        rayfed.run(values(**{"algorithm.name": "fedmix"}), quiet=True)


def test_a_client_without_events_is_told_once_and_learns_nothing(table, capsys):
    table.loc[table["clinic"] == "b", "E"] = 0
    table.to_csv("p.csv", index=False)
    result = rayfed.run(values(results="r", **{"algorithm.name": "solo", "rounds": 2}), quiet=False)
    told = "1 of 3 clients have no event in their training data, so that their loss is 0"
    output = capsys.readouterr()
    assert (output.out + output.err).count(told) == 1
    start, end = result._plan.blueprint.model.state_dict(), result.model(client=1).state_dict()
    torch.testing.assert_close(dict(start), dict(end), rtol=0, atol=0)
