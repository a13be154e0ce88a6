"""What a host does, and the messages to it: a pickle, and the bytes of the tensors, which Ray does not copy."""

import gc
import io
import math
import pickle
import warnings
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.cloudpickle import CloudPickler
from torch import Tensor

from rayfed.core.exact_sum import ExactSum
from rayfed.core.ids import ClientIndex
from rayfed.core.modules import ALIGNMENT
from rayfed.core.trees import tensor_bytes
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device import device_for, device_name
from rayfed.engine.fleet import ExchangeResult
from rayfed.engine.host import Host

SMALL_BYTES = 4096
"""States of at most this size travel inside messages, since an object of their own would cost more."""
_LARGE_BYTES = 2**20  # of a tensor that is an array of its own, which is not copied before Ray copies it


class Message(NamedTuple):
    """A value for another process, to be sent before its tensors are modified.

    Attributes:
        pickle: The value, with a place, a dtype and a shape instead of each tensor.
        data: The bytes of tensors in row-major order, uint8 [n]: all small ones at aligned places, then each large one.
        nbytes: The bytes of all tensors, without the gaps between them.
    """

    pickle: bytes
    data: tuple[np.ndarray, ...]
    nbytes: int


def pack(value: Any) -> Message:
    """Return a value that can be pickled as a message, after a single transfer of the small tensors from the device."""
    file = io.BytesIO()
    pickler: Any = _Pickler(file, protocol=5)  # type: ignore[no-untyped-call]
    pickler.small = []
    pickler.large = []
    pickler.size = 0
    pickler.dump(value)
    device = "cpu"
    if pickler.small:
        device = pickler.small[0][0].device
    buffer = torch.empty(pickler.size or 1, dtype=torch.uint8, device=device)  # an empty array cannot be viewed
    for tensor, start in pickler.small:
        place = buffer[start : start + tensor.nbytes]
        place.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    data = tuple(map(tensor_bytes, (buffer, *pickler.large)))
    of_small = sum(tensor.nbytes for tensor, _ in pickler.small)
    of_large = sum(map(len, data[1:]))
    return Message(file.getvalue(), data, of_small + of_large)


def unpack(message: Message, device: torch.device, *, shared: bool = False) -> Any:
    """Return the value of `message` with its tensors on `device`, each in memory of its own.

    With `shared`, they are views of the message's bytes, which on a CPU may lie in the object store. Nobody may modify
    these, and each keeps all bytes alive.
    """
    return _Unpickler(message, device, shared=shared).load()


class _Pickler(CloudPickler):
    small: list[tuple[Tensor, int]]  # the small tensors, and where they begin
    large: list[Tensor]
    size: int  # of the small tensors with the gaps

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        array = 0
        start = -(-self.size // ALIGNMENT) * ALIGNMENT
        if value.nbytes >= _LARGE_BYTES:
            self.large.append(value)
            array = len(self.large)
            start = 0
        else:
            self.small.append((value, start))
            self.size = start + value.nbytes
        return array, start, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: Message, device: torch.device, *, shared: bool):
        super().__init__(io.BytesIO(message.pickle))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
            self._data = [torch.from_numpy(array) for array in message.data]
        self._data[0] = self._data[0].to(device)  # all small tensors at once
        self._device = device
        self._shared = shared

    def persistent_load(self, place: Any) -> Tensor:
        array, start, dtype, shape = place
        size = math.prod(shape) * dtype.itemsize
        flat = self._data[array][start : start + size]
        view: Tensor = flat.to(self._device).view(dtype).reshape(shape)
        moved = self._device != self._data[array].device  # so that it is in memory of its own already
        if moved or (self._shared and flat.data_ptr() % ALIGNMENT == 0):
            return view
        return view.clone()


def readable(error: Exception) -> Exception:
    """Return `error`, or a RuntimeError with its text and notes if other processes could not unpickle it."""
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:
        replacement = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            replacement.add_note(note)
        return replacement
    return error


class HostMethods:
    """The calls of a `Host` in another process, which takes up one simulation after the other."""

    host: Host

    def __init__(self) -> None:
        gc.freeze()  # a search of all imported objects would take longer than a short round

    def take_up(
        self, blueprint: Blueprint, population: Population, gpus: float, share: float = 1.0, position: int = 0
    ) -> str:
        """Become a host of a simulation in place of the previous one, and return the address of the node.

        Args:
            gpus: The GPUs that the process has reserved.
            share, position: See `Host`.

        Raises:
            UsageError: The population's files are not on this machine.
        """
        for name in ("host", "_payload", "_sums"):
            self.__dict__.pop(name, None)  # frees the memory of the previous simulation
        self.device = device_for(gpus, blueprint.model)
        self._payload: tuple[int, Any] = (-1, None)  # the last payload for all hosts, and its number
        self._sums: dict[Hashable, ExactSum] = {}
        self.host = Host(blueprint, population, self.device, share=share, position=position)
        return str(ray.util.get_node_ip_address())

    def kind_of_device(self) -> tuple[str, float]:
        """Return the type of the device, and the GiB of its memory for clients that train at once, to a tenth."""
        return device_name(self.device), round(self.host.room_for_training / 2**30, 1)

    def ask(self, method: str, message: Message, number: int, payload: Message, *large: Message) -> Any:
        """Call a method of the host.

        Args:
            method: The name of the method.
            message: The request. Where clients receive the payload, it is followed by what single clients receive with
                it, and by the states of clients, None in place of those above `SMALL_BYTES`.
            number: The number of the payload; equal payloads are unpacked once.
            payload: What all hosts receive: what the clients download, or a model of the server.
            large: The states above `SMALL_BYTES`, in the same order.

        Returns:
            The result without sums over clients, for which see `sums`. Of an exchange also each client's next state,
            as `kept` returns it, and where the server weighs the replies first, their objects.
        """
        request, *of_clients = self._unpack(message)
        if of_clients:
            unicast, small = of_clients
            left = iter(large)
            to_memory_format = self.host.ctx.task.to_memory_format
            states = {}
            for client, state in small.items():
                states[client] = self._unpack(state or next(left))
            placed = {client: to_memory_format(state) for client, state in states.items()}
            of_clients = [unicast, placed]
        if self._payload[0] != number:
            self.drop_payload()  # before the next one takes memory
            self._payload = number, self._unpack(payload)
        if method == "exchange":
            of_clients.append(self._sums.setdefault("", self.host.empty_sum()))
        result = getattr(self.host, method)(request, self._payload[1], *of_clients)
        if method == "gradients":
            for each in result:
                key = (each.domain, each.split)
                self._sums.setdefault(key, ExactSum()).merge(each.total)
            return pack([each._replace(total=ExactSum()) for each in result])
        if method == "exchange":
            return self._exchanged(result)
        return pack(result)

    def _exchanged(self, done: ExchangeResult) -> tuple[Message, dict[ClientIndex, Any], dict[ClientIndex, Any]]:
        states = {}
        for client in list(done.states):
            states[client] = kept(pack(done.states.pop(client)))
        unweighted = {}
        for client in list(done.unweighted):
            unweighted[client] = ray.put(pack(done.unweighted.pop(client)))
        return pack(done), states, unweighted

    def weigh(self, replies: Iterable[tuple[Any, float]]) -> Message:
        """Return the sum of clients' replies, which are objects of this process, with their weights."""
        received = ((self._unpack(ray.get(reply)), weight) for reply, weight in replies)
        return pack(self.host.weigh(received))

    def drop_payload(self) -> None:
        """Free the memory of the last payload."""
        self._payload = -1, None

    def sums(self) -> Message:
        """Return the sums over all clients and test sets since the last call, by what is summed, and drop them."""
        sums = self._sums
        self._sums = {}
        filled = {}
        for key, total in sums.items():
            if not total.is_empty:
                filled[key] = total
        return pack(filled)

    def _unpack(self, message: Message) -> Any:
        return unpack(message, self.device, shared=True)


def kept(state: Message) -> Any:
    """Return a state as the server keeps it: an object of this process, or if it is small, the message itself."""
    if state.nbytes > SMALL_BYTES:
        return ray.put(state)
    return state
