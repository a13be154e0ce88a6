"""Checkpoints: the server's state, every client's, and the round. Random numbers need none: they are keyed by round."""

import io
import pickle
from typing import Any, BinaryIO

import torch

from rayfed.core.errors import UsageError
from rayfed.core.trees import tree_map
from rayfed.engine.server import Server


def state(server: Server) -> dict[str, Any]:
    """The server's state and every client's, copied to the CPU."""
    whole = {"server": server.state, "clients": dict(sorted(server.fleet.save().items()))}
    return tree_map(lambda tensor: tensor.detach().cpu().clone(), whole)


def dump(server: Server) -> bytes:
    """The whole state after the last finished round, for `load`."""
    buffer = io.BytesIO()
    torch.save({"round": server.round, **state(server)}, buffer)
    return buffer.getvalue()


def load(server: Server, file: BinaryIO, name: str) -> None:
    """Puts `server` and its clients where the checkpoint left them; its next round is the one after.

    Raises:
        UsageError: `file`, called `name`, is damaged or of another algorithm.
    """
    try:
        content = torch.load(file, map_location=server.ctx.task.device, weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"{name}: cannot be read ({why}); start anew with resume=false") from error
    if not content["server"].keys() >= server.state.keys():  # a setup may have added some
        raise UsageError(f"{name}: is of another algorithm; start anew with resume=false")
    server.state, server.round = server.ctx.task.to_memory_format(content["server"]), content["round"]
    server.fleet.load(content["clients"])
