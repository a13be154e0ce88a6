"""What the server does with the replies of a cohort before the method aggregates them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfed.algorithm import Context, Reply, State
from rayfed.channel.channel import Channel
from rayfed.channel.client_side import clipped_centrally, with_noise, within_bound
from rayfed.channel.privacy import Gaussian
from rayfed.channel.updates import Updates
from rayfed.core.modules import batch_norm_statistics
from rayfed.core.trees import is_counter, tree_map

_VARIANCE = "running_var"


class Cohort(NamedTuple):
    """What a cohort has sent: the mean, or what a rule has made of it, and for each client a note and its weight."""

    mean: State
    notes: Sequence[State]
    weights: Sequence[float]


def with_crafted(channel: Channel, values: Sequence[State], base: State, replies: Sequence[Reply]) -> list[State]:
    """Return what clients send once the attackers have seen what the honest clients send.

    Without an honest client, attackers see what they would have sent themselves.
    """
    attack = channel.attack
    bad = []
    for place, reply in enumerate(replies):
        if reply.client in channel.attackers:
            bad.append(place)
    if attack is None or not bad:
        return list(values)
    honest = [place for place in range(len(values)) if place not in bad]
    seen = [values[place] for place in honest or bad]
    crafted = attack.crafted(Updates(seen, base, [1 / len(seen)] * len(seen)), len(bad))
    others = list(values)
    for place in bad:
        others[place] = crafted
    return others


def clipped_here(
    channel: Channel, values: Sequence[State], base: State, bound: Tensor
) -> tuple[list[State], list[State]]:
    """Return (the clipped fields of each client, its note whether it was within the bound)."""
    plain: Any = float(bound)
    if channel.privacy is not None and channel.privacy.adapts:
        plain = bound
    notes = []
    for value in values:
        notes.append(within_bound(channel, value, base, bound))
    return [clipped_centrally(channel, value, base, plain) for value in values], notes


def protected(channel: Channel, ctx: Context, cohort: Cohort, base: State, bound: Tensor) -> tuple[State, Tensor]:
    """Return (the mean of a cohort with noise, the next clipping bound); `base` is what updates are relative to."""
    privacy = channel.privacy
    mean = cohort.mean
    if privacy is None or privacy.local:
        return mean, bound
    weights = cohort.weights or [1.0] * len(cohort.notes)
    counted = []
    for note, weight in zip(cohort.notes, weights, strict=True):
        if weight:
            counted.append(note)
    if channel.sampling == "poisson":
        mean = _scaled(mean, base, len(counted) / channel.cohort)
    multiplier = channel.multiplier(ctx)
    adapted = bound
    if isinstance(privacy, Gaussian) and privacy.adapts:
        bits = _Bits(channel, privacy, [int(note["within"]) for note in counted])
        adapted = privacy.next_bound(bound, bits.share(is_noisy=multiplier > 0))
        multiplier = privacy.of_updates(multiplier, bits.noise, bits.sensitivity)
    return with_noise(privacy, mean, multiplier, channel.sensitivity(float(bound), len(counted))), adapted


class _Bits:
    """The bits by which the clipping bound adapts."""

    def __init__(self, channel: Channel, privacy: Gaussian, bits: Sequence[int]):
        self._bits = bits
        self._is_poisson = channel.sampling == "poisson"
        if self._is_poisson:
            self._clients = channel.cohort
        else:
            self._clients = len(bits)
        self._noise_cohort = privacy.noise_cohort or self._clients
        self.noise = privacy.noise_on_bits(self._noise_cohort)
        self.sensitivity = privacy.bits_sensitivity(self._is_poisson)

    def share(self, *, is_noisy: bool) -> float:
        """Return the share of updates within the bound; bits count from −1/2, as in the paper."""
        share = 0.5 + sum(bit - 0.5 for bit in self._bits) / self._clients
        if not is_noisy:
            return share
        return share + self.noise / self._noise_cohort * float(torch.randn(()))


def with_variances(ctx: Context, mean: State) -> State:
    """Return `mean` with running variances of at least 0: noise and attackers may make them negative."""
    names = set()
    for network in (ctx.task.model, *ctx.task.modules.values()):
        for name in batch_norm_statistics(network.module):
            if name.endswith(_VARIANCE):
                names.add(name)

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: walk(below, key) for key, below in value.items()}
        if name in names and isinstance(value, Tensor):
            return value.clamp(min=0)
        return value

    if names:
        return {field: walk(value, field) for field, value in mean.items()}
    return mean


def _scaled(mean: State, base: State, factor: float) -> State:
    """Return `mean` with its update multiplied by `factor`."""

    def scale(value: Tensor, start: Tensor) -> Tensor:
        if is_counter(value):
            return value
        return start + factor * (value - start)

    return tree_map(scale, mean, base)  # type: ignore[no-any-return]
