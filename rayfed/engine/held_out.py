"""Training examples that a method keeps from training for a purpose of its own (`Algorithm.held_out_share`)."""

from typing import NamedTuple

import numpy as np

from rayfed.core.rng import generator
from rayfed.data.clients import Client, Examples
from rayfed.data.draws import floor_share
from rayfed.data.lazy_rows import select_rows


class TrainingParts(NamedTuple):
    """A client's training part divided into the examples to train on and those held out."""

    train: Examples
    held_out: Examples


def held_out_count(examples: int, share: float) -> int:
    """Return how many of a client's training examples are held out: `share` of them rounded down, but at least one."""
    return max(1, floor_share(examples, share)) if share else 0


def divide(client: Client, share: float, seed: int) -> TrainingParts:
    """Divide the training part of `client` at random; both parts keep the order of the examples."""
    count = held_out_count(len(client.train), share)
    if not count:
        return TrainingParts(client.train, Examples(client.train.x[:0], client.train.y[:0]))
    is_held_out = np.zeros(len(client.train), bool)
    is_held_out[generator(seed, "held out", client=client.id).permutation(len(client.train))[:count]] = True
    rows = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    return TrainingParts(*(Examples(select_rows(client.train.x, part), client.train.y[part]) for part in rows))
