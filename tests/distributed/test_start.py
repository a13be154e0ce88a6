"""What is said when Ray's processes start too slowly, and why an actor died. Without Ray."""

import socket
import time

import pytest
from ray._private import services

from rayfed.core.errors import HostLost, RayNotStarted
from rayfed.distributed import cluster
from rayfed.distributed.processes import cause_of_death, lost_its_node
from rayfed.experiments.config import Placement


def not_yet(*arguments, **keywords):
    raise RuntimeError("no node yet")


class TestSlowStart:
    def test_ends_in_one_line_with_the_remedy(self, monkeypatch):
        monkeypatch.setattr(services, "get_node", not_yet)
        began = time.monotonic()
        with pytest.raises(HostLost) as error, cluster._started_in_time(0.5):
            services.get_node("address", "node")
        assert 0.5 <= time.monotonic() - began < 10
        (line,) = str(error.value).splitlines()
        assert line.startswith("Ray did not start (no node yet); its logs are in /")
        assert line.endswith("On a slow machine, give more than faults.start_seconds=0.5")
        assert services.get_node is not_yet

    def test_a_folder_that_is_too_long_for_sockets_is_named(self, monkeypatch, tmp_path):
        from ray._private.utils import validate_socket_filepath

        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 60)))
        with pytest.raises(RayNotStarted) as error, cluster._started_in_time(5):
            validate_socket_filepath(f"{tmp_path}/{'x' * 60}/ray/session_2026-01-01_00-00-00_000000_1/sockets/raylet")
        assert "x/ray are too long; set RAY_TMPDIR to a shorter folder" in str(error.value)
        assert "start_seconds" not in str(error.value)

    def test_a_cluster_that_cannot_be_joined_is_named(self, monkeypatch):
        """And is no reason to do without it, as a Ray that does not start here is."""
        monkeypatch.setattr(services, "get_node", not_yet)
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        with pytest.raises(HostLost) as error, cluster._started_in_time(0.1, joins="10.0.0.1:6379"):
            services.get_node("address", "node")
        assert not isinstance(error.value, RayNotStarted)
        assert str(error.value) == (
            "the Ray cluster at 10.0.0.1:6379 cannot be joined within faults.start_seconds=0.1 (no node yet); check "
            "the address, or unset RAY_ADDRESS to use this machine alone"
        )

    def test_waits_for_a_node_that_comes_late(self, monkeypatch):
        answers = iter([not_yet, not_yet, lambda: {"labels": {}}])
        monkeypatch.setattr(services, "get_node", lambda *arguments: next(answers)())
        with cluster._started_in_time(30.0):
            assert services.get_node("address", "node") == {"labels": {}}


class TestClusterThatDoesNotAnswer:
    @pytest.fixture
    def address(self, monkeypatch, tmp_path):
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{free.getsockname()[1]}"

    def test_of_the_environment(self, address, monkeypatch):
        monkeypatch.setenv("RAY_ADDRESS", f"ray://{address}")
        began = time.monotonic()
        with pytest.raises(
            HostLost, match=rf"^the Ray cluster at ray://{address} does not answer \(.*unset RAY_ADDRESS"
        ):
            cluster.connect(Placement(hosts=1), dashboard=False)
        assert time.monotonic() - began < 10

    def test_that_ray_start_left_a_note_of(self, address, tmp_path):
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        with pytest.raises(HostLost, match=r"does not answer \(.*\); start it, or run ray stop to use this machine"):
            cluster.connect(Placement(hosts=1), dashboard=False)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: A\nThe actor is dead because its "
            "worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits",
            "its process was killed or crashed",
        ),
        ("The actor is dead because its node has died. Node Id: 12", "its node died"),
        ("The actor is dead because its owner has died. Owner Id: 12", "its owner has died"),
        ("Task was killed due to the node running low on memory.", "its node ran out of memory"),
    ],
)
def test_the_cause_of_death_is_a_few_words(text, cause):
    assert cause_of_death(RuntimeError(text)) == cause


class TestLostNode:
    """A process whose node dies may meet an error of Ray's core before Ray ends it."""

    def raised(self, file, error):
        try:
            exec(compile("raise error", file, "exec"), {"error": error})
        except Exception as caught:
            return caught

    def test_is_told_from_errors_of_the_disk_and_of_the_user(self):
        core = "python/ray/includes/common.pxi"
        assert lost_its_node(self.raised(core, OSError("Connection reset by peer")))
        assert not lost_its_node(self.raised(core, ValueError("no such actor")))
        assert not lost_its_node(self.raised("mine.py", OSError("Connection reset by peer")))
        assert not lost_its_node(OSError("never raised"))
