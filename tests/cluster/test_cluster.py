"""The project's cluster.yaml on hosts with file systems of their own: `ray up`, a sweep, a lost node, and the end."""

import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

import rayfed
from helpers.lab import ADDRESSES, ROOT, Lab, cluster_file, missing
from helpers.ray_processes import wait_until
from rayfed.reports.read import read, read_events

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(bool(missing()), reason=f"a cluster of several hosts: {missing()}"),
]

MINE = """
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from parts.factors import TWO
from rayfed.algorithms.scaffold import Scaffold
from rayfed.augment.base import Augment
from rayfed.data.dataset import Dataset
from rayfed.metrics.base import OfPredictions, Value


@dataclass(frozen=True, kw_only=True)
class Slow(Scaffold):
    def aggregate(self, ctx, server, replies):
        time.sleep(0.2)
        return super().aggregate(ctx, server, replies)


@dataclass(frozen=True, kw_only=True)
class Most(OfPredictions):
    def measure(self, logits, y):
        yield Value("most", float(logits.max()), len(y))


@dataclass(frozen=True, kw_only=True)
class Twice(Augment):
    def __call__(self, x):
        import late
        return TWO * x + late.NOTHING


@dataclass(frozen=True, kw_only=True)
class Numbers:
    def load(self):
        with np.load(os.path.expanduser("~/data/numbers.npz")) as file:
            x, y, domain = file["x"], file["y"], file["domain"]
        return Dataset.of("numbers", x, y, domain=domain, domains=("a", "b", "c", "d"))


def net(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, num_classes))
"""
FILES = {
    "mine.py": MINE,
    "parts/__init__.py": "",
    "parts/factors.py": "from . import deeper\n\nTWO = deeper.ONE + 1\n",
    "parts/deeper.py": "ONE = 1\n",
    "late.py": "NOTHING = 0\n",
}
OWN = {
    "algorithm": {"name": "dbe", "base": "mine:Slow"},
    "model.name": "mine:net",
    "data.name": "mine:Numbers",
    "augment.name": "mine:Twice",
    "metrics": {"mine:Most": True},
    "local": {"batch_size": 5, "lr": 0.1},
    "rounds": 4,
}


def write_own(folder):
    """The user's own code and data, as on a machine from which commands are given."""
    for name, text in FILES.items():
        path = folder / "rayfed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "rayfed/space.yaml").write_text("seeds: [0]\n")
    random = np.random.default_rng(0)
    (folder / "data").mkdir(exist_ok=True)
    x, y = random.normal(size=(200, 6)).astype(np.float32), random.integers(0, 3, 200)
    np.savez(folder / "data/numbers.npz", x=x, y=y, domain=np.arange(200) % 4)


@pytest.fixture(scope="module")
def lab():
    folder = Path(tempfile.mkdtemp(prefix="rayfed-lab-", dir="/tmp"))
    lab = Lab(folder)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def up(lab):
    """The cluster, with the user's own code and data on its head only."""
    lab.run("laptop", "ray get-auth-token --generate && chmod 600 .ray/auth_token")
    bring_up(lab)
    write_own(lab.path("head", "."))
    wait_until(lambda: alive(lab) == 3, 600)
    return lab


def bring_up(lab, **choices):
    content = cluster_file(lab, **choices)
    lab.path("laptop", "cluster.yaml").write_text(yaml.safe_dump(content, sort_keys=False, width=1000))
    lab.run("laptop", "RAY_UP_enable_autoscaler_v2=0 ray up -y cluster.yaml", seconds=900)


def take_down(lab):
    lab.run("laptop", "ray down -y cluster.yaml", seconds=300)
    for host in ("head", "worker1", "worker2"):
        lab.run(host, "ray stop --force", check=False)


def alive(lab):
    join = "import ray; ray.init(address='auto', logging_level='ERROR')"
    code = f"{join}; print('nodes', sum(node['Alive'] for node in ray.nodes()))"
    done = lab.run("head", f"cd /tmp; python -c {json.dumps(code)}", check=False)
    found = re.search(r"^nodes (\d+)$", done.stdout, re.MULTILINE)  # Ray may print lines of its own before and after
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The hash of the final state, computed in one process on this machine."""
    folder = tmp_path_factory.mktemp("alone")
    write_own(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "rayfed")
        patch.syspath_prepend(str(folder / "rayfed"))
        patch.setenv("HOME", str(folder))
        result = rayfed.run({**OWN, "results": str(folder / "results")}, keep_state=False)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "parts", "late")]:
            del sys.modules[name]
    return result.weights_hash


def on_head(lab, command):
    return lab.run("laptop", f"ray exec cluster.yaml {json.dumps(f'cd rayfed && {command}')}", seconds=900, check=False)


def fetched(lab, experiment):
    """The results of an experiment, copied to the laptop."""
    lab.run("laptop", "mkdir -p got && ray rsync-down cluster.yaml '~/rayfed/results/' got/")
    return read(lab.path("laptop", "got"), experiment)


def values_of(values):
    return " ".join(f"'{key}={json.dumps(value)}'".replace('"', "") for key, value in values.items())


class TestSecurity:
    def test_the_dashboard_is_on_loopback_and_wants_the_token(self, up):
        assert "127.0.0.1:8265 " in up.listeners("head")
        assert "0.0.0.0:8265 " not in up.listeners("head")
        ask = "curl -s -o /dev/null -w '%{http_code}'"
        address = "http://127.0.0.1:8265/api/jobs/"
        assert up.run("head", f"{ask} {address}").stdout == "401"
        header = '-H "Authorization: Bearer $(cat ~/.ray/auth_token)"'
        assert up.run("head", f"{ask} {header} {address}").stdout == "200"
        refused = up.run("laptop", f"{ask} http://{ADDRESSES['head']}:8265/", check=False)
        assert refused.returncode == 7  # no connection

    def test_the_ports_are_those_that_are_documented(self, up):
        """SECURITY.md has a table of them."""
        loopback = {int(line.split(":")[1]) for line in up.listeners("head").splitlines() if line.startswith("127.")}
        everywhere = {int(line.split(":")[1]) for line in up.listeners("head").splitlines()} - loopback
        assert everywhere >= {22, 6379, 8076}
        assert 8265 in loopback
        assert {port for port in everywhere if port < 10000} == {22, 6379, 8076}

    def test_without_the_token_nobody_joins(self, up):
        join = f"ray.init(address='{ADDRESSES['head']}:6379', logging_level='ERROR')"
        command = f'cd /tmp; HOME=/tmp/nobody RAY_AUTH_MODE=disabled timeout 60 python -c "import ray; {join}"'
        done = up.run("worker1", command, check=False)
        assert done.returncode
        assert "oken" in done.stderr

    def test_the_token_is_for_its_user_only(self, up):
        for host in ("head", "worker1", "worker2"):
            assert up.path(host, ".ray/auth_token").stat().st_mode & 0o777 == 0o600


class TestTrials:
    def test_own_code_and_data_are_needed_on_the_head_only(self, up, expected):
        for name in ("run", "sweep space.yaml"):
            command = f"rayfed {name} {values_of(OWN)} placement.hosts=2 experiment={name.split()[0]}"
            done = on_head(up, command)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            tables = fetched(up, name.split()[0])
            assert tables.trials[["status", "weights_hash"]].values.tolist() == [["done", expected]]
            assert tables.rounds["busy_seconds"].map(lambda busy: len([s for s in busy if s])).max() == 2
        for worker in ("worker1", "worker2"):
            assert not up.path(worker, "rayfed/mine.py").exists()
            assert not up.path(worker, "data").exists()

    def test_a_job_from_the_laptop_leaves_its_results_in_the_home_of_the_head(self, up, expected):
        study = up.path("laptop", "study")
        for name, text in (FILES | {"space.yaml": "seeds: [0]\n"}).items():
            (study / name).parent.mkdir(parents=True, exist_ok=True)
            (study / name).write_text(text)
        forward = "timeout 400 ray dashboard cluster.yaml > dashboard.log 2>&1 &"
        wait = "until curl -s -o /dev/null localhost:8265; do sleep 1; done"
        submit = "RAY_AUTH_MODE=token ray job submit --address http://localhost:8265 --working-dir study"
        sweep = f"rayfed sweep space.yaml {values_of(OWN)} placement.hosts=2 experiment=job"
        done = up.run("laptop", f"{forward} {wait}; {submit} -- {sweep}; code=$?; kill %1; exit $code", seconds=600)
        assert "read_parquet('/root/results/job/metrics')" in " ".join(done.stdout.split())
        up.run("laptop", "mkdir -p jobs && ray rsync-down cluster.yaml '~/results/' jobs/")
        trials = read(up.path("laptop", "jobs"), "job").trials
        assert trials[["status", "weights_hash"]].values.tolist() == [["done", expected]]
        assert not (study / "results").exists()

    def test_the_doctor_is_content_with_data_on_the_head(self, up):
        done = up.run("laptop", "ray exec cluster.yaml 'rayfed doctor'", check=False)
        words = " ".join(done.stdout.split())
        assert done.returncode == 0, words
        assert words.count(": ready") == 3  # the head and two workers, which have no data

    def test_a_lost_node_costs_time_only(self, up):
        values = {**OWN, "rounds": 60, "checkpoint.every": 5, "seeds": [0, 1]}
        command = f"rayfed sweep space.yaml {values_of(values)} experiment=lost"
        sweep = up.start_command("head", f"cd rayfed && {command}")
        rounds = up.path("head", "rayfed/results/lost/rounds")
        begun = lambda: len(list(rounds.glob("*.parquet"))) == 2  # noqa: E731
        wait_until(begun, 300)
        time.sleep(5)
        up.run("worker2", "pkill -9 -x raylet")
        out, err = sweep.communicate(timeout=600)
        assert sweep.returncode == 0, out[-3000:] + err[-3000:]
        assert "it starts again from its last checkpoint" in err
        trials = fetched(up, "lost").trials
        assert trials["status"].tolist() == ["done", "done"]
        events = read_events(up.path("laptop", "got"), "lost")["event"].tolist()
        assert events == ["trial restarted"]


class TestGrowth:
    def test_nodes_are_started_for_a_trial_that_waits_for_them(self, up, expected):
        take_down(up)
        bring_up(up, min_workers=0, head_cpus=1)
        assert alive(up) == 1
        done = on_head(up, f"rayfed run {values_of(OWN)} placement.hosts=2 placement.autoscale=true experiment=grown")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        tables = fetched(up, "grown")
        assert tables.trials["weights_hash"].tolist() == [expected]
        assert tables.rounds["busy_seconds"].map(lambda busy: len([s for s in busy if s])).max() == 2
        assert alive(up) > 1


class TestSlurm:
    def test_two_nodes_become_a_cluster_for_one_command(self, up, expected):
        """After `ray down`; programs on the nodes play SLURM's."""
        take_down(up)
        shutil.copy(ROOT / "cluster-slurm.sh", up.path("head", "rayfed"))
        fakes = up.path("head", "rayfed/.fakes")
        fakes.mkdir()
        (fakes / "srun").write_text('#!/bin/bash\nprintf "%q " "${@:2}" > ~/srun\n')  # without its own option
        (fakes / "srun").chmod(0o755)
        slurm = "SLURM_NNODES=2 SLURM_CPUS_PER_TASK=1"
        command = f"rayfed run {values_of(OWN)} placement.hosts=2 experiment=slurm"
        up.run("head", f"cd rayfed; PATH=$PWD/.fakes:$PATH {slurm} ./cluster-slurm.sh {command}")
        started = up.path("head", "srun").read_text()
        other = up.start_command("worker1", f"cd rayfed; export RAY_AUTH_MODE=token; {started}")
        done = up.run("head", f"cd rayfed; export RAY_AUTH_MODE=token; {started}", seconds=600, check=False)
        other.communicate(timeout=120)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        tables = read(up.path("head", "rayfed/results"), "slurm")
        assert tables.trials["weights_hash"].tolist() == [expected]
        assert tables.rounds["busy_seconds"].map(lambda busy: len([s for s in busy if s])).max() == 2
