"""`ray job submit` to a cluster of one node: where the results are, and that they are whole."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SPACE = """
seeds: [0]
rounds: 2
data: {name: "mine:Sets", per_domain: 60}
model: {name: mlp, hidden: [8]}
placement.hosts: 1
"""
MINE = """
from dataclasses import dataclass

from rayfed.data.sets.mini_digits import MiniDigits


@dataclass(frozen=True, kw_only=True)
class Sets(MiniDigits):
    pass
"""


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The address of its dashboard. `ray start --block` ends its own processes with it, and no others."""
    for name in ("home", "project"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    port, dashboard, client = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        ports = [f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
        size = ["--num-cpus=2", "--object-store-memory=200000000", "--dashboard-agent-listen-port=0"]
        command = ["ray", "start", "--head", "--block", "--include-dashboard=true", f"--temp-dir={folder}"]
        with open(tmp_path / "ray.log", "wb") as log:
            node = subprocess.Popen([*command, *ports, *size], stdout=log, stderr=log, env=os.environ)
        try:
            until = time.monotonic() + 120
            while socket.socket().connect_ex(("127.0.0.1", dashboard)):
                assert time.monotonic() < until, (tmp_path / "ray.log").read_text()
                time.sleep(0.5)
            yield f"http://127.0.0.1:{dashboard}"
        finally:
            node.terminate()
            node.wait(60)


def test_results_of_a_job_are_where_it_says(cluster, tmp_path):
    project = tmp_path / "project"
    (project / "space.yaml").write_text(SPACE)
    (project / "mine.py").write_text(MINE)
    submit = ["ray", "job", "submit", "--address", cluster, "--working-dir", str(project), "--"]
    sweep = [sys.executable, "-m", "rayfed.sweep", "space.yaml", "experiment=job"]
    done = subprocess.run([*submit, *sweep], capture_output=True, text=True, cwd=project, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = re.findall(r"read_parquet\('(.*)'\)", " ".join(done.stdout.split()))
    assert path == f"{tmp_path}/home/results/job/metrics"
    assert sorted(pd.read_parquet(path)["round"].unique()) == [1, 2]
    assert pd.read_parquet(Path(path).with_name("trials"))["status"].tolist() == ["done"]
    assert not (project / "results").exists()
