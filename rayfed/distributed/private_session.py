"""A Ray session of this machine alone: it listens on the loopback interface, and only its user may read its token.

Ray uses the machine's address also where no other machine takes part, so that its ports are open to the network.
"""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

import ray

from rayfed.distributed.ray_internals import on_loopback

_LOOPBACK = "127.0.0.1"


def start_here(**options: Any) -> Any:
    """Start Ray on this machine alone, with options of `ray.init`, and return what that returns."""
    protect_token()
    with on_loopback():
        return ray.init(address="local", **options)


def is_private() -> bool:
    """Return whether the session is of this machine alone. Any other one may have, or get, nodes without its files."""
    return all(node["NodeManagerAddress"] == _LOOPBACK for node in ray.nodes())


def protect_token() -> None:
    """Make the token with which Ray's processes know each other readable for this user only.

    Ray makes the file `~/.ray/auth_token` where it is missing, readable for everybody. Whoever has the token may run
    code in the session.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    with contextlib.suppress(OSError):  # a home that may only be read; Ray then says what it needs
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        elif path.stat().st_mode & 0o077:
            path.chmod(0o600)


def _create(path: Path) -> None:
    """Write a new token in one step, unless another process does so at the same moment."""
    made = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with open(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        made.unlink(missing_ok=True)
