"""What a client does to its averaged fields before they are sent."""

import math

import torch
from torch import Tensor

from rayfed.algorithm import Context, State
from rayfed.channel.channel import Channel
from rayfed.channel.privacy import Privacy
from rayfed.channel.robust import NormBound
from rayfed.channel.updates import clipped, flat_update, moved, norm
from rayfed.core.errors import BadHook
from rayfed.core.trees import is_counter, tree_map


def made_private(channel: Channel, ctx: Context, sent: State, base: State) -> State:
    """Return `sent` with the noise of a client that trusts nobody."""
    privacy = channel.privacy
    if privacy is None or not privacy.local:
        return sent
    hidden = clipped_privately(privacy, sent, base, privacy.clip)
    return with_noise(privacy, hidden, channel.multiplier(ctx), 2 * privacy.clip)


def compressed(channel: Channel, sent: State, base: State, memory: State) -> tuple[State, State]:
    """Return (what the server decodes of `sent`, the memory with what was lost).

    Raises:
        BadHook: The client sends another number of numbers than before.
    """
    compression = channel.compression
    update, sizes = flat_update(sent, base)
    if compression is None or not sizes:
        return sent, memory
    error = memory.get("error")
    if error is not None and error.shape != update.shape:
        raise BadHook(
            f"finish sent {len(update)} numbers, and {len(error)} before; compression.feedback=true needs as many"
        )
    if error is None:
        whole = update
    else:
        whole = update + error
    decoded = compression.decoded(whole, sizes)
    if compression.feedback and not compression.loses_nothing:
        memory = {"error": whole - decoded}
    return moved(sent, base, update, decoded), memory


def attacked(channel: Channel, ctx: Context, sent: State, base: State) -> State:
    """Return what an attacker sends that looks at its own update alone."""
    attack = channel.attack
    if attack is None or not attack.sends_other or not channel.attacks(ctx):
        return sent
    return attack.changed(sent, base)


def within_bound(channel: Channel, sent: State, base: State, bound: float | Tensor) -> State:
    """Return the note whether an update is within the clipping bound, if that adapts."""
    privacy = channel.privacy
    if privacy is None or not privacy.adapts:
        return {}
    return {"within": (norm(sent, base, privacy.order) <= bound).to(torch.uint8)}


def clipped_centrally(channel: Channel, sent: State, base: State, bound: float | Tensor) -> State:
    """Return what is left of `sent` after the clipping that the server does or trusts clients to do."""
    rule = channel.rule
    privacy = channel.privacy
    if privacy is not None and not privacy.local:
        sent = clipped_privately(privacy, sent, base, bound)
    if isinstance(rule, NormBound):
        return clipped(sent, base, rule.bound, 2)
    return sent


def clipped_privately(privacy: Privacy, sent: State, base: State, bound: float | Tensor) -> State:
    """Return `sent` clipped, with integers as they were received, because they would tell how long a client trained.

    An infinite bound leaves everything as it is.
    """
    if math.isinf(float(bound)):
        return sent
    short = clipped(sent, base, bound, privacy.order)
    return tree_map(lambda value, start: start if is_counter(value) else value, short, base)  # type: ignore[no-any-return]


def with_noise(privacy: Privacy, sent: State, multiplier: float, sensitivity: float) -> State:
    """Return `sent` with noise on every number that is no integer."""
    if not multiplier:
        return sent

    def noisy(value: Tensor) -> Tensor:
        if is_counter(value):
            return value
        return value + privacy.noise_like(value, multiplier * sensitivity)

    return tree_map(noisy, sent)  # type: ignore[no-any-return]
