"""A session of one machine: its ports are those of the loopback interface, and its token is its user's."""

import ipaddress
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from helpers.ray_session import start_ray
from rayfed.core.errors import UsageError
from rayfed.distributed.cluster import protect_token
from rayfed.experiments.capacity import ray_folder
from rayfed.experiments.session_folder import session_folder


@pytest.mark.ray
def test_all_of_its_processes_listen_on_loopback_only():
    start_ray()
    node = ray._private.worker.global_worker.node
    assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"
    processes = [psutil.Process(info.process.pid) for kind in node.all_processes.values() for info in kind]
    processes = [*processes, *(child for process in processes for child in process.children(recursive=True))]
    listeners = [
        (process.name(), ipaddress.ip_address(connection.laddr.ip))
        for process in [psutil.Process(), *processes]
        if process.is_running()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {name for name, _ in listeners} >= {"gcs_server", "raylet"}
    addresses = {(name, getattr(address, "ipv4_mapped", None) or address) for name, address in listeners}
    assert [(name, str(address)) for name, address in addresses if not address.is_loopback] == []


SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIA-of-this-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-this-test",
    "AWS_SESSION_TOKEN": "token-of-this-test",
    "AWS_SECURITY_TOKEN": "other-token-of-this-test",
}


def who_may(path):
    return path.stat().st_mode & 0o777


@pytest.fixture
def short(monkeypatch):
    """A temporary folder of Ray's, short enough for sockets, that others may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


@pytest.mark.ray
def test_credentials_of_the_environment_are_in_no_file_and_no_command_line(short, tmp_path):
    values = ["data.per_domain=60", "model.name=mlp", "rounds=2", "placement.hosts=1", "placement.cpus=0.5"]
    command = [sys.executable, "-m", "rayfed", "run", *values, f"results={tmp_path}/results"]
    lines = set()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | SECRETS
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with suppress(psutil.Error):
                children = psutil.Process(process.pid).children(recursive=True)
                lines |= {" ".join(child.cmdline()) for child in children}
            time.sleep(0.05)
    assert process.returncode == 0
    assert any("raylet" in line for line in lines)
    assert [line for line in lines if any(secret in line for secret in SECRETS.values())] == []
    files = [path for folder in (short, tmp_path) for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "runtime_env_agent.log" for path in files)
    assert [path for path in files if any(secret.encode() in path.read_bytes() for secret in SECRETS.values())] == []
    assert [who_may(path) for path in short.iterdir()] == [0o700]


class TestFolder:
    def test_is_its_users_alone(self, short):
        assert session_folder() == session_folder() == short / f"rayfed-{os.getuid()}" / "ray"
        assert [who_may(path) for path in short.iterdir()] == [0o700]

    def test_is_rays_own_where_nobody_else_may_enter(self, short):
        short.chmod(0o700)
        assert session_folder() == short / "ray"
        assert os.listdir(short) == []

    @pytest.mark.parametrize("kind", ["link", "file", "open folder"])
    def test_is_a_new_one_where_its_name_is_taken(self, short, tmp_path, kind):
        taken = short / f"rayfed-{os.getuid()}"
        if kind == "link":
            taken.symlink_to(tmp_path)
        elif kind == "file":
            taken.touch()
        else:
            taken.mkdir()
            taken.chmod(0o777)
        folder = session_folder().parent
        assert folder.parent == short
        assert folder != taken
        assert who_may(folder) == 0o700
        assert session_folder().parent == folder

    @pytest.mark.skipif(os.getuid() != 0, reason="needs the right to give a folder away")
    def test_is_a_new_one_where_somebody_else_made_it(self, short):
        taken = short / f"rayfed-{os.getuid()}"
        taken.mkdir(mode=0o700)
        os.chown(taken, 12345, 12345)
        assert session_folder().parent != taken

    def test_leaves_room_for_the_paths_of_sockets(self, short, monkeypatch):
        """A path of a socket has at most 107 bytes, of which 68 are of Ray's."""
        open_bytes = 39 - len(f"/rayfed-{os.getuid()}")
        for length, mode, fits in ((open_bytes, 0o755, True), (open_bytes + 1, 0o755, False), (39, 0o700, True)):
            long = short / ("x" * (length - len(str(short)) - 1))
            long.mkdir()
            long.chmod(mode)
            monkeypatch.setenv("RAY_TMPDIR", str(long))
            if fits:
                assert session_folder().is_relative_to(long)
            else:
                words = f"at most {open_bytes} bytes, or chmod 700 for one of 39"
                with pytest.raises(UsageError, match=words):
                    session_folder()
        monkeypatch.delenv("RAY_TMPDIR")
        monkeypatch.setenv("TMPDIR", str(short / ("y" * 40)))
        assert session_folder().is_relative_to("/tmp")


class TestToken:
    @pytest.fixture
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        return tmp_path

    def test_a_new_one_is_for_its_user_only(self, home, monkeypatch):
        protect_token()
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "mine/token"))
        protect_token()
        for file in (home / ".ray/auth_token", home / "mine/token"):
            assert os.listdir(file.parent) == [file.name]
            assert file.stat().st_mode & 0o777 == 0o600
            assert len(file.read_text()) == 64

    def test_one_that_ray_made_is_kept_and_protected(self, home):
        file = home / ".ray/auth_token"
        file.parent.mkdir()
        file.write_text("secret")
        file.chmod(0o644)
        protect_token()
        assert (file.read_text(), file.stat().st_mode & 0o777) == ("secret", 0o600)


@pytest.mark.parametrize("folders", [{}, {"TMPDIR": "/scratch/7"}, {"RAY_TMPDIR": "/ray", "TMPDIR": "/scratch/7"}])
def test_a_cluster_is_looked_for_where_ray_notes_it(folders, monkeypatch):
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in folders.items():
        monkeypatch.setenv(name, folder)
    assert str(ray_folder() / "ray_current_cluster") == ray._common.utils.get_ray_address_file(None)
    assert str(ray_folder()) == ray._common.utils.get_default_ray_temp_dir()
