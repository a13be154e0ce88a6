"""Checkpoints: the server's state, every client's state, and the round.

Random states are not saved, because random streams are keyed by round.
"""

import io
import pickle
from typing import Any, BinaryIO

import torch

from rayfed.core.errors import UsageError
from rayfed.core.trees import tree_map
from rayfed.engine.server import Server


def state(server: Server) -> dict[str, Any]:
    """Return the server's state and every client's, copied to the CPU."""
    everything = {
        "server": server.state,
        "clients": {client: server.fleet.states[client] for client in server.fleet.states},
    }
    copied: dict[str, Any] = tree_map(lambda tensor: tensor.detach().cpu().clone(), everything)
    return copied


def dump(server: Server) -> bytes:
    """Return the whole state after the last finished round, for `load`."""
    buffer = io.BytesIO()
    torch.save({"round": server.round, **state(server)}, buffer)
    return buffer.getvalue()


def load(server: Server, file: BinaryIO, name: str) -> None:
    """Restore `server` and its clients from a checkpoint; the next round is the one after it.

    Args:
        name: What to call the checkpoint in messages.

    Raises:
        UsageError: The file is damaged or belongs to another algorithm.
    """
    try:
        content = torch.load(file, map_location=server.ctx.task.device, weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"{name}: cannot be read ({why}); start anew with resume=false") from error
    if not content["server"].keys() >= server.state.keys():  # a setup may have added some
        raise UsageError(f"{name}: belongs to another algorithm; start anew with resume=false")
    server.state, server.round = server.ctx.task.to_memory_format(content["server"]), content["round"]
    server.fleet.load(content["clients"].items())
