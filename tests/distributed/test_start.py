"""What is said when Ray's processes start too slowly, and why an actor died. Without Ray."""

import time

import pytest
from ray._private import services

from rayfed.core.errors import HostLost
from rayfed.distributed import cluster
from rayfed.distributed.processes import cause_of_death


def not_yet(*arguments, **keywords):
    raise RuntimeError("no node yet")


class TestSlowStart:
    def test_ends_in_one_line_with_the_remedy(self, monkeypatch):
        monkeypatch.setattr(services, "get_node", not_yet)
        began = time.monotonic()
        with pytest.raises(HostLost) as error, cluster._patient_start(0.5):
            services.get_node("address", "node")
        assert 0.5 <= time.monotonic() - began < 10
        (line,) = str(error.value).splitlines()
        assert line.startswith("Ray did not start (no node yet); its logs are in /")
        assert line.endswith("On a slow machine, give more than faults.start_seconds=0.5")
        assert services.get_node is not_yet

    def test_waits_for_a_node_that_comes_late(self, monkeypatch):
        answers = iter([not_yet, not_yet, lambda: {"labels": {}}])
        monkeypatch.setattr(services, "get_node", lambda *arguments: next(answers)())
        with cluster._patient_start(30.0):
            assert services.get_node("address", "node") == {"labels": {}}


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
