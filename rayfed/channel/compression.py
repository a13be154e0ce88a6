"""Compression of updates: what a client sends in place of its update v, a vector of n numbers, and how long that is.

    sent:      v' = decode(encode(v + e)),  e the error that the client has kept; 0 without feedback
    feedback:  e ← v + e − v', so that nothing is lost over rounds: Σ v' + e = Σ v  (Karimireddy et al. 2019, "Error
               Feedback Fixes SignSGD and other Gradient Compression Schemes", Alg. 2)

The length of every encoding follows from the sizes of the tensors alone, so that a simulated clock knows it beforehand.
`compression.down` encodes what the server sends in the same way. It keeps what clients have, x', and sends the encoded
x − x'. So the error stays in x − x' and is sent later. A client fetches what it has missed, or the whole model if that
is shorter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.core.errors import UsageError
from rayfed.core.options import option

_FLOAT = 4  # bytes of a number, and of a scale
_SEED = 8  # bytes of the seed with which both ends draw the same coordinates
_INT8 = 127


def _feedback(default: bool) -> Any:
    return option(default, help="keep what encoding loses in the client's state, and add it to the next update")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Base class of compressions. Derive your own from it and declare its options as fields."""

    name: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    draws: ClassVar[bool] = False
    """Whether `decoded` draws random numbers."""

    feedback: bool = _feedback(False)
    down: "Compression | None" = option(
        None, help="compression of what the server sends: a name, or a mapping with its name and keys"
    )

    def decoded(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return what the receiver decodes of `vector` [n], which joins tensors of `sizes` numbers.

        Draw random numbers with torch's global generator.
        """
        raise NotImplementedError

    def nbytes(self, sizes: Sequence[int]) -> int:
        """Return the length of the encoding of tensors of `sizes` numbers."""
        raise NotImplementedError

    @property
    def loses_nothing(self) -> bool:
        """Whether every vector is decoded as it was, so that there is no error to keep."""
        return False


@dataclass(frozen=True, kw_only=True)
class TopK(Compression):
    """The k = ⌈share · n⌉ numbers of the largest size, over all tensors together; the others are 0.

    Each is sent as 32 bits and its place as ⌈log₂ n⌉ bits. All n numbers are sent without places where that is shorter.
    """

    name: ClassVar[str] = "topk"
    reference: ClassVar[str] = "Aji and Heafield 2017; Stich et al. 2018, Alg. 1 (with feedback)"

    share: float = option(0.01, above=0, high=1, help="share of the numbers that is sent")
    feedback: bool = _feedback(True)

    def decoded(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        count = _count(self.share, len(vector))
        places = vector.abs().topk(count, sorted=False).indices
        return torch.zeros_like(vector).index_copy_(0, places, vector[places])

    def nbytes(self, sizes: Sequence[int]) -> int:
        n = sum(sizes)
        count = _count(self.share, n)
        places = _bytes(count * _bits(n))
        return min(_FLOAT * count + places, _FLOAT * n)

    @property
    def loses_nothing(self) -> bool:
        return self.share == 1


@dataclass(frozen=True, kw_only=True)
class RandK(Compression):
    """k = ⌈share · n⌉ numbers at random places, which both ends draw from one seed; the others are 0.

    Without feedback, the numbers are multiplied by n/k, so that the expectation is the vector.
    """

    name: ClassVar[str] = "randk"
    reference: ClassVar[str] = "Konečný et al. 2016, random mask; Stich et al. 2018 (with feedback)"
    draws: ClassVar[bool] = True

    share: float = option(0.01, above=0, high=1, help="share of the numbers that is sent")

    def decoded(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        n = len(vector)
        count = _count(self.share, len(vector))
        if count == n:
            return vector
        places = torch.randperm(n)[:count].to(vector.device)
        factor = 1.0
        if not self.feedback:
            factor = n / count
        return torch.zeros_like(vector).index_copy_(0, places, factor * vector[places])

    def nbytes(self, sizes: Sequence[int]) -> int:
        return _SEED + _FLOAT * _count(self.share, sum(sizes))

    @property
    def loses_nothing(self) -> bool:
        return self.share == 1


@dataclass(frozen=True, kw_only=True)
class Qsgd(Compression):
    """Random rounding of each |v_j| / ‖v‖ to one of s + 1 levels, for each tensor v:

        v'_j = ‖v‖ · sign(v_j) · ξ_j / s,   ξ_j = ⌊r_j⌋ or ⌊r_j⌋ + 1 with mean r_j = s |v_j| / ‖v‖

    E v' = v and E ‖v' − v‖² ≤ min(n/s², √n/s) ‖v‖². A tensor is sent as its norm and ⌈log₂ (2s + 1)⌉ bits for each
    number. The paper's Elias code is shorter if most numbers are 0; its length is not known beforehand.
    """

    name: ClassVar[str] = "qsgd"
    reference: ClassVar[str] = "Alistarh et al. 2017, Eq. (3.1), Lemma 3.1"
    draws: ClassVar[bool] = True

    levels: int = option(15, low=1, high=2**15, help="levels s above 0")

    def decoded(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat([self._rounded(part) for part in vector.split(list(sizes))])

    def nbytes(self, sizes: Sequence[int]) -> int:
        bits = _bits(2 * self.levels + 1)
        return sum(_FLOAT + _bytes(bits * size) for size in sizes)

    def _rounded(self, part: Tensor) -> Tensor:
        norm = float(part.norm())
        if not norm > 0:
            return part
        drawn = torch.rand(part.shape, dtype=part.dtype).to(part.device)
        levels = (part.abs() / norm * self.levels + drawn).floor() * part.sign()
        return levels * (norm / self.levels)


@dataclass(frozen=True, kw_only=True)
class Sign(Compression):
    """The sign of every number, times the mean size in its tensor: v'_j = ‖v‖₁/n · sign(v_j). One bit each."""

    name: ClassVar[str] = "sign"
    reference: ClassVar[str] = "Karimireddy et al. 2019, Alg. 1 (EF-SignSGD)"

    feedback: bool = _feedback(True)

    def decoded(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat([_scaled_signs(part) for part in vector.split(list(sizes))])

    def nbytes(self, sizes: Sequence[int]) -> int:
        return sum(_FLOAT + _bytes(size) for size in sizes)


def _scaled_signs(part: Tensor) -> Tensor:
    if part.numel():
        scale = part.abs().mean()
    else:
        scale = part.new_zeros(())
    return torch.where(part < 0, -scale, scale)


@dataclass(frozen=True, kw_only=True)
class Cast(Compression):
    """Numbers of fewer bits: bf16 and float16 have 16; int8 has 8 and a scale max |v_j| / 127 for each tensor."""

    name: ClassVar[str] = "cast"
    reference: ClassVar[str] = "rounding to the nearest number"

    type: str = option("bf16", choices=("bf16", "float16", "int8"), help="type of the numbers that are sent")

    def decoded(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        if self.type == "int8":
            return torch.cat([_rounded_to_int8(part) for part in vector.split(list(sizes))])
        if self.type == "bf16":
            dtype = torch.bfloat16
        else:
            dtype = torch.float16
        largest = torch.finfo(dtype).max
        return vector.clamp(-largest, largest).to(dtype).to(vector.dtype)

    def nbytes(self, sizes: Sequence[int]) -> int:
        if self.type == "int8":
            return sum(_FLOAT + size for size in sizes)
        return 2 * sum(sizes)


def _rounded_to_int8(part: Tensor) -> Tensor:
    if part.numel():
        scale = part.abs().amax() / _INT8
    else:
        scale = part.new_zeros(())
    if not scale > 0:
        return torch.zeros_like(part)
    return (part / scale).round() * scale


def _count(share: float, n: int) -> int:
    """Return ⌈share · n⌉, at least 1 if there are numbers."""
    return min(n, max(1, math.ceil(share * n - 1e-9)))


def _bits(values: int) -> int:
    """Return the bits that tell as many values apart."""
    return max(1, (values - 1).bit_length())


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def check_down(down: Compression) -> None:
    """Raise UsageError for a compression that cannot encode what the server sends."""
    if down.draws:
        raise UsageError(
            f"compression.down.name={down.name}: draws random numbers, and the server's copy of what clients have must "
            "not depend on them; use topk, sign or cast"
        )
    if down.down is not None:
        raise UsageError("compression.down.down: what the server sends is encoded once; leave it out")
