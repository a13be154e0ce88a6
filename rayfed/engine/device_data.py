"""A client's examples, data_on_device on its host's device or streamed to it, and their batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import ClientData
from rayfed.augment.base import Augment
from rayfed.core.rng import seed_torch, torch_state_kept
from rayfed.core.task import Batch, Task
from rayfed.data.lazy_rows import LazyRows
from rayfed.data.population import Examples, Population
from rayfed.engine.streamed import Streamed

Transform = Callable[[Tensor], Tensor]


class Normalise:
    """uint8 images to normalised floats, a batch at a time: (x / 255 − mean) / std; other types stay as they are."""

    def __init__(self, population: Population, device: torch.device, *, channels_last: bool):
        mean, std = torch.tensor(population.mean), torch.tensor(population.std)
        self.scale = (1 / (255 * std)).view(-1, 1, 1).to(device)
        self.shift = (-mean / std).view(-1, 1, 1).to(device)
        self.channels_last = channels_last

    def augmented(self, x: Tensor, augment: Augment) -> Tensor:
        """As a call, with `augment` in its place: on pixels in [0, 1], or after normalisation."""
        if not augment.normalised:
            pixels = x.dtype == torch.uint8
            x = augment(x.float().div_(255) if pixels else x)
            x = x.mul(self.scale * 255).add_(self.shift) if pixels else x
        x = self(x)
        return augment(x) if augment.normalised else x

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.float().mul_(self.scale).add_(self.shift)
        if self.channels_last and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        return x


class Part:
    """One part (train, val or test) of a client, or a test set: `x` as stored, `y`, both on the device.

    Where not `data_on_device`, `x` stays where it is, and batches of it go to the device: the same bits, later.
    """

    def __init__(self, examples: Examples, device: torch.device, normalise: Normalise, *, data_on_device: bool = True):
        if data_on_device or isinstance(examples.x, Tensor):
            self.x: Tensor | Streamed = _to_tensor(examples.x).to(device)
        else:
            self.x = Streamed(examples.x, device)
        self.y = _to_tensor(examples.y).to(device)
        self.normalise = normalise

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: Tensor) -> Batch:
        """The rows as a batch, normalised."""
        return Batch(self.normalise(self.x.index_select(0, rows)), self.y.index_select(0, rows))

    def augmented(self, rows: Tensor, augment: Augment) -> Batch:
        """The rows as a batch for training, augmented, normalised."""
        return Batch(self.normalise.augmented(self.x.index_select(0, rows), augment), self.y.index_select(0, rows))

    def batches(self, size: int, rows: Tensor | None = None) -> Iterator[Batch]:
        """All examples (or `rows`) in order, in batches of at most `size`."""
        if rows is not None:
            for some in rows.to(self.y.device).split(size):
                yield self.take(some)
            return
        for start in range(0, len(self), size):
            stop = start + size
            yield Batch(self.normalise(self.x[start:stop]), self.y[start:stop])


@dataclass(frozen=True)
class Augmented:
    """A part as training sees it, in batches whose augmentation is seeded by `key` and the batch's number.

    So they are the same each time that they are asked for, and leave the draws of the hook that asks alone.
    """

    part: Part
    augment: Augment
    key: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.part)

    @property
    def y(self) -> Tensor:
        return self.part.y

    def batches(self, size: int, rows: Tensor | None = None) -> Iterator[Batch]:
        """All examples (or `rows`) in order, in batches of at most `size`."""
        rows = torch.arange(len(self.part)) if rows is None else rows
        for number, start in enumerate(range(0, len(rows), size)):
            with torch_state_kept():
                seed_torch(*self.key, number)
                batch = self.part.augmented(rows[start : start + size].to(self.y.device), self.augment)
            yield batch


def client_data(population: Population, client: int, task: Task) -> ClientData:
    """What a hook sees of a client's data, outside a host."""
    normalise = Normalise(population, task.device, channels_last=task.channels_last)
    own = population.clients[client]
    return ClientData(Part(own.train, task.device, normalise), Part(own.val, task.device, normalise))


def _to_tensor(array: np.ndarray | LazyRows | Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array
    if isinstance(array, LazyRows):
        array = array[:]
    if not array.flags.writeable:  # pages of the object store: torch wants its own
        array = array.copy()
    return torch.from_numpy(np.ascontiguousarray(array))


def batch_rows(
    examples: int, batch_size: int, *, epochs: int | None, steps: int | None, drop_last: bool, rng: np.random.Generator
) -> list[np.ndarray]:
    """Row numbers of every batch of a phase: each epoch a new permutation, cut into batches.

    With `drop_last` an epoch has ⌊n / B⌋ full batches, otherwise ⌈n / B⌉. `steps` overrides `epochs`: as many epochs as
    are needed, cut after the last step.
    """
    per_epoch = examples // batch_size if drop_last else -(-examples // batch_size)
    wanted = steps if steps is not None else (epochs or 0) * per_epoch
    rows: list[np.ndarray] = []
    while len(rows) < wanted and per_epoch:
        order = rng.permutation(examples)
        rows += [order[k * batch_size : (k + 1) * batch_size] for k in range(per_epoch)]
    return rows[:wanted]
