"""Random streams keyed by their purpose, so that draws are the same wherever and whenever a client runs.

A stream is identified by the seed of the run, a purpose such as "batches", and named fields such as round and client.
The order of the fields does not matter. torch is imported where it is used: search spaces are drawn without it.
"""

import functools
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from rayfed.core.ids import Moment


def stream_seed(seed: int, purpose: str, moment: Moment | None = None, **fields: object) -> int:
    """Return the 56-bit seed of a random stream.

    Args:
        seed: The seed of the run.
        purpose: The use of the stream.
        moment: The exchange of the stream; short for the fields `stage`, `round` and `exchange`.
        fields: Further keys of the stream, such as `client=3`. Values are told apart by their text.
    """
    if moment is None:
        named = fields
    else:
        named = moment._asdict() | fields
    words = [f"seed={seed}", f"purpose={purpose}"]
    for name in sorted(named):
        words.append(f"{name}={named[name]}")
    digest = hashlib.blake2b("\n".join(words).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def generator(seed: int, purpose: str, moment: Moment | None = None, **fields: object) -> np.random.Generator:
    """Return NumPy's generator for a stream; see `stream_seed` for the arguments."""
    return np.random.Generator(np.random.PCG64(stream_seed(seed, purpose, moment, **fields)))


def numpy_generator(seed: int | None, *purpose: int) -> np.random.Generator:
    """Return numpy's PCG64 generator for a seed and a purpose, so that each purpose has its own stream; None is 0."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed or 0, *purpose])))


def floor_share(size: int, fraction: float) -> int:
    """Return `size` x `fraction` rounded down, tolerating float error such as 0.29 x 100 = 28.999999999999996."""
    return int(size * fraction + 1e-9)


F = TypeVar("F", bound=Callable[..., Any])

one_thread_at_a_time = threading.RLock()
"""Held by whoever uses the global generators and the kernels of torch, which are one for all threads."""


def one_at_a_time(function: F) -> F:
    """Let the threads of a process call `function` one after the other.

    The global generators and torch's kernels are one for all threads: the draws of two runs would mix.
    """

    @functools.wraps(function)
    def in_turn(*args: Any, **kwargs: Any) -> Any:
        with one_thread_at_a_time:
            return function(*args, **kwargs)

    return cast(F, in_turn)


class Streams(NamedTuple):
    """The random streams of a run, from which hooks, models and losses draw by the global generators.

    Attributes:
        seed: The seed of the run.
        everywhere: Whether Python's and NumPy's generators are seeded beside torch's. Code of the user's may draw from
            them, rayfed's own does not, and seeding them takes 15 µs.
    """

    seed: int
    everywhere: bool = False

    def begin(self, purpose: str, moment: Moment | None = None, **fields: object) -> None:
        """Seed the global generators for a stream; see `stream_seed` for the arguments."""
        value = stream_seed(self.seed, purpose, moment, **fields)
        _seed_torch(value)
        if self.everywhere:
            random.seed(value)
            np.random.seed(value % 2**32)


def _seed_torch(value: int) -> None:
    """Seed torch's generators of all devices, unless nothing has imported torch yet.

    This does not use `torch.manual_seed`: where CUDA exists but is unused, that stores a stack trace at every call,
    which takes 70 µs and memory that is never freed.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


@contextmanager
def global_generators_seeded(seed: int, purpose: str, **fields: object) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python, from which a user's code may draw; restore them after."""
    before = _Generators.now()
    try:
        Streams(seed, everywhere=True).begin(purpose, None, **fields)
        yield
    finally:
        before.restore()


class _Generators(NamedTuple):
    """The states of the global generators of Python, NumPy, and torch (None where it is not imported)."""

    python: Any
    numpy: Any
    torch: Any
    cuda: Sequence[Any]

    @classmethod
    def now(cls) -> "_Generators":
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return cls(random.getstate(), np.random.get_state(), None, ())
        cuda = ()
        if torch.cuda.is_initialized():
            cuda = torch.cuda.get_rng_state_all()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.torch is None:
            return
        torch: Any = sys.modules["torch"]
        torch.set_rng_state(self.torch)
        for device, state in enumerate(self.cuda):
            torch.cuda.set_rng_state(state, device)


def choose_deterministic(deterministic: bool, *, warn_only: bool = False) -> None:
    """Choose whether torch uses deterministic kernels. torch is not called in vain: it would import its compiler.

    With them, torch would also fill every new tensor with NaN, which takes a kernel and finds mistakes alone.
    """
    import torch
    from torch.utils import deterministic as of_torch

    of_torch.fill_uninitialized_memory = not deterministic  # type: ignore[attr-defined]
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if before != (deterministic, warn_only):
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def choose_tf32(allowed: bool) -> None:
    """Choose whether GPUs may multiply in TF32, by torch's old switches and its present ones, which must agree."""
    from torch import backends

    backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = allowed
    for switch in _fp32_switches()[:3]:
        if allowed:
            switch.fp32_precision = "tf32"
        else:
            switch.fp32_precision = "ieee"


def _fp32_switches() -> list[Any]:
    """Return the switches of precision: matrices, convolutions and RNNs on GPUs, matrices on CPUs.

    torch before 2.9 has none.
    """
    from torch import backends as known

    backends: Any = known
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return []
    return [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]


def _old_switches() -> tuple[bool, str]:
    """Return the old switches: TF32 in cuDNN, and the precision of matrices.

    torch does not tell where they differ from the present switches; the old ones then have their defaults.
    """
    import torch

    cudnn = True
    matmul = "highest"
    with suppress(RuntimeError):
        cudnn = torch.backends.cudnn.allow_tf32
    with suppress(RuntimeError):
        matmul = torch.get_float32_matmul_precision()
    return cudnn, matmul


class _GlobalState(NamedTuple):
    """What a process has one of: the global generators, and the threads and kernels of torch."""

    generators: _Generators
    threads: int
    deterministic: bool
    warn_only: bool
    fills_memory: bool
    old_switches: tuple[bool, str]
    precisions: Sequence[str]  # of `_fp32_switches`

    @classmethod
    def now(cls) -> "_GlobalState":
        import torch

        return cls(
            _Generators.now(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            _old_switches(),
            [switch.fp32_precision for switch in _fp32_switches()],
        )

    def restore(self) -> None:
        import torch

        self.generators.restore()
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        choose_deterministic(self.deterministic, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fills_memory  # type: ignore[attr-defined]
        if _old_switches() != self.old_switches:
            torch.backends.cudnn.allow_tf32 = self.old_switches[0]
            torch.set_float32_matmul_precision(self.old_switches[1])
        # after the old ones, which set them, too
        for switch, precision in zip(_fp32_switches(), self.precisions, strict=True):
            switch.fp32_precision = precision


@contextmanager
def global_state_kept() -> Iterator[None]:
    """Restore the global generators, torch's thread count and kernels after this block: a notebook may use them."""
    before = _GlobalState.now()
    try:
        yield
    finally:
        before.restore()


class OwnGlobalState:
    """The global state of work that is done in turns with other work in the same thread, such as a loop's body.

    Each turn goes on with the state in which the turn before ended. Outside of turns, the others' state holds.
    """

    def __init__(self) -> None:
        self._last: _GlobalState | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        with global_state_kept():
            if self._last is not None:
                self._last.restore()
            try:
                yield
            finally:
                self._last = _GlobalState.now()
