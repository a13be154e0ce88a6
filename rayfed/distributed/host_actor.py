"""What a host does, and the messages to it: a pickle, and the tensors as flat arrays, which Ray does not copy."""

import dataclasses
import io
import math
import pickle
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.cloudpickle import CloudPickler
from torch import Tensor

from rayfed.algorithm import State
from rayfed.core.errors import HostLost
from rayfed.core.ids import ClientIndex
from rayfed.core.trees import leaves, nbytes
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device import device_for
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host import Host
from rayfed.engine.requests import ScoreRequest
from rayfed.engine.serialization import state_hash, tensor_bytes

SMALL_BYTES = 4096
"""States of at most this size travel inside messages, since an object of their own would cost more."""
_LARGE = 2**15  # bytes of a tensor, above which a copy takes longer than an array of its own
_ALIGNMENT = 64  # bytes, as torch allocates tensors; with others, kernels may be slow or round differently


class Message(NamedTuple):
    """A value for another process: its pickle with a number in place of each tensor, and the tensors.

    A tensor is its bytes in row-major order, its dtype and its shape. A flat message has one array with the bytes of
    all tensors, and their places, dtypes and shapes in its pickle.
    """

    pickle: bytes
    tensors: list[tuple[np.ndarray, torch.dtype, tuple[int, ...]]]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(data.nbytes for data, _, _ in self.tensors)


def pack_state(state: State) -> Message:
    """Return a state as a message: a flat one, which takes one transfer, but for large tensors on a CPU."""
    tensors = leaves(state)
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return pack(state, flat=not on_cpu or nbytes(state) <= _LARGE * len(tensors))


def pack(value: Any, *, flat: bool = False) -> Message:
    """Return a value that can be pickled as a message, a `flat` one after one transfer from the device."""
    file = io.BytesIO()
    pickler: Any = _Pickler(file, protocol=5)  # type: ignore[no-untyped-call]
    pickler.tensors, pickler.places, pickler.size = [], [] if flat else None, 0
    pickler.dump(value)
    if not pickler.places:
        return Message(file.getvalue(), pickler.tensors)
    buffer = torch.empty(pickler.size, dtype=torch.uint8, device=pickler.places[0][0].device)
    for tensor, start in pickler.places:
        buffer[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return Message(file.getvalue(), [(tensor_bytes(buffer), torch.uint8, (pickler.size,))])


def unpack(message: Message, device: torch.device, *, shared: bool = False) -> Any:
    """Return the value of `message` with its tensors on `device`, in memory of their own.

    With `shared`, tensors on a CPU may lie in the object store. Nobody may modify these, and each keeps its whole
    object alive.
    """
    return _Unpickler(message, device, shared=shared).load()


class _Pickler(CloudPickler):
    tensors: list[tuple[np.ndarray, torch.dtype, tuple[int, ...]]]
    places: list[tuple[Tensor, int]] | None  # the tensors of a flat message, and where they begin
    size: int

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if self.places is None:
            self.tensors.append((tensor_bytes(value), value.dtype, tuple(value.shape)))
            return len(self.tensors) - 1
        start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.places.append((value, start))
        self.size = start + value.nbytes
        return start, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: Message, device: torch.device, *, shared: bool):
        super().__init__(io.BytesIO(message.pickle))
        self._tensors, self._device = message.tensors, device
        self._shared = shared or device.type != "cpu"  # the device has memory of its own
        self._flat: Tensor | None = None  # the bytes of a flat message

    def persistent_load(self, place: Any) -> Tensor:
        if isinstance(place, int):
            data, dtype, shape = self._tensors[place]
            return self._bytes(data).view(dtype).reshape(shape)
        start, dtype, shape = place
        if self._flat is None:
            self._flat = self._bytes(self._tensors[0][0])
        return self._flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def _bytes(self, data: np.ndarray) -> Tensor:
        """Return an array of a message on the device."""
        if not data.size:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
            raw = torch.from_numpy(data)
        if not self._shared or data.ctypes.data % _ALIGNMENT:
            raw = raw.clone()
        return raw.to(self._device)


SmallStates = Mapping[ClientIndex, Message | None]
"""The states of clients for a host. Those above `SMALL_BYTES` are None here, and further arguments in the same order,
so that Ray finds their objects."""


def all_states(small: SmallStates, large: Sequence[Message]) -> Iterator[tuple[ClientIndex, Message]]:
    """Yield each client with its state."""
    left = iter(large)
    return ((client, state or next(left)) for client, state in small.items())


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
    """The calls of a `Host` in another process, which takes up one simulation after the other.

    Large states and replies of single clients are return values of their own, which the caller owns, so that Ray moves
    and spills them.
    """

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
        for name in ("host", "_sent"):
            self.__dict__.pop(name, None)  # frees the memory of the previous simulation
        self.device = device_for(gpus, blueprint.model)
        self._sent: tuple[int, Any] = (-1, None)  # the last payload for all clients, and its number
        self._held: tuple[int, set[Hashable], dict[Hashable, ExactSum]] = (-1, set(), {})  # see `_hold`
        self.host = Host(blueprint, population, self.device, share=share, position=position)
        return str(ray.util.get_node_ip_address())

    def exchange(
        self, message: Message, number: int, down: Message, small: SmallStates, separate: bool, *large: Message
    ) -> Any:
        """Run an exchange; see `Host.exchange`.

        Args:
            message: The request, and what single clients receive.
            number: The number of the payload `down`.
            down: What all clients receive.
            small, large: The clients' states; `small` has None in place of the large ones.
            separate: Whether every client's state, and its reply that the server will weigh, are objects of their own.
                The first object then repeats the states of at most `SMALL_BYTES`.

        Returns:
            The result without its sum, for which see `sums`, and the states by client.
        """
        done = self._of_clients(self.host.exchange, message, number, down, small, large)
        self._hold(number, [reply.client for reply in done.replies], {"": done.total})
        after = {client: pack_state(done.states.pop(client)) for client in list(done.states)}
        result = pack(dataclasses.replace(done, total=ExactSum(), states={}, unweighted={}))
        if not separate:
            return result, after
        repeated = {client: state for client, state in after.items() if state.nbytes <= SMALL_BYTES}
        return (result, repeated), *after.values(), *map(pack, done.unweighted.values())

    def weigh(self, number: int, weights: Mapping[ClientIndex, float], *unweighted: Message) -> None:
        """Add up the replies of the clients of `weights`, given in their order; see `sums`."""
        replies = (unpack(reply, self.device, shared=True) for reply in unweighted)
        self._hold(number, weights, {"": self.host.weigh(zip(replies, weights.values(), strict=True))})

    def _hold(self, number: int, units: Collection[Hashable], sums: Mapping[Hashable, ExactSum]) -> None:
        """Keep sums over `units` until the server asks for `sums` of the same `number`; add no unit twice."""
        if self._held[0] != number:
            self._held = number, set(), {}
        _, held, totals = self._held
        if held.isdisjoint(units):
            held.update(units)
            for key, total in sums.items():
                totals.setdefault(key, ExactSum()).merge(total)

    def sums(self, number: int, units: set[Hashable]) -> Message:
        """Return the sums over `units`, which are all that this host was sent with `number`, and drop them.

        Raises:
            HostLost: The host does not hold the sums of these.
        """
        if self._held[:2] != (number, units):
            raise HostLost("a host does not hold the sum over the clients that it has run")
        totals, self._held = self._held[2], (-1, set(), {})
        return pack(totals)

    def on_clients(
        self, method: str, message: Message, number: int, down: Message, small: SmallStates, *large: Message
    ) -> Message:
        """Return what a method of the host returns for clients; the other arguments are those of `exchange`."""
        return pack(self._of_clients(getattr(self.host, method), message, number, down, small, large))

    def score_global(self, request: ScoreRequest, number: int, model: Message) -> Message:
        """Score a model of the server, whose number is `number`; see `Host.score_global`."""
        return pack(self.host.score_global(request, self._unpacked(number, model)))

    def gradients(self, request: ScoreRequest, number: int, model: Message) -> Message:
        """Return what `Host.gradients` returns for a model of the server without the sums, for which see `sums`."""
        found = self.host.gradients(request, self._unpacked(number, model))
        units = [*request.clients, *(("test set", test) for test in request.tests)]
        self._hold(number, units, {(each.domain, each.split): each.total for each in found})
        return pack([each._replace(total=ExactSum()) for each in found])

    def hashes(self, small: SmallStates, *large: Message) -> Message:
        """Return the hash of each client's state."""
        cpu = torch.device("cpu")
        return pack({client: state_hash(unpack(state, cpu)) for client, state in all_states(small, large)})

    def _of_clients(
        self,
        method: Callable[..., Any],
        message: Message,
        number: int,
        down: Message,
        small: SmallStates,
        large: Sequence[Message],
    ) -> Any:
        request, unicast = unpack(message, self.device, shared=True)
        before = {
            client: self.host.ctx.task.to_memory_format(unpack(state, self.device, shared=True))
            for client, state in all_states(small, large)
        }
        return method(request, self._unpacked(number, down), unicast, before)

    def _unpacked(self, number: int, sent: Message) -> Any:
        """Return a payload that several calls share, unpacked once."""
        if self._sent[0] != number:
            self._sent = -1, None  # frees the memory of the previous payload
            self._sent = number, unpack(sent, self.device, shared=True)
        return self._sent[1]
