"""The examples of a client, kept on its host's device or streamed to it, and their batches."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import ClientData
from rayfed.augment.base import Augment
from rayfed.core.records import SERVER
from rayfed.core.rng import torch_state_kept
from rayfed.core.task import Batch, Task
from rayfed.data.clients import Examples
from rayfed.data.lazy_rows import LazyRows
from rayfed.data.population import Population
from rayfed.engine.held_out import divide
from rayfed.engine.streamed import Streamed

Transform = Callable[[Tensor], Tensor]


class Normalise:
    """Normalises a batch of uint8 images to floats, (x / 255 − mean) / std; other dtypes stay as they are."""

    def __init__(self, population: Population, device: torch.device, *, channels_last: bool):
        mean, std = torch.tensor(population.mean), torch.tensor(population.std)
        self.scale = (1 / (255 * std)).view(-1, 1, 1).to(device)
        self.shift = (-mean / std).view(-1, 1, 1).to(device)
        self.channels_last = channels_last

    def augmented(self, x: Tensor, augment: Augment) -> Tensor:
        """Normalise and augment a batch; `augment` is applied to pixels in [0, 1] or after normalisation."""
        if not augment.after_normalisation:
            pixels = x.dtype == torch.uint8
            x = augment(x.float().div_(255) if pixels else x)
            x = x.mul(self.scale * 255).add_(self.shift) if pixels else x
        x = self(x)
        return augment(x) if augment.after_normalisation else x

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.float().mul_(self.scale).add_(self.shift)
        if self.channels_last and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        return x


class Part:
    """One part (train, val or test) of a client's data, or a test set of the server.

    Labels are on the device. So are inputs, as stored, with `data_on_device`; otherwise batches of them are read when
    they are needed, with the same values. `client`, `domain`, `split` and `unseen` say whose the part is, as in the
    scores that are measured on it.
    """

    def __init__(
        self,
        examples: Examples,
        device: torch.device,
        normalise: Normalise,
        *,
        data_on_device: bool = True,
        client: int = SERVER,
        domain: str = "",
        split: str = "train",
        unseen: bool = False,
    ):
        self.client, self.domain, self.split, self.unseen = client, domain, split, unseen
        if data_on_device:
            self.x: Tensor | Streamed = _to_tensor(examples.x, shared=_never_written(examples.x)).to(device)
        else:
            self.x = Streamed(examples.x, device)
        self.y = _to_tensor(examples.y).to(device)
        self.normalise = normalise

    def __len__(self) -> int:
        return len(self.y)

    @property
    def rows_device(self) -> torch.device:
        """Where row numbers are expected: on the CPU where inputs are read from there, so that nothing waits."""
        return self.y.device if isinstance(self.x, Tensor) else torch.device("cpu")

    @property
    def place(self) -> dict[str, Any]:
        """The columns of a score on this part that say whose it is."""
        return {"client": self.client, "domain": self.domain, "split": self.split, "unseen": self.unseen}

    def take(self, rows: Tensor) -> Batch:
        """Return the rows as a normalised batch."""
        return Batch(self.normalise(self.x.index_select(0, rows)), self._labels(rows))

    def augmented(self, rows: Tensor, augment: Augment) -> Batch:
        """Return the rows as an augmented, normalised training batch."""
        return Batch(self.normalise.augmented(self.x.index_select(0, rows), augment), self._labels(rows))

    def batches(self, size: int, rows: Tensor | None = None) -> Iterator[Batch]:
        """Yield all examples, or `rows`, in order, in batches of at most `size`."""
        if rows is not None:
            for some in rows.to(self.rows_device).split(size):
                yield self.take(some)
            return
        for start in range(0, len(self), size):
            stop = start + size
            yield Batch(self.normalise(self.x[start:stop]), self.y[start:stop])

    def _labels(self, rows: Tensor) -> Tensor:
        return self.y.index_select(0, rows.to(self.y.device, non_blocking=True))


@dataclass(frozen=True)
class Augmented:
    """A part with augmented inputs.

    The augmentation of a batch is seeded by `seed_batch(batch=position)`. So batches are the same each time, and
    reading them does not change the random state of the hook that does.
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
        rows = torch.arange(len(self.part)) if rows is None else rows
        for number, start in enumerate(range(0, len(rows), size)):
            with torch_state_kept():
                self.seed_batch(batch=number)
                batch = self.part.augmented(rows[start : start + size].to(self.part.rows_device), self.augment)
            yield batch


def client_data(
    population: Population, client: int, task: Task, *, held_out_share: float = 0.0, seed: int = 0
) -> ClientData:
    """Return what a hook sees of a client's data, without a host."""
    normalise = Normalise(population, task.device, channels_last=task.channels_last)
    own = population.clients[client]
    divided = divide(own, held_out_share, seed)
    train, val, held_out = (Part(part, task.device, normalise) for part in (divided.train, own.val, divided.held_out))
    return ClientData(train, val, held_out=held_out if len(held_out) else None)


def held_bytes(examples: Examples, device: torch.device) -> int:
    """Return the bytes that the inputs of a `Part` on `device` take, besides those that `examples` take already."""
    x = examples.x
    if device.type == "cpu" and isinstance(x, np.ndarray) and _is_usable(x, shared=_never_written(x)):
        return 0
    return int(x.nbytes)


def _never_written(x: np.ndarray | LazyRows) -> bool:
    """Return whether inputs become floats before a model or a hook sees them, so that nothing writes to them."""
    return x.dtype == np.uint8


def _is_usable(array: np.ndarray, *, shared: bool) -> bool:
    """Return whether a tensor can use an array's memory."""
    return (array.flags.writeable or shared) and array.flags.c_contiguous


def _to_tensor(array: np.ndarray | LazyRows, *, shared: bool = False) -> Tensor:
    """Return an array as a tensor; with `shared`, pages of the object store, which may only be read, are not copied."""
    if isinstance(array, LazyRows):
        array = array[:]
    if not _is_usable(array, shared=shared):
        array = array.copy()
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # where it is needed only, since entering it is neither cheap nor safe in threads
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def batch_rows(
    examples: int, batch_size: int, *, epochs: int | None, steps: int | None, drop_last: bool, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the row numbers of every batch of a phase; each epoch is a new permutation, cut into batches.

    An epoch has ⌊n / B⌋ full batches with `drop_last`, or if that is none, one batch of all n rows; without it, it has
    ⌈n / B⌉ batches. `steps` overrides `epochs`: there
    are as many epochs as needed, the last one cut after the last step.
    """
    per_epoch, wanted = _counts(examples, batch_size, epochs=epochs, steps=steps, drop_last=drop_last)
    rows: list[np.ndarray] = []
    while len(rows) < wanted and per_epoch:
        order = rng.permutation(examples)
        rows += [order[k * batch_size : (k + 1) * batch_size] for k in range(per_epoch)]
    return rows[:wanted]


def batch_count(examples: int, batch_size: int, *, epochs: int | None, steps: int | None, drop_last: bool) -> int:
    """Return the number of batches of a phase; see `batch_rows`."""
    per_epoch, wanted = _counts(examples, batch_size, epochs=epochs, steps=steps, drop_last=drop_last)
    return wanted if per_epoch else 0


def _counts(
    examples: int, batch_size: int, *, epochs: int | None, steps: int | None, drop_last: bool
) -> tuple[int, int]:
    """Return the batches of an epoch, and of the phase."""
    full, whole = examples // batch_size, -(-examples // batch_size)
    per_epoch = full or whole if drop_last else whole
    return per_epoch, steps if steps is not None else (epochs or 0) * per_epoch
