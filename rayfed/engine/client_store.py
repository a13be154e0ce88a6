"""The states of clients in this process, spilled to disk beyond a budget."""

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rayfed.algorithm import State
from rayfed.core.ids import ClientIndex
from rayfed.core.trees import nbytes, serialised, tree_map
from rayfed.engine.least_recent import LeastRecent


class ClientStates(Mapping[ClientIndex, State]):
    """The states of the clients that have taken part in an exchange, wherever the states are; each is read by itself.

    Until its first exchange, a client's state is a function of the seed, which is computed where it is needed.

    Attributes:
        versions: The number of the last write of each client's state; every write has its own number.
    """

    def __init__(self) -> None:
        self.versions: dict[ClientIndex, int] = {}

    def __iter__(self) -> Iterator[ClientIndex]:
        return iter(sorted(self.versions))

    def __len__(self) -> int:
        return len(self.versions)

    def __contains__(self, client: object) -> bool:
        return client in self.versions


class ClientStore(ClientStates):
    """The states of clients in the memory of this process.

    When all states take more than `memory` bytes, those that have not been used for the longest time go to a temporary
    folder. They come back when they are read, to `device`.

    `device_memory` is the bytes of states on a device with memory of its own; other states are in memory or on disk. It
    is None where the device has no memory of its own, or for all states on the device.
    """

    def __init__(
        self, memory: float = math.inf, device: torch.device | str = "cpu", *, device_memory: float | None = None
    ):
        super().__init__()
        self._device = torch.device(device)
        if device_memory is None:
            self._on_device = None
        else:
            self._on_device = LeastRecent[ClientIndex, State](device_memory)
        self._kept = LeastRecent[ClientIndex, State](memory)
        self._spilled: dict[ClientIndex, Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._written = 0

    def __getitem__(self, client: ClientIndex) -> State:
        if self._on_device is not None:
            there = self._on_device.get(client)
            if there is not None:
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

    def __setitem__(self, client: ClientIndex, state: State) -> None:
        self._written += 1
        self.versions[client] = self._written
        spilled = self._spilled.pop(client, None)
        if spilled is not None:
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
        self.versions.clear()

    def _keep(self, client: ClientIndex, state: State) -> None:
        if self._on_device is None:
            self._keep_in_memory(client, state)
            return
        self._kept.remove(client)
        for oldest, other in self._on_device.put(client, state, nbytes(state)):
            self._keep_in_memory(oldest, moved(other, torch.device("cpu")))

    def _keep_in_memory(self, client: ClientIndex, state: State) -> None:
        for oldest, other in self._kept.put(client, state, nbytes(state)):
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="rayfed-states-")
            self._spilled[oldest] = Path(self._folder.name) / f"{oldest}.pt"
            self._spilled[oldest].write_bytes(serialised(other))


def moved(state: State, device: torch.device) -> State:
    """Return a state on `device`."""
    there: State = tree_map(lambda tensor: tensor.to(device), state)
    return there
