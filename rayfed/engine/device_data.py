"""The examples of clients and test sets on a host's device: kept there or streamed to it, and their batches."""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Phase
from rayfed.augment.base import Augment
from rayfed.core.machine import memory_bytes
from rayfed.core.modules import ALIGNMENT
from rayfed.core.record_privacy import sampling_rate
from rayfed.core.rng import floor_share, generator, global_state_kept
from rayfed.core.round_record import SERVER
from rayfed.core.task import Batch, Task
from rayfed.data.on_disk import LazyRows
from rayfed.data.population import SPLITS, Client, ClientSource, Examples, MadeClients, PooledExamples, Population
from rayfed.engine.least_recent import LeastRecent

_MOST_VIEWS = 1024
"""Cached clients whose parts hold no inputs themselves: such parts take ten KB each, and are quickly made."""
_AT_ONCE = 2**16  # numbers of batches that are read together, which fit into a CPU's cache


class Normalise:
    """Normalises a batch of uint8 images to floats, (x / 255 − mean) / std; other dtypes stay as they are."""

    def __init__(self, population: Population, device: torch.device, *, channels_last: bool):
        mean = torch.tensor(population.mean)
        std = torch.tensor(population.std)
        scale = 1 / (255 * std)
        self.scale = scale.view(-1, 1, 1).to(device)
        shift = -mean / std
        self.shift = shift.view(-1, 1, 1).to(device)
        self.channels_last = channels_last

    def augmented(self, x: Tensor, augment: Augment, seeds: Sequence[Callable[[], None]] = ()) -> Tensor:
        """Normalise and augment a batch, or with `seeds` those of several clients; see `Augment.together`.

        `augment` is applied to pixels in [0, 1] or after normalisation.
        """
        change: Callable[[Tensor], Tensor] = augment
        if seeds:
            change = partial(augment.together, seeds=seeds)
        if not augment.after_normalisation:
            pixels = x.dtype == torch.uint8
            if pixels:
                x = x.float().div_(255)
            x = change(x)
            if pixels:
                x = x.mul(self.scale * 255).add_(self.shift)
        x = self(x)
        if augment.after_normalisation:
            return change(x)
        return x

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.float().mul_(self.scale).add_(self.shift)
        if self.channels_last and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        return x


class Streamed:
    """A stand-in for a tensor [n, ...] on `device`: indexing with row numbers on the CPU reads these rows."""

    def __init__(self, source: np.ndarray | LazyRows, device: torch.device):
        self.source = source
        self.device = device
        self.dtype = torch.from_numpy(np.empty(0, source.dtype)).dtype

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        return self._read(rows.numpy())

    def __getitem__(self, rows: slice) -> Tensor:
        return self._read(np.arange(*rows.indices(len(self.source))))

    def _read(self, rows: np.ndarray) -> Tensor:
        pinned = self.device.type == "cuda"  # the copy to the GPU then does not hold up the next batch
        shape = (len(rows), *self.source.shape[1:])
        batch = torch.empty(shape, dtype=self.dtype, pin_memory=pinned)
        if isinstance(self.source, LazyRows):
            self.source.read(rows, batch.numpy())
        else:
            np.take(self.source, rows, axis=0, out=batch.numpy(), mode="clip")  # "raise" would buffer the whole
        return batch.to(self.device, non_blocking=True)


class Rows(NamedTuple):
    """Where a part lies in the examples of all clients, which are on the device: from the row `first` on."""

    x: Tensor
    y: Tensor
    first: int


class Part:
    """One part (train, val, test or held_out) of a client's data, or a test set of the server.

    Labels are on the device. So are inputs, as stored, with `data_on_device`; otherwise batches of them are read when
    they are needed, with the same values. `client`, `domain`, `split` and `unseen` are columns of the scores on it.

    Attributes:
        rows: Where it lies in the examples of all clients; None where each part has memory of its own.
    """

    def __init__(
        self,
        examples: Examples,
        device: torch.device,
        normalise: Normalise,
        *,
        data_on_device: bool = True,
        rows: Rows | None = None,
        client: int = SERVER,
        domain: str = "",
        split: str = "train",
        unseen: bool = False,
    ):
        self.rows = rows
        self.client = client
        self.domain = domain
        self.split = split
        self.unseen = unseen
        if rows is not None:
            place = slice(rows.first, rows.first + len(examples))
            self.x: Tensor | Streamed = rows.x[place]
            self.y = rows.y[place]
        else:
            self.y = _to_tensor(examples.y).to(device)
            if data_on_device:
                self.x = _to_tensor(examples.x).to(device)
            else:
                self.x = Streamed(examples.x, device)
        self.normalise = normalise
        self._size = max(1, math.prod(examples.x.shape[1:]))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def rows_device(self) -> torch.device:
        """Where row numbers are expected: on the CPU where inputs are read from there, so that nothing waits."""
        if isinstance(self.x, Tensor):
            return self.y.device
        return torch.device("cpu")

    @property
    def place(self) -> dict[str, Any]:
        """The columns of a score on this part that say whose it is."""
        return {"client": self.client, "domain": self.domain, "split": self.split, "unseen": self.unseen}

    def take(self, rows: Tensor) -> Batch:
        """Return the rows as a normalised batch."""
        x = self.x.index_select(0, rows)
        return Batch(self.normalise(x), self._labels(rows))

    def taken(self, rows: Tensor, sizes: Sequence[int]) -> Iterator[Batch]:
        """Yield the rows in normalised batches of `sizes`; small ones are read together.

        They are not if a batch could begin between the addresses at which torch allocates: kernels would round
        differently there.
        """
        together = 1
        if 4 * self._size % ALIGNMENT == 0:
            together = max(1, _AT_ONCE // (self._size * max(sizes)))
        groups = []
        for first in range(0, len(sizes), together):
            groups.append(sizes[first : first + together])
        sizes_of_groups = [sum(group) for group in groups]
        for group, here in zip(groups, rows.split(sizes_of_groups), strict=True):
            x, y = self.take(here)
            yield from map(Batch, x.split(group), y.split(group))

    def augmented(self, rows: Tensor, augment: Augment) -> Batch:
        """Return the rows as an augmented, normalised training batch."""
        x = self.x.index_select(0, rows)
        return Batch(self.normalise.augmented(x, augment), self._labels(rows))

    def batches(self, size: int, rows: Tensor | None = None) -> Iterator[Batch]:
        """Yield all examples, or `rows`, in order, in batches of at most `size`."""
        if rows is not None:
            yield from map(self.take, rows.to(self.rows_device).split(size))
            return
        for start in range(0, len(self), size):
            stop = start + size
            x = self.normalise(self.x[start:stop])
            yield Batch(x, self.y[start:stop])

    def _labels(self, rows: Tensor) -> Tensor:
        return self.y.index_select(0, rows.to(self.y.device, non_blocking=True))


@dataclass(frozen=True)
class Augmented:
    """A part with augmented inputs.

    `seed_batch(batch=position)` seeds the augmentation of a batch. So batches are the same each time, and reading them
    does not change the random state of the hook that reads.
    """

    part: Part
    augment: Augment
    seed_batch: Callable[..., None]

    def __len__(self) -> int:
        return len(self.part)

    @property
    def y(self) -> Tensor:
        return self.part.y

    def batches(self, size: int, rows: Tensor | None = None) -> Iterator[Batch]:
        """Yield all examples, or `rows`, in order, in batches of at most `size`."""
        if rows is None:
            rows = torch.arange(len(self.part))
        for number, start in enumerate(range(0, len(rows), size)):
            with global_state_kept():
                self.seed_batch(batch=number)
                now = rows[start : start + size].to(self.part.rows_device)
                batch = self.part.augmented(now, self.augment)
            yield batch


_Parts = LeastRecent[tuple[str, int], dict[str, Part]]
"""The parts of clients and test sets, by their kind and number."""


class HostData:
    """The clients' data and the server's test sets on one device: a cache, which changes no result.

    The parts of a client are made when the client runs here. When the inputs would take more than `room` bytes, the
    parts go that have not been used for the longest time. On a CPU, inputs in memory are not copied. A client or test
    set that does not fit even alone is read batch by batch. If the population has its examples in one array and they
    all fit, they go to the device together, and parts are slices of them.
    """

    def __init__(self, population: Population, task: Task, *, held_out_share: float, seed: int, room: float = math.inf):
        self.population = population
        self.task = task
        self.seed = seed
        self._held_out_share = held_out_share
        self._normalise = Normalise(population, task.device, channels_last=task.channels_last)
        self._room = room
        self._pool = self._pooled(population.clients.source)
        if self._pool is not None:
            room -= _held_bytes(self._pool, task.device)
        self._held = _Parts(room)
        self._views = _Parts(_MOST_VIEWS)
        files = {}
        for part in population.examples():
            if isinstance(part.x, LazyRows):
                files[id(part.x.file)] = part.x
        for rows in files.values():  # a file that is not on this machine, or differs, is noticed before the first round
            rows[:1]

    def _pooled(self, source: ClientSource) -> Examples | None:
        """Return the examples of all clients if they are in one array, may be used as they are, and fit the device."""
        if not isinstance(source, PooledExamples) or self._held_out_share:
            return None
        pool = source.pool
        if not isinstance(pool.x, np.ndarray):
            return None
        if self.task.device.type == "cpu":
            fits = _is_usable(pool.x)
        else:  # kernels round differently where a batch begins between the addresses at which torch allocates
            fits = pool.dtype == np.uint8 or pool.x[:1].nbytes % ALIGNMENT == 0
        if not fits or pool.x.nbytes > self._room:
            return None
        return pool

    @cached_property
    def _pool_on_device(self) -> tuple[Tensor, Tensor]:
        assert self._pool is not None
        device = self.task.device
        return _to_tensor(self._pool.x).to(device), _to_tensor(self._pool.y).to(device)

    def _slices(self, client: int, whose: Mapping[str, Any]) -> dict[str, Part]:
        """Return the parts of a client's data as slices of the examples of all clients."""
        key = ("client", client)
        known: dict[str, Part] | None = self._views.get(key)
        if known is not None:
            return known
        x, y = self._pool_on_device
        source = self.population.clients.source
        assert isinstance(source, PooledExamples)
        number = int(self.population.clients.numbers[client])
        firsts = source.bounds[3 * number : 3 * number + 3].tolist()
        parts = {}
        for split, first, examples in zip(SPLITS, firsts, source.parts(number), strict=True):
            rows = Rows(x, y, first)
            parts[split] = Part(examples, self.task.device, self._normalise, rows=rows, split=split, **whose)
        self._views.put(key, parts, 1)
        return parts

    def parts(self, client: int) -> dict[str, Part]:
        """Return the parts of a client's data by split, and `held_out` if the algorithm holds examples out."""
        clients = self.population.clients

        def examples() -> dict[str, Examples]:
            of_client = clients[client]
            train, held_out = divide(of_client, self._held_out_share, self.seed)
            parts = {"train": train, "val": of_client.val, "test": of_client.test}
            if len(held_out):
                return parts | {"held_out": held_out}
            return parts

        whose = {
            "client": clients.id(client),
            "domain": clients.domain(client),
            "unseen": client >= self.task.num_clients,
        }
        if self._pool is not None:
            return self._slices(client, whose)
        copied: Collection[str] = ()
        if isinstance(clients.source, MadeClients):
            copied = {*SPLITS, "held_out"}
        elif self._held_out_share:
            copied = {"train", "held_out"}
        return self._cached(("client", client), examples, whose, copied=copied)

    def training_examples(self, client: int) -> int:
        """Return the number of examples that a client trains on."""
        examples = int(self.population.clients.sizes[client, 0])
        return examples - held_out_count(examples, self._held_out_share)

    def test(self, number: int) -> Part:
        """Return a test set of the server."""
        test = self.population.tests[number]
        parts = self._cached(("test", number), lambda: {test.split: test.examples}, {"domain": test.domain})
        return parts[test.split]

    def _cached(
        self,
        key: tuple[str, int],
        make: Callable[[], Mapping[str, Examples]],
        whose: Mapping[str, Any],
        *,
        copied: Collection[str] = (),
    ) -> dict[str, Part]:
        """Return the parts of the examples that `make` returns; nobody else holds the inputs of those in `copied`."""
        known: dict[str, Part] | None = self._held.get(key) or self._views.get(key)
        if known is not None:
            return known
        device = self.task.device
        examples = make()
        size_of_all = sum(part.x.nbytes for part in examples.values())
        on_device = size_of_all <= self._room
        sizes = []
        for name, part in examples.items():
            if name in copied:
                sizes.append(part.x.nbytes)
            else:
                sizes.append(_held_bytes(part, device))
        held = 0
        if on_device:
            held = sum(sizes)
        if held:
            cache = self._held
            size = held
        else:
            cache = self._views
            size = 1
        cache.make_room(size)
        parts = {}
        for name, part in examples.items():
            parts[name] = Part(part, device, self._normalise, data_on_device=on_device, split=name, **whose)
        cache.put(key, parts, size)
        return parts


def room_for(data_on_device: bool | None, device: torch.device | str, share: float = 1.0) -> float:
    """Return how many bytes of examples may be kept on the device: all, none, or by default a quarter of the memory.

    `share` is that of this host in the memory of the GPU, or of the machine, on which all hosts are assumed to run.
    """
    if data_on_device is not None:
        if data_on_device:
            return math.inf
        return 0.0
    device = torch.device(device)
    if device.type == "cuda":
        whole = torch.cuda.mem_get_info(device)[1]
    else:
        whole = memory_bytes()
    return whole * share / 4


def held_out_count(examples: int, share: float) -> int:
    """Return how many of a client's training examples are held out: `share` of them rounded down, but at least one."""
    if share:
        return max(1, floor_share(examples, share))
    return 0


def divide(client: Client, share: float, seed: int) -> tuple[Examples, Examples]:
    """Return the examples to train on and those held out at random (`Algorithm.held_out_share`), both in order."""
    count = held_out_count(len(client.train), share)
    if not count:
        return client.train, client.train.select(slice(0))
    is_held_out = np.zeros(len(client.train), bool)
    order = generator(seed, "held out", client=client.id).permutation(len(client.train))
    is_held_out[order[:count]] = True
    rest = client.train.select(np.flatnonzero(~is_held_out))
    return rest, client.train.select(np.flatnonzero(is_held_out))


def client_data(
    population: Population, client: int, task: Task, *, held_out_share: float = 0.0, seed: int = 0
) -> ClientData:
    """Return what a hook sees of a client's data, without a host."""
    parts = HostData(population, task, held_out_share=held_out_share, seed=seed).parts(client)
    return ClientData(parts["train"], parts["val"], held_out=parts.get("held_out"))


def _held_bytes(examples: Examples, device: torch.device) -> int:
    """Return the bytes that the inputs of a `Part` on `device` take, besides those that `examples` take already."""
    x = examples.x
    if device.type == "cpu" and isinstance(x, np.ndarray) and _is_usable(x):
        return 0
    return int(x.nbytes)


def _is_usable(array: np.ndarray) -> bool:
    """Return whether a tensor can use an array's memory.

    Bytes may be read-only pages of the object store: they become floats before a model or a hook could write to them.
    """
    return (array.flags.writeable or array.dtype == np.uint8) and array.flags.c_contiguous


def _to_tensor(array: np.ndarray | LazyRows) -> Tensor:
    if isinstance(array, LazyRows):
        array = array[:]
    if not _is_usable(array):
        array = array.copy()
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # only where it is needed, since entering it is neither cheap nor safe in threads
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def batch_rows(
    examples: int, phase: Phase, batch_size: int, *, drop_last: bool, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the row numbers of every batch of a phase; each epoch is a new permutation, cut into batches.

    An epoch has ⌈n / B⌉ batches. With `drop_last` it has ⌊n / B⌋ full batches, or where that is 0, one batch of all n
    rows. `steps` overrides `epochs`: there are as many epochs as needed, the last one cut after the last step.
    `batch_size` is that of a phase without its own.
    """
    wanted = batch_count(examples, phase, batch_size, drop_last=drop_last)
    batch_size = phase.batch_size or batch_size
    rows: list[np.ndarray] = []
    while len(rows) < wanted:
        order = rng.permutation(examples)
        batches = []
        for first in range(0, examples, batch_size):
            batches.append(order[first : first + batch_size])
        if drop_last:
            batches = batches[: examples // batch_size or 1]
        rows += batches
    return rows[:wanted]


def poisson_rows(
    examples: int, phase: Phase, batch_size: int, *, drop_last: bool, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the row numbers of as many batches as `batch_rows` has, of `batch_size` rows on average.

    Every batch contains every row with the same probability, independently of the other rows and batches.
    """
    rate = sampling_rate(phase.batch_size or batch_size, examples)
    rows = []
    for _ in range(batch_count(examples, phase, batch_size, drop_last=drop_last)):
        is_drawn = rng.random(examples) < rate
        rows.append(np.flatnonzero(is_drawn))
    return rows


def batch_count(examples: int, phase: Phase, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of batches of a phase; see `batch_rows`."""
    size = phase.batch_size or batch_size
    if drop_last:
        per_epoch = examples // size or 1
    else:
        per_epoch = -(-examples // size)
    if phase.steps is None:
        wanted = (phase.epochs or 0) * per_epoch
    else:
        wanted = phase.steps
    if examples:
        return wanted
    return 0
