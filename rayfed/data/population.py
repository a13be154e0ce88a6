"""What the engine is given: the clients and their examples, and the test sets that belong to nobody."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Examples:
    """Labelled examples: `x` [n, ...] and `y` [n] (class index, int64) or [n, ...] for a user's own loss.

    Images are uint8 [n, channels, height, width]; they become floats, normalised, a batch at a time on the device.
    Any other dtype reaches the model as it is.
    """

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Client:
    """One client: its number, the domain that it belongs to, and its three disjoint parts."""

    id: int
    domain: str
    train: Examples
    val: Examples
    test: Examples


@dataclass(frozen=True)
class TestSet:
    """Examples of one domain that no client holds, scored with the server's model; split is "test" or "ood"."""

    __test__ = False  # not a pytest class

    domain: str
    split: str
    examples: Examples


@dataclass(frozen=True)
class Population:
    """All clients (ids 0..N-1 in order), what their examples look like, and the server's own test sets.

    `mean` and `std`, per channel in units of [0, 1], normalise uint8 images: (x / 255 - mean) / std.
    """

    name: str
    clients: tuple[Client, ...]
    num_classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    tests: tuple[TestSet, ...] = ()
