"""The options that normalise the channels of colour images."""

from dataclasses import dataclass

from rayfed.core.errors import UsageError
from rayfed.core.options import option

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@dataclass(frozen=True, kw_only=True)
class ChannelNormalisation:
    """Options that normalise the three channels of colour images."""

    mean: list[float] = option([0.5], help="subtracted from images in [0, 1]; one number or three")
    std: list[float] = option([0.5], above=0, help="images are divided by it; one number or three")

    def __post_init__(self) -> None:
        self.normalisation()

    def normalisation(self) -> dict[str, tuple[float, ...]]:
        """Return the arguments `mean` and `std` of `Dataset`."""
        return {name: per_channel(getattr(self, name), 3, where=f"data.{name}") for name in ("mean", "std")}


def per_channel(values: list[float], channels: int, *, where: str) -> tuple[float, ...]:
    """Return one number per channel; a single value is repeated."""
    if len(values) not in (1, channels):
        raise UsageError(f"{where}={values}: {len(values)} numbers for {channels} channels; give 1 or {channels}")
    return tuple(values) * (channels if len(values) == 1 else 1)
