"""How images are normalised, and the options of datasets of colour images."""

from dataclasses import dataclass

from rayfed.core.errors import UsageError
from rayfed.core.options import option

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@dataclass(frozen=True, kw_only=True)
class ChannelNormalisation:
    """How three channels are normalised."""

    mean: list[float] = option([0.5], help="subtracted from images in [0, 1]; one number or three")
    std: list[float] = option([0.5], above=0, help="images are divided by it; one number or three")

    def __post_init__(self) -> None:
        self.normalisation()

    def normalisation(self) -> dict[str, tuple[float, ...]]:
        """`mean` and `std` of a `Dataset`."""
        return {name: per_channel(getattr(self, name), 3, where=f"data.{name}") for name in ("mean", "std")}


def per_channel(values: list[float], channels: int, *, where: str) -> tuple[float, ...]:
    """`values` as one number per channel: as they are, or the only one repeated."""
    if len(values) not in (1, channels):
        raise UsageError(f"{where}={values}: {len(values)} numbers for {channels} channels; give 1 or {channels}")
    return tuple(values) * (channels if len(values) == 1 else 1)
