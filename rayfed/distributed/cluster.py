"""Ray sessions: join the running cluster, or start Ray on this machine alone.

A Ray that is started here listens on the loopback interface, and only its user may read its token and enter its folder.
Ray itself would use the machine's address, and its ports would be open to the network. It would also let everybody on
the machine read its logs and write to its sockets.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from rayfed.core.errors import HostLost, RayNotStarted, one_line
from rayfed.distributed.ray_internals import on_loopback
from rayfed.experiments.capacity import (
    check_fits,
    cluster_address,
    cluster_is_running,
    known_nodes,
    this_machine,
)
from rayfed.experiments.config import Placement
from rayfed.experiments.session_folder import session_folder

_CONNECT_SECONDS = 10
_LOOPBACK = "127.0.0.1"
_started: Future[Any] | None = None  # what `ray.init` returns, from `begin` until `connect` has taken it


def begin(*, dashboard: bool) -> None:
    """Begin to start Ray on this machine for `connect`, unless there is a cluster to join or Ray runs already.

    Ray takes seconds to start, in which this process can import torch and make its plan. Ray's processes die with the
    thread that started them, so the thread stays.
    """
    global _started
    if _started is not None or ray.is_initialized() or cluster_is_running():
        return
    _started = future = Future[Any]()

    def start() -> None:
        try:
            future.set_result(start_here(include_dashboard=dashboard, logging_level=logging.ERROR, log_to_driver=False))
        except Exception as error:  # Ray raises bare exceptions here
            future.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=start, daemon=True).start()


def connect(placement: Placement, *, dashboard: bool) -> str:
    """Join the running cluster, or start Ray here, and return the address of the dashboard ("" without one).

    Raises:
        UsageError: The placement cannot fit. This is checked before Ray is started here.
        HostLost: The running cluster does not answer, or cannot be joined.
        RayNotStarted: Ray did not start.
    """
    global _started
    url = ""
    if _started is None and cluster_is_running() and not ray.is_initialized():
        url = _joined()
    elif _started is not None or not ray.is_initialized():
        check_fits(placement, this_machine())
        logs = _folder_for_sessions() / "session_latest" / "logs"
        begin(dashboard=dashboard)
        assert _started is not None, "there is no cluster to join"
        try:
            url = _started.result().dashboard_url or ""
        except Exception as error:  # Ray raises bare exceptions here
            raise RayNotStarted(f"Ray did not start ({one_line(error)}); its logs are in {logs}") from error
        finally:
            _started = None
    check_fits(placement, known_nodes() or [])
    return url


def _folder_for_sessions() -> Path:
    try:
        return session_folder()
    except OSError as error:
        remedy = "set RAY_TMPDIR to a folder that you may write to"
        raise RayNotStarted(f"Ray did not start ({one_line(error)}); {remedy}") from error


def start_here(**options: Any) -> Any:
    """Start Ray on this machine alone with options of `ray.init`, and return its result.

    Objects that nobody holds give back their memory at once, for the next object. Ray itself lets a second pass.
    """
    protect_token()
    with on_loopback():
        return ray.init(
            address="local",
            _temp_dir=str(session_folder()),
            _system_config={"free_objects_batch_size": 1},
            **options,
        )


def ray_nodes() -> dict[str, dict[str, float]]:
    """Return the resources of each node by its id."""
    alive = []
    for node in ray.nodes():
        if node["Alive"]:
            alive.append(node)
    return {node["NodeID"]: node["Resources"] for node in alive}


def is_private() -> bool:
    """Return whether the session is of this machine alone. Other sessions may get nodes without its files."""
    return all(node["NodeManagerAddress"] == _LOOPBACK for node in ray.nodes())


def protect_token() -> None:
    """Make the token of Ray's sessions readable for this user only, since whoever has it may run code there.

    Ray itself creates the file `~/.ray/auth_token` readable for everybody.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    default = Path.home() / ".ray" / "auth_token"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or default)
    suffix = secrets.token_hex(8)
    made = path.with_name(f".{path.name}-{suffix}")
    with contextlib.suppress(OSError):  # where the home is read-only, Ray says what it needs
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.chmod(path.stat().st_mode & 0o700)
            return
        try:
            descriptor = os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            os.link(made, path)  # in one step, and not over the token of another process
        finally:
            made.unlink(missing_ok=True)


def _joined() -> str:
    """Join the running cluster, and return the address of its dashboard."""
    _check_reachable()
    try:
        return ray.init(logging_level=logging.ERROR, log_to_driver=False).dashboard_url or ""
    except Exception as error:  # as above
        where = f"the Ray cluster at {cluster_address() or 'auto'}"
        reason = f"{where} cannot be joined ({one_line(error)})"
        raise HostLost(f"{reason}; check the address, or {_alone()}") from error


def _check_reachable() -> None:
    """Raise HostLost if nothing answers at the address of the cluster. Ray itself would wait for minutes."""
    address = cluster_address()
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return  # such as "local", which Ray understands
    try:
        place = (host.strip("[]"), int(port))
        socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or error
        raise HostLost(f"the Ray cluster at {address} does not answer ({reason}); start it, or {_alone()}") from error


def _alone() -> str:
    way = "run ray stop"
    if os.environ.get("RAY_ADDRESS"):
        way = "unset RAY_ADDRESS"
    return f"{way} to use this machine alone"


def address_of(node: str) -> str | None:
    """Return the address of a node by its id; None if Ray does not know it."""
    for each in ray.nodes():
        if each["NodeID"] == node:
            return str(each["NodeManagerAddress"])
    return None


def on_node(address: str | None) -> str:
    """Return " on 10.0.0.2" for the address of a node, "" where this machine is the only node."""
    if address and address != _LOOPBACK:
        return f" on {address}"
    return ""
