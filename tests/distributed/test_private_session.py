"""A session of one machine: its ports are those of the loopback interface, and its token is its user's."""

import ipaddress
import os

import psutil
import pytest
import ray

from helpers.ray_session import start_ray
from rayfed.distributed.cluster import protect_token
from rayfed.experiments.capacity import ray_folder


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
