"""Every bad request: exit code 2, one line on stderr that names the key, and nothing written."""

import pytest
import torch

from helpers.commands import command

main = command("run")

MINE = """
from dataclasses import dataclass
import numpy as np
from rayfed.algorithms.fedavg import FedAvg
from rayfed.data.dataset import Dataset

class NotAnAlgorithm:
    pass

@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    pass

def no_model(shape, num_classes):
    return 3

@dataclass(frozen=True, kw_only=True)
class Holes:
    def load(self):
        images = np.zeros((40, 3), np.float32)
        images[3:5, 1] = np.nan
        return Dataset.of("holes", images, np.arange(40) % 2)
"""


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder and returns its one line without "rayfed: "."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # no cluster's note there

    def run(*arguments):
        capsys.readouterr()
        code = main([*arguments, "results=results"])
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert (code, out) == (2, ""), (code, out, err)
        assert len(lines) == 1, err
        assert lines[0].startswith("rayfed: ")
        assert not (tmp_path / "results").exists()
        return lines[0].removeprefix("rayfed: ")

    return run


QUICK = ("model.name=mlp", "rounds=1")
BN = ("model={name: mlp, batch_norm: true}",)


@pytest.mark.parametrize(
    ("arguments", "beginning"),
    [
        # keys
        (["local.epoch=3"], "local.epoch: no such key; did you mean local.epochs?"),
        (["algorithm.muu=3", "algorithm.name=fedprox"], "algorithm.muu: no such key; did you mean algorithm.mu?"),
        (["algorithm.name=fedporx"], "algorithm.name=fedporx: did you mean fedprox?"),
        (["partition={name: dirichlet, alhpa: 1}"], "partition.alhpa: no such key; did you mean partition.alpha?"),
        # types and ranges
        ([f"rounds={10**23}"], f"rounds={10**23}: must be at most 1000000000"),
        ([f"experiment={'x' * 300}"], "experiment=xxxxxxxxxxxxxxxxxxxx…: a name of 300 bytes; use at most 200"),
        (["cohort=0.5"], "cohort=0.5: expected an integer or null, got float"),
        (["placement.vmap_clients=all"], "placement.vmap_clients=all: give a number of clients, or auto"),
        # what the data say
        (["cohort=6", *QUICK], "cohort=6: there are 5 clients"),
        (["unseen_clients=5", *QUICK], "unseen_clients=5: there are 5 clients, and at least one must train"),
        (["leave_out=stret", *QUICK], "leave_out=stret: no such domain in mini_digits; did you mean street?"),
        (
            ["placement.vmap_clients=2", "local.drop_last=false", *QUICK],
            "placement.vmap_clients=2: clients that train at once",
        ),
        # what the algorithm needs
        (["algorithm.name=fedbn", "model.name=cnn"], "algorithm.name=fedbn: the model has no batch-norm layer"),
        (["algorithm.name=erm", "cohort=3", *QUICK], "cohort=3: algorithm.name=erm"),
        (["algorithm.name=fedbn", *BN, "evaluate.points=[global]"], "evaluate.points: algorithm fedbn has no global"),
        (
            ["algorithm.name=apple", "unseen_clients=1", *QUICK],
            "unseen_clients=1: algorithm.name=apple mixes the core models of",
        ),
        # arguments and files
        (["rounds"], "rounds: no such file (give values as key=value)"),
        (["seeds=[0, 1]"], "seeds: a key of search spaces, which rayfed sweep runs; a single run takes seed=N"),
        (["demo"], "demo: a packaged search space; rayfed sweep demo runs it"),
        (["a={"], "a={: '{' is not valid YAML"),
        (["seed=99999999999999999999"], "seed: is an integer of 20 digits; must be below 2^63"),
        (["partition.seed=9223372036854775808"], "partition.seed: is an integer of 19 digits; must be below 2^63"),
        (["partition.seed=-9223372036854775809"], "partition.seed=-9223372036854775809: must be at least 0"),
        ([f"seed={'9' * 4200}"], "seed: is an integer of 4200 digits; must be below 2^63"),
        ([f"seed={'9' * 4400}"], f"seed={'9' * 195}…{'9' * 49}: '{'9' * 199}… is not valid YAML"),
        ([f"local.lr={'9' * 4200}"], "local.lr=inf: must be a finite number"),
        # the user's own
        (["algorithm.name=nomodule:Mine"], "algorithm.name=nomodule:Mine: no module 'nomodule'"),
        (["data={name: npz, file: nowhere.npz}", *QUICK], "data.file=nowhere.npz: no such file"),
        (["resume=maybe"], "resume='maybe': known: anyway, false, true"),
    ],
)
def test_refused(refused, arguments, beginning):
    assert refused(*arguments).startswith(beginning)


@pytest.mark.parametrize("name", ["..", ".", "../x", "/somewhere/x", "a\\b", "a/b", ""])
def test_names_that_lead_out_of_the_folder_of_results(refused, name):
    assert refused(f"experiment={name}", *QUICK).startswith("experiment=")


TOO_MANY = "not valid YAML: found aliases that repeat more than 100,000 values"


NINE_ITEMS = ", ".join(["{0}"] * 9)
NINE_VALUES = ", ".join(f"{key}: {{0}}" for key in "abcdefghi")


def nested(first, form):
    """Return nine levels, each of which repeats the one before nine times."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{level}: &a{level} {form.format(f'*a{level - 1}')}" for level in range(1, 10)]
    return "\n".join(lines).encode()


class TestFiles:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"rounds: [1,\nlocal: {lr: 3\n", "bad.yaml: not valid YAML: "),
            (
                b"x: &x {lr: 1}\nlocal: {<<: *x, lr: 3}\nrounds: 2\nrounds: 3\n",
                "bad.yaml: not valid YAML: found the key 'rounds' twice in \"bad.yaml\", line 4, column 1",
            ),
            (b"- rounds\n", "bad.yaml: expected a mapping, got list"),
            (b"", "bad.yaml: expected a mapping"),
            (bytes(range(128, 256)), "bad.yaml: "),
            (b"local:\nrounds: 1\n", "local=None: expected a mapping"),
            (nested("[1]", f"[{NINE_ITEMS}]"), f"bad.yaml: {TOO_MANY}"),
            (nested("{x: 1}", f"{{{{{NINE_VALUES}}}}}"), f"bad.yaml: {TOO_MANY}"),
            (nested("{x: 1}", f"{{{{<<: [{NINE_ITEMS}]}}}}"), f"bad.yaml: {TOO_MANY}"),
            (b"rounds: &a [*a]\n", "bad.yaml: not valid YAML: found a value that contains itself"),
            (b"local: &a {lr: *a}\n", "bad.yaml: not valid YAML: found a value that contains itself"),
            (b"? &a [*a]\n: 1\n", "bad.yaml: not valid YAML: found a value that contains itself"),
            (b"rounds: !!timestamp 3\n", "bad.yaml: not valid YAML: a value does not fit its tag"),
            (b"rounds: " + b"[" * 3000, "bad.yaml: not valid YAML: maximum recursion depth exceeded"),
        ],
    )
    def test_yaml_that_is_no_configuration(self, refused, tmp_path, content, said):
        (tmp_path / "bad.yaml").write_bytes(content)
        assert refused("bad.yaml").startswith(said)


@pytest.mark.parametrize(
    ("arguments", "beginning", "words"),
    [
        (["algorithm.name=bad_mine:Mime"], "{}: bad_mine has no 'Mime'; did you mean Mine?", ""),
        (["data.name=bad_mine:Holes", *QUICK], "{}: images: 2 of 40 ", "; remove or replace them"),
        (["algorithm.name=bad_mine:NotAnAlgorithm"], "{}: ", "must be a dataclass that derives from"),
        (["model.name=bad_mine:no_model"], "{}: must create", ""),
        (["data.name=bad_mine:NotAnAlgorithm", *QUICK], "{}: ", ""),
        (["algorithm.name=bad_syntax:Mine"], "{}: ", "bad_syntax.py, line 1"),
        (["algorithm.name=bad_import:Mine"], "{}: ", "nowhere_to_be_found"),
    ],
)
def test_the_users_own_modules(refused, tmp_path, arguments, beginning, words):
    (tmp_path / "bad_mine.py").write_text(MINE)
    (tmp_path / "bad_syntax.py").write_text("class Mine(:\n")
    (tmp_path / "bad_import.py").write_text("import nowhere_to_be_found\n")
    line = refused(*arguments)
    assert line.startswith(beginning.format(arguments[0]))
    assert words in line


class TestPlacement:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="has the GPU that should be missing")
    @pytest.mark.parametrize("hosts", [0, 1])
    def test_gpus_that_do_not_exist(self, refused, hosts):
        line = refused(f"placement.hosts={hosts}", "placement.gpus=1", *QUICK)
        assert line.startswith(f"placement.{'hosts=1' if hosts else 'gpus=1'}: ")
        assert ("0 GPU" if hosts else "no CUDA device") in line

    def test_more_hosts_than_cpus(self, refused):
        line = refused("placement.hosts=1000", "data.per_domain=20", "local.batch_size=2", *QUICK)
        assert line.startswith("placement.hosts=1000: a trial needs 1000 CPU")
