"""`Result.model`: the user's own module with trained weights, and `rayfed.load`, which makes it again from files."""

import sys
from typing import ClassVar

import pytest
import torch
from torch import nn

import rayfed
from helpers.commands import TWO_CLIENTS
from helpers.federations import Net, as_mappings, blobs
from helpers.ray_session import start_ray
from rayfed.core.errors import UsageError
from rayfed.experiments.simulation import Simulation
from rayfed.experiments.trained_model import save_module


class Own(nn.Module):
    """A model as users write them: with batch norm, names of their own, and no split."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU())
        self.classifier = nn.Linear(9, 3)

    def forward(self, x):
        return self.classifier(self.body(x))


def own(number=4):
    return as_mappings(blobs(number))


@pytest.fixture
def run(tmp_path):
    def run(name="fedavg", model=Own, **changes):
        values = {"algorithm": {"name": name}, "rounds": 2, "results": str(tmp_path / "r"), "local.batch_size": 5}
        return rayfed.run(values, clients=own(), model=model, **changes)

    return run


def accuracy(module, clients, split="test"):
    with torch.no_grad():
        return [
            float((module(torch.as_tensor(client[split][0])).argmax(1).numpy() == client[split][1]).mean())
            for client in clients
        ]


def recorded(result, point, split="test"):
    rows = result.metrics.query(f"metric == 'accuracy' and round == 2 and point == '{point}' and split == '{split}'")
    return rows.sort_values("client")["value"].tolist()


@pytest.mark.parametrize("given", [Own, lambda: Own(), Own(), Net])
def test_is_the_users_module_and_scores_as_recorded(run, given):
    result, expected = run(model=given), Net if given is Net else Own
    model = result.model()
    assert type(model) is expected
    assert not model.training
    assert set(model.state_dict()) == set(expected().state_dict())
    assert accuracy(model, own()) == pytest.approx(recorded(result, "global"))
    assert result.model() is not model


@pytest.mark.parametrize("model", [Own, None])
def test_a_run_may_start_from_the_weights_that_another_saved(run, tmp_path, model):
    """With a learning rate of almost 0, it ends with them."""
    values = {"algorithm": {"name": "fedavg"}, "results": str(tmp_path / "r"), "local.batch_size": 5}
    values |= {} if model else {"model": {"name": "mlp", "hidden": [5]}}
    first = rayfed.run(values | {"rounds": 2, "experiment": "a"}, clients=own(), model=model)
    first.save(tmp_path / "saved")
    values |= {"model.weights": str(tmp_path / "saved"), "experiment": "b", "rounds": 1, "local.lr": 1e-12}
    second = rayfed.run(values, clients=own(), model=model)
    after = dict(second.model().named_parameters())
    for name, value in first.model().named_parameters():
        torch.testing.assert_close(after[name], value, msg=name)


@pytest.mark.parametrize(
    ("what", "message"),
    [("nothing", "No such file"), ("other", r"Missing key.*body.0.weight"), ("text", "deserializing header")],
)
def test_weights_of_something_else_are_refused(tmp_path, what, message):
    path = tmp_path / what
    if what == "other":
        save_module(nn.Linear(2, 2), path)
    elif what == "text":
        path.write_text("no weights")
    values = {"algorithm": {"name": "fedavg"}, "results": str(tmp_path / "r"), "model.weights": str(path)}
    with pytest.raises(UsageError, match=rf"^model\.weights=.*{what}: .*{message}.*; give what Result.save wrote"):
        rayfed.run(values, clients=own(), model=Own)


def test_of_a_client_with_layers_of_its_own(run):
    """FedBN: the body's batch norm is the client's, the rest is the server's."""
    result = run("fedbn")
    models = [result.model(client=i) for i in range(4)]
    scores = [accuracy(model, [client])[0] for model, client in zip(models, own(), strict=True)]
    assert scores == pytest.approx(recorded(result, "downloaded"))
    assert torch.equal(models[0].classifier.weight, models[1].classifier.weight)
    assert not torch.equal(models[0].body[1].running_mean, models[1].body[1].running_mean)
    with pytest.raises(UsageError, match=r"^Result\.model\(\): algorithm fedbn has no global model .*client=0"):
        result.model()


def test_of_a_client_that_never_trained(run):
    result = run("fedbn", cohort=1, rounds=1)
    (trained,) = result.clients
    other = next(i for i in range(4) if i != trained)
    assert float(result.model(client=other).body[1].num_batches_tracked) == 0
    assert float(result.model(client=trained).body[1].num_batches_tracked) > 0


def test_of_a_model_that_the_configuration_names(tmp_path):
    result = rayfed.run({**TWO_CLIENTS, "rounds": 1, "results": str(tmp_path)})
    model = result.model()
    assert torch.equal(dict(model.named_parameters())["head.weight"], result.server["weights"]["head.weight"])
    assert model(torch.zeros(2, 3, 28, 28)).shape == (2, 10)
    again = rayfed.load(tmp_path)
    assert (again.trial, again.weights_hash) == (result.trial, result.weights_hash)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.model().parameters(), strict=True))


def test_layers_that_the_algorithm_adds_come_with_it(run):
    result = run("dbe")
    personal = result.model(client=1)
    scores = accuracy(personal, own()[1:2])
    assert scores == pytest.approx([recorded(result, "downloaded")[1]])
    assert "dbe.bias" in personal.state_dict()


def test_what_is_more_than_one_network_is_refused_in_a_line(run):
    with pytest.raises(UsageError, match=r"the model of fedproto is more than one network \(weights, prototypes"):
        run("fedproto").model(client=0)
    result = run("fedrod", cohort=1, rounds=1)
    (trained,) = result.clients
    with pytest.raises(UsageError, match=r"the model of fedrod is more than one network"):
        result.model(client=1 - min(trained, 1))  # which never trained, and whose first state counts its labels


class TestLoad:
    def test_returns_what_run_returned(self, run, tmp_path):
        result = run("fedbn")
        again = rayfed.load(tmp_path / "r", clients=own(), model=Own)
        assert (again.trial, again.weights_hash) == (result.trial, result.weights_hash)
        assert again.metrics.equals(result.metrics)
        for one, other in zip(result.model(client=2).parameters(), again.model(client=2).parameters(), strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"model": Own}, r"was run with clients=, which is not saved; give it again"),
            ({"clients": own()}, r"was run with model=, which is not saved; give it again"),
            ({"clients": own(), "model": Net}, r"data, model, loss or code are not those of the trial"),
            ({"clients": own(3), "model": Own}, r"data, model, loss or code are not those of the trial"),
            ({"trial": "fedavg"}, r"^trial=fedavg: no such trial in experiment run; "),
        ],
    )
    def test_refuses_what_is_not_the_trial(self, run, tmp_path, given, message):
        run(rounds=1)
        with pytest.raises(UsageError, match=message):
            rayfed.load(tmp_path / "r", **given)

    def test_the_configuration_comes_back_from_the_table(self, tmp_path):
        """Lists, nulls, shares and keys of algorithms, whatever other columns the table has."""
        quick = {"data": {"domains": ["plain", "font"], "per_domain": 60}, "results": str(tmp_path), "rounds": 1}
        first = {"model": {"name": "mlp", "hidden": [8, 4]}, "cohort_share": 0.5, "algorithm": {"name": "mixup"}}
        second = {"model.name": "mlp", "cohort": 2, "algorithm": {"name": "fedprox", "mu": 1}, "local.steps": 3}
        for values in (first | {"algorithm.base": "fedprox"}, second, {"model.name": "mlp", "metrics.ece.every": 1}):
            result = rayfed.run({**quick, **values})
            assert rayfed.load(tmp_path, "run", result.trial).weights_hash == result.weights_hash


def loss(module, clients, split="test"):
    with torch.no_grad():
        pairs = [(module(torch.as_tensor(client[split][0])), torch.as_tensor(client[split][1])) for client in clients]
    return [float(nn.functional.cross_entropy(logits, y)) for logits, y in pairs]


def selected_round(result):
    """Return the round with the best mean validation accuracy, computed from the table."""
    rows = result.metrics.query("metric == 'accuracy' and split == 'val' and client >= 0")
    return int(rows.groupby("round")["value"].mean().round(11).idxmax())


class TestSelectedRound:
    """The model of the round that validation chooses, and not of the last one."""

    MANY: ClassVar = {"rounds": 7, "local.lr": 0.05}

    def check(self, result, *, has_global=False):
        """Compare the losses of the models with the table, in the round that it chooses."""
        number = selected_round(result)
        rows = result.metrics.query("metric == 'loss' and split == 'test' and client >= 0")
        table = {r: of.sort_values("client")["value"].tolist() for r, of in rows.groupby("round")}
        assert 0 < number < 7, "the test needs a round that is not the last"
        assert table[number] != pytest.approx(table[7], rel=1e-4)
        for which, expected in (("selected", table[number]), ("final", table[7])):
            models = [result.model(None if has_global else client, round=which) for client in range(4)]
            scores = [loss(model, [client])[0] for model, client in zip(models, own(), strict=True)]
            assert scores == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedbn", "ditto", "adcol", "apfl", "fedfomo"])
    def test_scores_as_the_table_shows(self, run, name):
        result = run(name, **self.MANY)
        self.check(result, has_global=name in ("fedavg", "scaffold"))
        folder, experiment = result.folder.parent, result.folder.name
        self.check(rayfed.load(folder, experiment, clients=own(), model=Own), has_global=name in ("fedavg", "scaffold"))

    @pytest.mark.parametrize("options", [{}, pytest.param({"checkpoint.every": 3}, marks=pytest.mark.slow)])
    def test_survives_the_end_of_its_process(self, run, tmp_path, options, monkeypatch):
        whole = run("ditto", **self.MANY)
        options, rounds = options | self.MANY | {"results": str(tmp_path / "ended")}, Simulation.__iter__

        def ended(simulation):
            for number, record in enumerate(rounds(simulation), 1):
                if number == 5:
                    sys.exit()
                yield record

        with monkeypatch.context() as patch:
            patch.setattr(Simulation, "__iter__", ended)
            with pytest.raises(SystemExit):
                run("ditto", **options)
        again = run("ditto", **options, resume=True)
        assert again.weights_hash == whole.weights_hash
        self.check(again)
        for client in range(4):
            states = [result.model(client, round="selected").state_dict() for result in (whole, again)]
            assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))

    def test_what_is_kept_on_disk(self, run):
        """Beside the last two checkpoints there is the best one, and nothing else."""
        result = run("fedavg", **self.MANY, **{"checkpoint.every": 1})
        assert selected_round(result) < 6, "the test needs a round before the last two"
        names = sorted(path.name for path in (result.folder / "checkpoints" / result.trial).glob("manifest-*"))
        assert names == [f"manifest-{n:06d}.json" for n in (selected_round(result), 6, 7)]

    @pytest.mark.ray
    @pytest.mark.slow
    def test_with_hosts_on_ray(self, run):
        start_ray()
        here, there = (run("fedbn", **self.MANY, **{"placement.hosts": hosts}) for hosts in (0, 2))
        self.check(there)
        assert there.weights_hash == here.weights_hash
