"""A Ray session that ends under the command: noticed, told in one line, and no false alarm."""

import contextlib
import socket
import threading

import pytest

from rayfed.distributed import session_watch
from rayfed.distributed.session_watch import SessionWatch


@pytest.fixture
def listeners(monkeypatch):
    """Two sockets in place of the raylet and the head."""
    for name in ("_LOOK_SECONDS", "_LOOK_AT_HEAD_SECONDS"):
        monkeypatch.setattr(session_watch, name, 0.02)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]


@contextlib.contextmanager
def watched(listeners, patience):
    """Yields the lines, an event that is set with the first one, and the watch."""
    lines, ended = [], threading.Event()
    addresses = [listener.getsockname() for listener in listeners]
    watch = SessionWatch(*addresses, patience, "resume=true continues")
    thread = threading.Thread(target=watch.run, args=(lambda line: (lines.append(line), ended.set()),))
    thread.start()
    yield lines, ended, watch
    watch.stop()
    thread.join()


def test_a_raylet_that_ends(listeners):
    with watched(listeners, patience=60) as (lines, ended, watch):
        assert not ended.wait(0.3)
        assert not watch.is_gone()
        listeners[0].close()
        assert watch.is_gone()
        assert ended.wait(20)
    expected = (
        "Ray has ended on this machine, as after ray stop; everything recorded before that is kept, and resume=true "
        "continues"
    )
    assert lines == [expected]


def test_a_head_that_ends_or_is_started_again(listeners):
    address = listeners[1].getsockname()
    with watched(listeners, patience=1.0) as (lines, ended, _):
        listeners[1].close()
        assert not ended.wait(0.4)
        with socket.create_server(address):
            assert not ended.wait(1.0)
        assert ended.wait(20)
    (line,) = lines
    assert line.startswith(f"the head of the Ray cluster at 127.0.0.1:{address[1]} has not answered for 1 s; ")


def test_nothing_is_told_after_the_end(listeners):
    with watched(listeners, patience=0.1) as (lines, ended, watch):
        watch.stop()
        for listener in listeners:
            listener.close()
        assert not ended.wait(0.3)
    assert lines == []
