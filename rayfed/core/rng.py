"""Randomness, keyed by what it is for: the same numbers wherever and whenever a client runs."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*parts: object) -> int:
    """A 56-bit seed from any printable parts, such as (seed, "batches", round, client)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def generator(*parts: object) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed_of(*parts)))


def seed_torch(*parts: object) -> None:
    """Seeds torch's global generators from `parts`.

    Not `torch.manual_seed`: where CUDA exists but is unused, that notes a stack trace in every call: 70 µs and
    memory that is never freed.
    """
    seed = seed_of(*parts)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def torch_state_kept() -> Iterator[None]:
    """Leaves torch's global generators and thread count as they were: a notebook's own are not ours to move."""
    threads = torch.get_num_threads()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
