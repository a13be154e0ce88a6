"""A public data set that belongs to nobody, of whose means pseudo-data is made (FedDebias, Alg. 3)."""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.core.errors import UsageError
from rayfed.core.task import InputSpec

NOISE, PHOTOGRAPHS = "noise", "photographs"
PATCHES = 1000


def check_proxy(name: str, inputs: InputSpec) -> None:
    """Raises UsageError for an unknown proxy, or one of images where the data are none."""
    if name == NOISE:
        return
    if len(inputs.shape) != 3:
        raise UsageError(f"algorithm.proxy={name}: are images, which this data is not; use algorithm.proxy=noise")
    if name != PHOTOGRAPHS:
        _dataset(name)


def proxy_means(name: str, inputs: InputSpec, count: int, size: int) -> Tensor:
    """`count` means [count, *shape], normalised, of `size` random examples each; torch's generator."""
    if name == NOISE:
        return torch.randn(count, size, *inputs.shape).mean(1)
    pool = _images(name, inputs.shape)
    rows = torch.cat([torch.randperm(len(pool))[:size] for _ in range(count)])
    means = pool[rows].view(count, -1, *inputs.shape).mean(1)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (inputs.mean, inputs.std))
    return (means - mean) / std


@functools.lru_cache(maxsize=2)
def _images(name: str, shape: tuple[int, ...]) -> Tensor:
    """The proxy's images as floats in [0, 1], resized to `shape`; made grey or repeated for its channels."""
    images = torch.from_numpy(_patches(shape[1:]) if name == PHOTOGRAPHS else _dataset(name).load().images)
    images = images.float() / 255
    if images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if images.shape[2:] != shape[1:]:
        images = F.interpolate(images, shape[1:], mode="bilinear", antialias=True)
    return images.contiguous()


def _patches(sides: tuple[int, ...]) -> np.ndarray:
    """Patches of scikit-learn's two photographs, twice the size of the data's images: uint8 [n, 3, height, width]."""
    from sklearn.datasets import load_sample_images  # late: a second to import

    rng = np.random.Generator(np.random.PCG64(0))
    photographs = load_sample_images().images
    height, width = (min(2 * side, least) for side, least in zip(sides, photographs[0].shape, strict=False))
    patches = []
    for index in range(PATCHES):
        image = photographs[index % 2]
        top, left = rng.integers(image.shape[0] - height + 1), rng.integers(image.shape[1] - width + 1)
        patches.append(image[top : top + height, left : left + width])
    return np.stack(patches).transpose(0, 3, 1, 2).copy()


def _dataset(name: str):  # type: ignore[no-untyped-def]
    from rayfed.data.loading import build_data  # late: only where a data set is asked for

    try:
        return build_data(name)[0]
    except UsageError as error:
        raise UsageError(f"algorithm.proxy={name}: photographs, noise, or a data set; {error}") from error
