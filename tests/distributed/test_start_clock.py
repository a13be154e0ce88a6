"""The limit on the start of a process, on a cluster that grows and on one that does not."""

import types

import pytest

from rayfed.distributed import start_clock
from rayfed.distributed.start_clock import StartClock


@pytest.fixture
def cluster(monkeypatch):
    """A cluster whose time and whose group's state a test sets."""
    cluster = types.SimpleNamespace(now=100.0, state="CREATED")
    monkeypatch.setattr(start_clock, "time", types.SimpleNamespace(monotonic=lambda: cluster.now))
    monkeypatch.setattr(start_clock, "placement_group_table", lambda group: {"state": cluster.state})
    return cluster


def late_after(cluster, clock, seconds):
    cluster.now = 100.0 + seconds
    return clock.is_late()


@pytest.mark.parametrize("group", [None, "group"])
def test_a_process_with_a_node_has_the_limit(cluster, group):
    clock = StartClock(30, group)
    assert not late_after(cluster, clock, 30)
    assert late_after(cluster, clock, 31)
    assert clock.seconds == 31


def test_the_wait_for_a_node_does_not_count(cluster):
    clock, cluster.state = StartClock(30, "group"), "RESCHEDULING"
    assert not late_after(cluster, clock, 31)
    assert not late_after(cluster, clock, 100)
    cluster.state = "CREATED"
    assert not late_after(cluster, clock, 130)
    assert late_after(cluster, clock, 131)


def test_the_wait_for_a_node_ends(cluster):
    clock, cluster.state = StartClock(30, "group"), "RESCHEDULING"
    assert not late_after(cluster, clock, 1799)
    assert late_after(cluster, clock, 1830)
