"""What a new user runs into: paths with ~, names that look like numbers, Ctrl-C, folders that cannot be written."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from torch import nn

import rayfed
from helpers.commands import command
from rayfed.core.errors import BadHook
from rayfed.data.dataset import Dataset
from rayfed.data.user_clients import user_population
from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_arguments, from_file

main = command("run")
report = command("report")

QUICK = ("data={domains: [plain, font], per_domain: 60}", "model={name: mlp, hidden: [8]}", "rounds=1")


@pytest.fixture
def line(here, capsys):
    """The one line with which a request is refused."""

    def line(*arguments):
        assert main([*QUICK, *arguments]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        return said.removeprefix("rayfed: ")

    return line


class TestPaths:
    def test_a_tilde_is_the_home_folder(self, here, monkeypatch):
        monkeypatch.setenv("HOME", str(here))
        data, partition = {"name": "npz", "file": "~/a.npz"}, {"name": "file", "file": "~/p"}
        config = Config.read({"results": "~/mine", "data": data, "partition": partition})
        assert config.results == f"{here}/mine"
        assert config.data.options == {"file": f"{here}/a.npz"}
        assert config.partition.options == {"file": f"{here}/p"}

    @pytest.mark.parametrize("folder", ["afile/x", "/proc/x"])
    def test_a_folder_that_cannot_be_written(self, here, line, folder):
        (here / "afile").write_text("")
        assert line(f"results={folder}").startswith(f"results={folder}: {folder}/run cannot be written (")

    def test_the_folder_of_an_experiment_is_not_that_of_results(self, here, capsys):
        assert main([*QUICK, "experiment=12"]) == 0
        out = capsys.readouterr().out
        assert f"pandas.read_parquet('{Path.cwd()}/results/12/metrics')" in out
        assert report(["results/12"]) == 2
        assert f"give {here / 'results'} --experiment 12" in capsys.readouterr().err


class TestNamesLikeNumbers:
    def test_and_dates(self, line):
        assert line("leave_out=2010-01-31").startswith("leave_out=2010-01-31: no such domain")
        assert line("data.domains=[2010]").startswith("data.domains=2010: no such domain")

    def test_and_numbers_that_are_not_decimal(self, here, line):
        """YAML 1.1 would read them as 8, 202401 and 750."""
        (here / "names.yaml").write_text("experiment: 010\nleave_out: 2024_01\ndata.domains: [12:30, 001, 10]\n")
        texts = {"experiment": "010", "leave_out": "2024_01", "data.domains": ["12:30", "001", 10]}
        assert from_file(here / "names.yaml") == texts
        assert from_arguments(["experiment=010", "rounds=+10", "local.lr=.5"]) == {
            "experiment": "010",
            "rounds": 10,
            "local.lr": 0.5,
        }
        assert line("rounds=010") == "rounds='010': expected an integer, got str"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[0, 1]", "got list; to search over values in a sweep, write {grid: [0, 1]}"),
        ("{gird: [0, 1]}", "got {gird: …}; did you mean {grid: …}?"),
        ("{grid: [0, 1]}", "got a search space, {grid: …}; rayfed sweep searches it, a single run takes one value"),
    ],
)
def test_what_is_no_space_is_told_how_to_write_one(line, value, words):
    assert line("algorithm.name=fedprox", f"algorithm.mu={value}").endswith(f": expected a number, {words}")


def _part(x=None, y=None):
    return (np.zeros((4, 3), np.float32) if x is None else x, np.array([0, 1, 2, 1]) if y is None else y)


class TestOwnClients:
    @pytest.mark.parametrize(
        "y",
        [
            np.array([0.0, 1, 2, 1]),
            np.array([[0], [1], [2], [1]]),
            torch.tensor([0, 1, 2, 1]),
            np.array([0, 1, 2, 1], dtype=object),
            pd.Series([0.0, 1, 2, 1]),
        ],
    )
    def test_whole_numbers_are_classes(self, y):
        labels = user_population([{"train": _part(y=y), "test": _part()}]).clients[0].train.y
        assert labels.dtype == np.int64
        assert labels.tolist() == [0, 1, 2, 1]

    @pytest.mark.parametrize(
        ("part", "words"),
        [
            (_part(y=np.array([0, 0.5, 1, 1])), "label 0.5; a class is an integer from 0"),
            (_part(y=np.array(["cat", "dog", "cat", "dog"])), "labels are not numbers .*; number the classes of all"),
            (_part(y=np.eye(4)), r"y has the shape \(4, 4\); expected \[4\], like"),
            (_part(x=np.zeros((4, 2), np.float32)), r"an input is \(2,\) of float32, but the first client's are \(3,"),
            (([[0, 1, 2], [0]], [0, 1]), r"x is no array of numbers \(setting an array element"),
            (_part(x=scipy.sparse.csr_matrix(np.eye(4, 3))), r"x is sparse \(csr_matrix\); give it by .toarray\(\)"),
            (_part(x=np.full((4, 3), 2**63, np.uint64)), "x has 9223372036854775808 of uint64, which no tensor"),
            (_part(x=np.array([[0, 1.5, "a"]] * 4, object)), "x has the type object; give numbers"),
            (_part(y=np.array([1, -1, -1, 1])), "label -1; .*, which 2 of 4 labels are not; write -1 and 1 as 0 and 1"),
            (_part(x=np.array([[0, 1, 2], [0, np.nan, 2], [np.inf, np.nan, 2], [0, 1, 2]])), "2 of 4 inputs hold NaN"),
            (
                _part(x=np.ma.masked_array(np.zeros((4, 3), np.float32), np.eye(4, 3) > 0)),
                "x has 3 masked values; fill",
            ),
            (torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.zeros(4)), r".*a pair \(x, y\) of arrays or"),
            (_part(x=np.full((4, 3), 1e300)), "4 of 4 inputs hold NaN or infinity, or are too large for float32"),
        ],
    )
    def test_others_are_refused_by_name(self, part, words):
        clients = [{"train": _part(), "test": _part()}, {"train": _part(), "test": part}]
        with pytest.raises(rayfed.UsageError, match=rf"clients\[1\]\.test: {words}"):
            user_population(clients)

    @pytest.mark.parametrize(
        ("x", "kind"),
        [
            *[(torch.arange(12).reshape(4, 3).to(kind), np.float32) for kind in (torch.bfloat16, torch.float16)],
            (np.arange(12, dtype=np.uint16).reshape(4, 3), np.int32),
            (np.arange(12, dtype=np.uint32).reshape(4, 3), np.int64),
            (np.arange(12, dtype=np.float32).reshape(4, 3)[::-1, ::-1], np.float32),
            (np.arange(48, dtype=np.uint8).reshape(4, 3, 2, 2)[:, ::-1], np.uint8),
            (np.zeros(4, [("pad", "u1"), ("value", "<f4", 3)])["value"], np.float32),
        ],
    )
    def test_other_types_and_strides_reach_the_model_with_their_values(self, x, kind):
        y = np.array([0, 1, 2, 1])[::-1]
        (client,) = user_population([{"train": (x, y), "test": (x, y)}]).clients
        assert client.train.x.dtype == kind
        assert torch.from_numpy(client.train.x).tolist() == x.tolist()
        assert torch.from_numpy(client.test.y).tolist() == [1, 2, 1, 0]

    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize("own", [True, False])
    def test_a_client_without_training_examples_is_named(self, place, own, tmp_path):
        clients = [{"train": _part(), "test": _part()} for _ in range(2)]
        clients[place]["train"] = ([], [])
        assert user_population(clients).shape == (3,)
        model = {"model": lambda: nn.Linear(3, 3)} if own else {"model.name": "mlp"}
        words = f"^clients: client {place} has no training examples, as 1 of 2 clients; leave them out, or give each"
        with pytest.raises(rayfed.UsageError, match=words):
            rayfed.run(clients=clients, results=str(tmp_path), quiet=True, **model)

    def test_labels_from_1_and_their_number(self):
        part = _part(y=torch.tensor([1, 2, 3, 2]))
        clients = [{"train": part, "test": part}]
        with pytest.raises(
            rayfed.UsageError, match=r"^clients: the labels are 1 to 3; classes count from 0, so subtract 1"
        ):
            user_population(clients)
        words = r"^clients: label 3, but there are 3 classes \(0..2\); see num_classes; classes count from 0"
        with pytest.raises(rayfed.UsageError, match=words):
            user_population(clients, 3)
        assert user_population(clients, 4).num_classes == 4

    def test_images_with_channels_last(self):
        part = (np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 1, 2, 1]))
        said = r"uint8 \[4, 8, 8, 3\], channels last; images are \[n, channels, height, width\], so give x.transpose"
        with pytest.raises(rayfed.UsageError, match=rf"clients\[0\]\.train: {said}"):
            user_population([{"train": part, "test": part}])
        with pytest.raises(rayfed.UsageError, match=f"dataset photos: images: {said}"):
            Dataset.of("photos", *part)


def small(tmp_path, **more):
    given = {
        "clients": [{"train": _part(), "test": _part()}] * 2,
        "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
    }
    values = {"local.batch_size": 2, "results": tmp_path / "results", "rounds": 1}
    return rayfed.run(values, **(given | more))


def test_a_loss_that_compares_all_with_all_is_refused(tmp_path):
    part = _part(y=np.arange(4.0))
    model = lambda: nn.Linear(3, 1)  # noqa: E731
    clients = [{"train": part, "test": part}]
    for loss in (nn.functional.mse_loss, lambda outputs, y: (outputs - y).square().mean(), nn.L1Loss()):
        with pytest.raises(rayfed.UsageError, match=r"loss: got outputs of shape \(2, 1\) and labels of shape \(2,\)"):
            small(tmp_path, clients=clients, model=model, loss=loss)
    for loss in (lambda outputs, y: (outputs[:, 0] - y).abs().mean(), lambda outputs, y: outputs.square().mean()):
        small(tmp_path, clients=clients, model=model, loss=loss)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss, "fails on outputs"),
        ("mse", "'str' object is not callable"),
        (nn.CrossEntropyLoss(reduction="none"), r"must return the mean over the batch, .* shape \(2,\)"),
    ],
)
def test_what_is_no_loss_is_refused(tmp_path, loss, words):
    with pytest.raises(rayfed.UsageError, match=f"loss: .*{words}"):
        small(tmp_path, loss=loss)
    assert not (tmp_path / "results").exists()


class Categories(nn.Module):
    """Has an embedding of each of three columns, the first of which has fewer values than the last."""

    def __init__(self, sizes):
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(sum(column(x[:, k]) for k, column in enumerate(self.columns)))


def scaled():
    """A model that draws from numpy's and Python's generators."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.mul_(np.random.rand() + random.random())
    return model


class TestOwnModel:
    @pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), scaled, lambda: nn.Sequential(nn.LazyLinear(3))])
    def test_initial_weights_of_a_function_follow_the_seed(self, tmp_path, make):
        torch.manual_seed(0)
        first, again, other = (
            next(small(tmp_path, model=make, seed=seed, **{"local.lr": 1e-8}).model().parameters())
            for seed in (0, 0, 1)
        )
        assert first.shape == (3, 3)
        assert torch.equal(first, again)
        assert (first - other).abs().max() > 0.01

    def test_integers_without_an_embedding_are_refused(self, tmp_path):
        part = _part(x=np.array([[0, 1, 2], [1, 3, 9], [0, 0, 4], [0, 1, 7]]))
        given = {"clients": [{"train": part, "test": part}]}
        small(tmp_path, model=lambda: Categories((2, 4, 10)), **given)
        with pytest.raises(rayfed.UsageError, match=r"model: fails on inputs of clients, .* from 0 to 9 \(index"):
            small(tmp_path, model=lambda: Categories((2, 4, 9)), **given)


HOOKS = """
from dataclasses import dataclass
from rayfed.algorithms.fedavg import FedAvg

@dataclass(frozen=True, kw_only=True)
class Unsent(FedAvg):
    averaged = ("weights", "other")
    def aggregate(self, ctx, server, replies):
        return server | {"other": replies.mean["other"]}

@dataclass(frozen=True, kw_only=True)
class Forgetful(FedAvg):
    def aggregate(self, ctx, server, replies):
        server = server | {}
"""


class TestHooks:
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("Unsent", "Unsent.aggregate: no client sent 'other', which is in averaged; finish must"),
            ("Forgetful", "Forgetful.aggregate returned NoneType, not the server's next state, a dict"),
        ],
    )
    def test_a_hook_that_goes_wrong_is_named(self, here, capsys, name, words):
        (here / "first_hooks.py").write_text(HOOKS)
        assert main([*QUICK, f"algorithm.name=first_hooks:{name}"]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == f"rayfed: {words}"
        with pytest.raises(BadHook):
            rayfed.run({"algorithm.name": f"first_hooks:{name}", "model.name": "mlp"}, rounds=1)


def start(here, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "rayfed", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored where the tests run in the background
        start_new_session=True,
    )


def interrupted(process, ready, number=signal.SIGINT):
    """Send SIGTERM as `timeout` does: to the process, and to all others of its group, such as Ray's."""
    for _ in range(1200):
        if ready() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(number)
    if number == signal.SIGTERM:
        os.killpg(process.pid, number)
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


class TestInterrupts:
    @pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_run(self, here, number, expected):
        process = start(here, "run", *QUICK, "rounds=100000", "checkpoint.every=1", "--json")
        saved = lambda: len(list(here.glob("results/run/checkpoints/*/manifest-*.json"))) > 1  # noqa: E731
        code, out, err = interrupted(process, saved, number)
        assert code == expected, err
        assert "Traceback" not in err
        last = err.splitlines()[-1]
        assert last.startswith("rayfed: interrupted after round ")
        assert "; the same command with resume=true continues" in last
        error = last.removeprefix("rayfed: ")
        assert json.loads(out) == {"command": "run", "exit_code": expected, "error": error}
        (row,) = pd.read_parquet(here / "results/run/trials").to_dict("records")
        assert (row["status"], pd.isna(row["error"])) == ("interrupted", True)

    @pytest.mark.ray
    @pytest.mark.slow  # on a machine under load, Ray's own end may come before the line is written
    def test_a_sweep_on_ray(self, here):
        (here / "s.yaml").write_text(
            "seeds: [0, 1]\ndata: {domains: [plain, font], per_domain: 60}\nmodel: {name: mlp, hidden: [8]}\n"
            "search.max_concurrent: 1\nrounds: 100000\narms: [{rounds: 1}, {local.lr: 0.02}, {local.lr: 0.03}]\n"
        )
        process = start(here, "sweep", "s.yaml", "placement.hosts=1", "placement.cpus=0.5")
        second = lambda: len(list(here.glob("results/run/rounds/*.parquet"))) > 1  # noqa: E731
        code, _, err = interrupted(process, second, signal.SIGTERM)
        assert code == 143, err
        words = [
            line for line in err.splitlines() if not line.startswith(("trials ", "note: ", "dashboard", "[20"))
        ]  # Ray's log
        assert words[1:] == ["rayfed: interrupted after 1 of 6 trials; the same command with resume=true continues"]
        assert sorted(pd.read_parquet(here / "results/run/trials")["status"]) == ["done", "interrupted"]


@pytest.mark.parametrize("name", ["run", "report"])
def test_a_reader_that_has_gone(here, name):
    process = start(here, name, "--help")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) in (0, 141)  # argparse itself passes over it where stdout is unbuffered
