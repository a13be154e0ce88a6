"""What a host does, and the messages to it: a pickle, and the bytes of the tensors, which Ray does not copy."""

import dataclasses
import gc
import io
import math
import pickle
import warnings
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.cloudpickle import CloudPickler
from torch import Tensor

from rayfed.core.ids import ClientIndex
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device import device_for
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host import Host
from rayfed.engine.requests import ExchangeResult
from rayfed.engine.serialization import tensor_bytes

SMALL_BYTES = 4096
"""States of at most this size travel inside messages, since an object of their own would cost more."""
_ALIGNMENT = 64  # bytes, as torch allocates tensors; with others, kernels may be slow or round differently


class Message(NamedTuple):
    """A value for another process.

    Attributes:
        pickle: The value, with a place, a dtype and a shape instead of each tensor.
        data: The bytes of all tensors in row-major order, at aligned places, uint8 [n].
        nbytes: The bytes of all tensors, without the gaps between them.
    """

    pickle: bytes
    data: np.ndarray
    nbytes: int


def pack(value: Any) -> Message:
    """Return a value that can be pickled as a message, after a single transfer from the device."""
    file = io.BytesIO()
    pickler: Any = _Pickler(file, protocol=5)  # type: ignore[no-untyped-call]
    pickler.places, pickler.size = [], 0
    pickler.dump(value)
    tensors = [tensor for tensor, _ in pickler.places]
    size = pickler.size or 1  # an empty array cannot be viewed
    buffer = torch.empty(size, dtype=torch.uint8, device=tensors[0].device if tensors else "cpu")
    for tensor, start in pickler.places:
        buffer[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return Message(file.getvalue(), tensor_bytes(buffer), sum(tensor.nbytes for tensor in tensors))


def unpack(message: Message, device: torch.device, *, shared: bool = False) -> Any:
    """Return the value of `message` with its tensors on `device`, each in memory of its own.

    With `shared`, they are views of the message's bytes, which on a CPU may lie in the object store. Nobody may modify
    these, and each keeps all bytes alive.
    """
    return _Unpickler(message, device, shared=shared).load()


class _Pickler(CloudPickler):
    places: list[tuple[Tensor, int]]  # the tensors, and where they begin
    size: int

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.places.append((value, start))
        self.size = start + value.nbytes
        return start, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: Message, device: torch.device, *, shared: bool):
        super().__init__(io.BytesIO(message.pickle))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
            self._bytes = torch.from_numpy(message.data).to(device)
        self._shared = shared and self._bytes.data_ptr() % _ALIGNMENT == 0

    def persistent_load(self, place: Any) -> Tensor:
        start, dtype, shape = place
        view = self._bytes[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        return view if self._shared else view.clone()


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
        gc.freeze()  # a search of all imported objects would take longer than a short round
        return str(ray.util.get_node_ip_address())

    def ask(self, method: str, message: Message, number: int, payload: Message, *large: Message) -> Any:
        """Call a method of the host.

        Args:
            method: The name of the method.
            message: The request, and where clients receive the payload, what single clients receive with it and their
                states; those above `SMALL_BYTES` are None there.
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
            left, to_memory_format = iter(large), self.host.ctx.task.to_memory_format
            states = {client: self._unpack(state or next(left)) for client, state in small.items()}
            of_clients = [unicast, {client: to_memory_format(state) for client, state in states.items()}]
        if self._payload[0] != number:
            self._payload = -1, None  # frees the memory of the previous payload
            self._payload = number, self._unpack(payload)
        result = getattr(self.host, method)(request, self._payload[1], *of_clients)
        if method == "gradients":
            self._hold({(each.domain, each.split): each.total for each in result})
            return pack([each._replace(total=ExactSum()) for each in result])
        return self._exchanged(result) if method == "exchange" else pack(result)

    def _exchanged(self, done: ExchangeResult) -> tuple[Message, dict[ClientIndex, Any], dict[ClientIndex, Any]]:
        self._hold({"": done.total})
        states = {client: kept(pack(done.states.pop(client))) for client in list(done.states)}
        unweighted = {client: ray.put(pack(done.unweighted.pop(client))) for client in list(done.unweighted)}
        return pack(dataclasses.replace(done, total=ExactSum())), states, unweighted

    def weigh(self, replies: Iterable[tuple[Any, float]]) -> Message:
        """Return the sum of clients' replies, which are objects of this process, with their weights."""
        return pack(self.host.weigh((self._unpack(ray.get(reply)), weight) for reply, weight in replies))

    def _hold(self, sums: Mapping[Any, ExactSum]) -> None:
        for key, total in sums.items():
            if not total.is_empty:
                self._sums.setdefault(key, ExactSum()).merge(total)

    def sums(self) -> Message:
        """Return the sums over all clients and test sets since the last call, by what is summed, and drop them."""
        sums, self._sums = self._sums, {}
        return pack(sums)

    def _unpack(self, message: Message) -> Any:
        return unpack(message, self.device, shared=True)


def kept(state: Message) -> Any:
    """Return a state as the server keeps it: an object of this process, or if it is small, the message itself."""
    return ray.put(state) if state.nbytes > SMALL_BYTES else state
