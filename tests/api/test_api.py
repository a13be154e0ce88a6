"""rayfed.run as a notebook would call it: own data, own model, own loss, and nothing of the user's disturbed."""

import re
import textwrap
from collections import OrderedDict
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import rayfed
from helpers.federations import as_mappings, blobs, net
from rayfed.core.errors import Diverged, UsageError
from rayfed.core.trees import named_tensors
from rayfed.engine.host import Host
from rayfed.reports.groups import group_trials
from rayfed.reports.read import read


def own(number=4, kind=torch.from_numpy):
    """Clients as mappings, with a validation part for all but the last."""
    made = as_mappings(blobs(number), kind)
    del made[-1]["val"], made[-1]["domain"]
    return made


def plain_model():
    """No features, no head: methods that need a split get one before the last linear layer."""
    return nn.Sequential(OrderedDict(one=nn.Linear(6, 9), two=nn.ReLU(), three=nn.Linear(9, 3)))


def wider():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def moved():
    """Other data: the inputs of a client are one greater."""
    changed = own()
    changed[0]["train"] = (changed[0]["train"][0] + 1, changed[0]["train"][1])
    return changed


@pytest.fixture
def module(here):
    """Write a module of the user into the working folder."""
    return lambda name, source: (here / f"{name}.py").write_text(textwrap.dedent(source))


@pytest.fixture
def run(tmp_path):
    def run(config=None, **changes):
        values = {"rounds": 2, "local.batch_size": 5, "results": str(tmp_path / "results")}
        given = {"clients": own(), "model": plain_model} | {k: changes.pop(k) for k in list(changes) if k in OWN}
        return rayfed.run({**values, **(config or {})}, **given, **changes)

    return run


OWN = ("clients", "model", "loss", "num_classes", "quiet", "keep_state")


class TestResult:
    @pytest.fixture
    def result(self, run):
        return run({"algorithm.name": "scaffold", "cohort": 3, "seed": 7, "evaluate.points": ["global", "trained"]})

    def test_tables(self, result):
        for name in ("metrics", "rounds", "trials"):
            table = getattr(result, name)
            assert set(table["trial"]) == {result.trial}
            assert len(pd.read_parquet(result.folder / name)) == len(table)
        assert result.rounds["round"].tolist() == [1, 2]
        assert (result.rounds["bytes_up"] > 0).all()
        scored = result.metrics.query("metric == 'accuracy' and point == 'global' and split == 'test'")
        assert sorted(scored["client"]) == sorted([0, 1, 2, 3] * 2)
        assert scored["value"].between(0, 1).all()
        assert set(result.metrics.query("split == 'val' and client == 3").index) == set()

    def test_the_final_state(self, result):
        assert set(result.server) == {"weights", "c"}
        assert {name.split(".")[-2] for name in result.server["weights"]} == {"one", "three"}
        assert sorted(result.clients) == list(result.clients)
        assert set(result.clients) <= {0, 1, 2, 3}
        assert all(t.device.type == "cpu" for _, t in named_tensors([result.server, list(result.clients.values())]))
        assert any(t.abs().sum() > 0 for _, t in named_tensors(dict(result.clients)))

    def test_the_final_state_is_kept_on_disk_unless_told_otherwise(self, result, run):
        """Also one with checkpoint.every, of which the last round is a checkpoint in any case."""
        (folder,) = (result.folder / "checkpoints").iterdir()
        assert len(list(folder.glob("manifest-*"))) == 2  # the best round and the last one
        other = run({"seed": 8}, keep_state=False)
        assert not (other.folder / "checkpoints" / other.trial).exists()
        for name in ("server", "clients"):
            with pytest.raises(UsageError, match=rf"^Result\.{name}: the final state was not kept; run with keep"):
                getattr(other, name)
        assert other.weights_hash in repr(other)
        saved = run({"seed": 9, "checkpoint.every": 1}, keep_state=False)
        assert set(saved.server) == {"weights"}


class TestOwnPieces:
    def test_arrays_tensors_and_clients_are_the_same(self, run):
        """Also data as float64 and labels as int16."""

        def other(array):
            return array.astype(np.float64 if array.dtype == np.float32 else np.int16)

        given = [own(), own(kind=np.asarray), own(kind=other), list(blobs().clients)]
        assert len({run(clients=clients).weights_hash for clients in given}) == 1

    def test_another_code_or_value_is_another_trial_and_the_same_one_is_not(self, run):
        class Bent(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 3)

            def forward(self, x):
                return self.two(torch.relu(self.one(x)))

        def trial(**given):
            return run(rounds=1, **given).trial

        relu = trial(model=Bent)
        Bent.forward = lambda self, x: self.two(torch.tanh(self.one(x)))
        assert trial(model=Bent) != relu
        first, again, other = (trial(loss=nn.CrossEntropyLoss(label_smoothing=much)) for much in (0.1, 0.1, 0.5))
        assert first == again != other

    def test_own_pieces_are_recorded_so_that_the_report_tells_them_apart(self, run, capsys):
        one = run(rounds=1, quiet=False).trials.iloc[0]
        assert one["data.name"] == f"clients:{one['partition_hash']}"
        assert re.fullmatch(r"own:plain_model-[0-9a-f]{6}", one["model.name"])
        assert one["loss.name"] == "cross_entropy"
        assert f"model  {one['model.name']}, " in capsys.readouterr().err
        again = run(rounds=1, seed=1).trials.iloc[0]
        names = ["data.name", "model.name"]
        assert again[names].tolist() == one[names].tolist()  # another seed of one setting
        run(rounds=1, model=wider)
        run(rounds=1, clients=moved())
        last = run(rounds=1, loss=nn.CrossEntropyLoss(label_smoothing=0.1))
        assert last.trials["loss.name"].iloc[0].startswith("own:CrossEntropyLoss-")
        table = group_trials(read(last.folder.parent).trials)
        assert table["hyperparameters"].nunique() == 4
        assert table["hyperparameters"].str.contains("loss.name=own:CrossEntropyLoss-").sum() == 1

    @pytest.mark.parametrize("make", [net, plain_model])  # the latter has to be split
    def test_a_module_is_left_as_it_was(self, run, make):
        module = make().eval()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        for model in (module, lambda: module):
            run(model=model)
            assert module.state_dict().keys() == before.keys()
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert not module.training

    @pytest.mark.parametrize("column", [False, True])
    def test_a_logit_is_scored_by_its_sign(self, run, column):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(90, 3)).astype(np.float32)
        y = (x[:, 0] > 0.4).astype(np.float32)[:, None] if column else (x[:, 0] > 0.4).astype(int)
        clients = [{"train": (x[i : i + 20], y[i : i + 20]), "test": (x[60:], y[60:])} for i in (0, 20, 40)]

        def logistic(logits, y):
            return nn.functional.binary_cross_entropy_with_logits(logits, y.float().reshape(-1, 1))

        result = run(
            {"rounds": 20, "local.lr": 1.0, "metrics": {"auroc": True, "ece": True}},
            clients=clients,
            model=lambda: nn.Sequential(nn.Linear(3, 1)),
            loss=logistic,
        )
        scores = result.metrics.query("round == 20 and client == 0 and split == 'test'").set_index("metric")["value"]
        with torch.no_grad():
            logits = result.model()(torch.from_numpy(x[60:]))[:, 0].numpy()
        assert scores["accuracy"] == pytest.approx(np.mean((logits > 0) == y.reshape(-1)[60:]))
        assert scores["accuracy"] > 0.9
        assert scores["auroc"] == pytest.approx(roc_auc_score(y[60:], logits))


class TestManners:
    def test_generators_and_threads_are_untouched(self, run):
        torch.manual_seed(11)
        np.random.seed(11)
        threads, state, numpys = torch.get_num_threads(), torch.get_rng_state(), np.random.get_state()[1].copy()
        run({"placement.threads": 2}).model()
        assert torch.get_num_threads() == threads
        assert torch.equal(torch.get_rng_state(), state)
        assert (np.random.get_state()[1] == numpys).all()

    def test_kernels_are_chosen_for_the_run_alone(self, run, monkeypatch):
        def kernels():
            cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
            return torch.are_deterministic_algorithms_enabled(), cudnn.allow_tf32, cuda.matmul.allow_tf32

        seen, before, exchange = set(), kernels(), Host.exchange
        monkeypatch.setattr(Host, "exchange", lambda *given: (seen.add(kernels()), exchange(*given))[1])
        for chosen in (True, False):
            run({"placement.deterministic": chosen, "placement.tf32": chosen}, rounds=1)
            assert seen == {(chosen, chosen, chosen)}
            seen.clear()
            assert kernels() == before

    def test_equal_calls_give_equal_hashes_whatever_the_global_seed(self, run):
        torch.manual_seed(1)
        first = run()
        torch.manual_seed(2)
        second = run()
        assert first.weights_hash == second.weights_hash
        assert first.trial == second.trial
        assert len(first.rounds) == len(second.rounds) == 2  # replaced, not doubled
        assert run(seed=1).weights_hash != first.weights_hash


class CentreLoss(nn.Module):
    """Cross-entropy and the distance to learned centres of the classes; a buffer counts the calls in training."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.arange(9.0).reshape(3, 3) / 9)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs, y):
        if self.training:
            self.calls += 1
        pull = (outputs - self.centres[y.argmax(1) if y.ndim == 2 else y]).square().mean()
        return nn.functional.cross_entropy(outputs, y) + pull


class TestLearnedLoss:
    VALUES: ClassVar = {"local.batch_size": 100, "local.lr": 0.1, "local.momentum": 0.9, "local.epochs": 4}

    def test_is_trained_as_by_a_plain_loop(self, run):
        clients, given = own(1), CentreLoss()
        x, y = clients[0]["train"]
        model, loss = plain_model(), CentreLoss()
        start = run(self.VALUES | {"local.lr": 1e-30, "experiment": "start"}, clients=clients, loss=given, rounds=1)
        model.load_state_dict(start.model().state_dict())
        result = run(self.VALUES | {"experiment": "own"}, clients=clients, loss=given, rounds=1)
        sent, optimizer = result.server["weights"], torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1, 0.9)
        for _ in range(4):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        torch.testing.assert_close(sent["loss.centres"], loss.centres.detach(), rtol=0, atol=1e-6)
        for value, expected in zip(result.model().state_dict().values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
        assert float(sent["loss.calls"]) == 4
        assert not given.calls
        assert torch.equal(given.centres, CentreLoss().centres)
        test = result.metrics.query("split == 'test'").set_index("metric")["value"]
        with torch.no_grad():
            expected = float(loss(model(clients[0]["test"][0]), clients[0]["test"][1]))
        assert test["loss"] == pytest.approx(expected, abs=1e-6)
        assert "accuracy" in test  # the centres at first do not hide what outputs stand for

    @pytest.mark.parametrize("name", ["apple", "faug", "fedmix", "fedproto", "fedrod", "irm", "moon", "vhl"])
    def test_methods_with_losses_of_their_own_train_it(self, run, name):
        result = run({"algorithm.name": name}, loss=CentreLoss(), rounds=1)
        states = [result.server, *result.clients.values()]
        found = {path: v for state in states for path, v in named_tensors(state) if "loss.c" in path}
        centres = [v for path, v in found.items() if path.endswith("centres")]
        assert any(not torch.equal(v, CentreLoss().centres.expand_as(v)) for v in centres)
        assert any(v.max() > 0 for path, v in found.items() if path.endswith("calls"))


class Auxiliary(nn.Sequential):
    """Returns two outputs in training mode, as networks with auxiliary heads do."""

    def __init__(self):
        super().__init__(nn.Linear(6, 9), nn.Linear(9, 3))

    def forward(self, x):
        out = super().forward(x)
        return (out, out) if self.training else out


class Failing(Auxiliary):
    def forward(self, x):
        return nn.Sequential.forward(self, x * {}["mask"] if self.training else x)


class Asking(Failing):
    def forward(self, x):
        return nn.Sequential.forward(self, x / 2 if x.max().item() > 1e6 else x)


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 9)), nn.Linear(9, 3))


ZEROS = np.zeros((3, 6), np.float32), np.zeros(3, int)
AT_ONCE, SUGGESTED = {"placement.vmap_clients": 3}, "use placement.vmap_clients=1"
NO_VMAP = "placement.vmap_clients=3: torch cannot vectorise"
IN_FORWARD = r"test_api\.py, line \d+, in forward\)"


class TestErrors:
    @pytest.mark.parametrize(
        ("config", "changes", "message"),
        [
            ({}, {"round": 3}, "round: no such key; did you mean rounds"),
            ({}, {"clients": []}, "clients: expected at least one"),
            ({}, {"clients": [{"train": ZEROS}]}, r"clients\[0\]: got the keys train; expected"),
            ({}, {"clients": [{"tran": 0}]}, r"clients\[0\]: got the keys tran; expected"),
            ({}, {"clients": [{"train": (ZEROS[0], ZEROS[1][:2]), "test": None}]}, r"train: got x \[3, 6\] and y"),
            ({}, {"model": "cnn"}, "model: expected .*; got str; to choose one by name, write model.name=cnn"),
            ({}, {"model": lambda: 3}, "model: expected a torch.nn.Module, .*; got a function that returns int"),
            ({}, {"model": lambda: nn.Linear(7, 3)}, "model: .*shape 6"),
            ({}, {"model": lambda: nn.Linear(6, 2)}, "model: .* 2 .*3 classes"),
            ({}, {"num_classes": 2}, r"^clients: label 2, but there are 2 classes \(0..1\); see num_classes"),
            ({"partition.name": "iid", "partition.clients": 3}, {}, r"^partition\.\*: clients= are given in place of"),
            ({"data.name": "mnist"}, {}, r"^data\.\*: clients= are given in place of data and partition"),
            ({}, {"model": nn.Linear(6, 3).requires_grad_(False)}, "model: no parameter is trained; set requires_grad"),
            ({}, {"model": Auxiliary}, rf"^model: returns tuple in training mode, .*{IN_FORWARD}$"),
            ({}, {"model": Failing}, rf"^model: a training step fails: KeyError: 'mask' \(.*{IN_FORWARD}$"),
            (AT_ONCE, {"model": Asking}, rf"^{NO_VMAP} .*test_api\.py, .*; {SUGGESTED}"),
            (AT_ONCE, {"model": spectral}, rf"^{NO_VMAP} .* {SUGGESTED}, or auto$"),
        ],
    )
    def test_usage(self, run, tmp_path, config, changes, message):
        with pytest.raises(UsageError, match=message):
            run(config, **changes)
        assert not (tmp_path / "results").exists()

    def test_batch_norm_without_statistics_scores_each_part_alone(self, run):
        def model():
            return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9, track_running_stats=False), nn.Linear(9, 3))

        losses = []
        for splits in (["test"], ["val", "test"]):
            metrics = run({"evaluate.splits": splits}, model=model).metrics
            losses.append(metrics.query("metric == 'loss' and split == 'test'")["value"].tolist())
        assert losses[0] == losses[1]

    def test_divergence_keeps_what_was_measured(self, run, tmp_path, module):
        source = """
            from dataclasses import dataclass
            from rayfed.algorithms.fedavg import FedAvg

            @dataclass(frozen=True, kw_only=True)
            class Diverging(FedAvg):
                def loss(self, ctx, weights, work, down, batch):
                    loss, output = super().loss(ctx, weights, work, down, batch)
                    return (loss / 0 if ctx.round == 3 else loss), output
        """
        module("api_diverging", source)
        with pytest.raises(Diverged, match="round 3, client 0: training loss is nan"):
            run({"algorithm.name": "api_diverging:Diverging", "rounds": 5})
        home = tmp_path / "results" / "run"
        (row,) = pd.read_parquet(home / "trials").to_dict("records")
        assert (row["status"], row["rounds_done"]) == ("diverged", 2)
        assert row["error"] == "round 3, client 0: training loss is nan"
        assert pd.read_parquet(home / "rounds")["round"].tolist() == [1, 2]
        assert set(pd.read_parquet(home / "metrics")["round"]) == {1, 2}

    def test_an_error_of_the_users_code_is_recorded_and_raised_as_it_is(self, run, tmp_path):
        def loss(logits, y):
            if logits.detach().abs().max() > 3:  # after some steps
                raise ZeroDivisionError("my own mistake")
            return torch.nn.functional.cross_entropy(logits, y)

        with pytest.raises(ZeroDivisionError, match="my own mistake"):
            run({"rounds": 50}, loss=loss)
        (row,) = pd.read_parquet(tmp_path / "results" / "run" / "trials").to_dict("records")
        assert row["status"] == "failed"
        assert row["error"].startswith("ZeroDivisionError: my own mistake (")
        assert "test_api.py, line " in row["error"]
        assert "in loss" in row["traceback"]
