"""The absence of each part of the channel, as a component that can be chosen by name. They have no keys."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NoPrivacy:
    """No clipping and no noise."""


@dataclass(frozen=True, kw_only=True)
class NoCompression:
    """Updates are sent as they are."""


@dataclass(frozen=True, kw_only=True)
class NoAttack:
    """All clients are honest."""
