"""Processes on nodes that go away."""

from types import SimpleNamespace

import pytest
import ray

from rayfed.distributed import processes

THERE = "ab" * 28  # the id of a node


@pytest.mark.parametrize("error", [ray.exceptions.TaskUnschedulableError, ray.exceptions.GetTimeoutError])
def test_a_node_that_dies_while_its_process_is_killed_takes_it_along(monkeypatch, error):
    asked = []

    def fail(reference, timeout):
        asked.append(timeout)
        raise error("the node specified via NodeAffinitySchedulingStrategy doesn't exist any more")

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": THERE, "Alive": True}])
    monkeypatch.setattr(ray, "remote", lambda fn: SimpleNamespace(options=lambda **k: SimpleNamespace(remote=id)))
    monkeypatch.setattr(ray, "get", fail)
    processes.kill_process((1, THERE))
    assert asked == [60.0]
