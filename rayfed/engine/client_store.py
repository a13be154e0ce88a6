"""The states of clients in this process, spilled to disk beyond a budget."""

import math
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rayfed.algorithm import State
from rayfed.core.ids import ClientIndex
from rayfed.core.least_recent import LeastRecent
from rayfed.core.trees import nbytes, tree_map
from rayfed.engine.serialization import serialised


class ClientStates(Mapping[ClientIndex, State]):
    """The states of the clients that have taken part in an exchange, wherever the states are; each is read by itself.

    Until its first exchange, a client's state is a function of the seed, which is computed where it is needed.
    """

    @abstractmethod
    def version(self, client: ClientIndex) -> int:
        """Return the number of the write of the client's state; every write has its own number."""


class ClientStore(ClientStates):
    """The states of clients in the memory of this process.

    When all states take more than `memory` bytes, those that have not been used for the longest time go to a temporary
    folder. They come back when they are read.

    Args:
        memory: The bytes of states in memory.
        device: The device to which states are read.
        device_memory: The bytes of states on a device with memory of its own; the other states are in memory or on
            disk. None where the device has no memory of its own, or for all states on the device.
    """

    def __init__(
        self, memory: float = math.inf, device: torch.device | str = "cpu", *, device_memory: float | None = None
    ):
        self._device = torch.device(device)
        self._on_device = None if device_memory is None else LeastRecent[ClientIndex, State](device_memory)
        self._kept = LeastRecent[ClientIndex, State](memory)
        self._spilled: dict[ClientIndex, Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._versions: dict[ClientIndex, int] = {}
        self._written = 0

    def __iter__(self) -> Iterator[ClientIndex]:
        return iter(sorted(self._versions))

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, client: object) -> bool:
        return client in self._versions

    def __getitem__(self, client: ClientIndex) -> State:
        if self._on_device is not None and (there := self._on_device.get(client)) is not None:
            return there
        kept: State | None = self._kept.get(client)
        if kept is None:
            path = self._spilled.pop(client)
            kept = torch.load(path, weights_only=True)
            path.unlink()
        elif self._on_device is None:
            return kept
        state = moved(kept, self._device)
        self._keep(client, state)
        return state

    def version(self, client: ClientIndex) -> int:
        return self._versions[client]

    def __setitem__(self, client: ClientIndex, state: State) -> None:
        self._written += 1
        self._versions[client] = self._written
        if (spilled := self._spilled.pop(client, None)) is not None:
            spilled.unlink()
        self._keep(client, state)

    def clear(self) -> None:
        """Forget all states. Later writes still have larger numbers."""
        for path in self._spilled.values():
            path.unlink()
        self._kept.clear()
        if self._on_device is not None:
            self._on_device.clear()
        self._spilled.clear()
        self._versions.clear()

    def _keep(self, client: ClientIndex, state: State) -> None:
        if self._on_device is None:
            self._keep_in_memory(client, state)
            return
        self._kept.remove(client)
        for oldest, other in self._on_device.put(client, state, nbytes(state)):
            self._keep_in_memory(oldest, moved(other, torch.device("cpu")))

    def _keep_in_memory(self, client: ClientIndex, state: State) -> None:
        for oldest, other in self._kept.put(client, state, nbytes(state)):
            self._spilled[oldest] = self._spill(oldest, other)

    def _spill(self, client: ClientIndex, state: State) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rayfed-states-")
        path = Path(self._folder.name) / f"{client}.pt"
        path.write_bytes(serialised(state))
        return path


def moved(state: State, device: torch.device) -> State:
    """Return a state on `device`."""
    there: State = tree_map(lambda tensor: tensor.to(device), state)
    return there
