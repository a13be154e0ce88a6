"""A Ray session that ends under the command: noticed once, and no false alarm."""

import contextlib
import socket
import threading

import pytest

from rayfed.distributed import session_watch


@pytest.fixture
def raylet(monkeypatch):
    """A socket in place of the raylet."""
    monkeypatch.setattr(session_watch, "_LOOK_SECONDS", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@contextlib.contextmanager
def watched(raylet):
    """Yields the event that ends the watch, and one that is set when the raylet is found to be gone."""
    over, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=session_watch.watch, args=(raylet.getsockname(), over, ended.set))
    thread.start()
    yield over, ended
    over.set()
    thread.join()


def test_a_raylet_that_ends(raylet):
    with watched(raylet) as (_, ended):
        assert not ended.wait(0.3)
        raylet.close()
        assert ended.wait(20)


def test_nothing_is_told_after_the_end(raylet):
    with watched(raylet) as (over, ended):
        over.set()
        raylet.close()
        assert not ended.wait(0.3)
