"""Checkpoints: the server's state, every client's, and the round. Random numbers need none: they are keyed by round."""

import os
from pathlib import Path
from typing import Any

import torch

from rayfed.engine.server import Server
from rayfed.errors import UsageError


def save(server: Server, path: Path) -> None:
    """Writes the state after the last finished round to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save({"round": server.round, "server": server.state, "clients": server.fleet.save()}, part)
    os.replace(part, path)


def load(server: Server, path: Path) -> None:
    """Puts `server` and its clients where the checkpoint left them; its next round is the one after.

    Raises:
        UsageError: the file is no checkpoint of this simulation.
    """
    content = _read(path, server.ctx.task.device)
    if content["server"].keys() != server.state.keys():
        raise UsageError(f"{path}: the checkpoint is of another algorithm; remove it or use another results folder")
    server.state, server.round = server.ctx.task.layout(content["server"]), content["round"]
    server.fleet.load(content["clients"])


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, OSError) as error:
        raise UsageError(f"{path}: cannot be read as a checkpoint ({str(error).splitlines()[0]})") from error
