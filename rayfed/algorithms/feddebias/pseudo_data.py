"""FedDebias's pseudo-data D_p: its source, its transfer in the setup, and its mixtures with local data (Alg. 2 and 3).

Pseudo-examples are means of examples, so that no single example leaves its client. There are two sources. For each
mean of clients' examples, the server draws the client that computes it (random sample means, RSM). Means of a public
proxy dataset are computed by the server.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State
from rayfed.algorithms.common.soft_labels import soft
from rayfed.core.errors import UsageError
from rayfed.core.task import Batch, InputSpec

NOISE, PHOTOGRAPHS = "noise", "photographs"
PATCHES = 1000
"""The number of patches that are cut from the photographs."""


@dataclass(frozen=True)
class PseudoDataSource:
    """What pseudo-data is made of: means of `images` examples of the `proxy`, or of clients' own if `proxy` is None.

    `samples` is |D_p|, or None for the batch size.
    """

    proxy: str | None
    samples: int | None
    images: int

    def check(self, problem: ProblemSpec) -> None:
        """Raise UsageError if the proxy dataset is unknown, or does not fit the inputs."""
        if self.proxy is not None:
            check_proxy(self.proxy, problem.task.inputs)

    def size(self, ctx: Context) -> int:
        """Return |D_p|."""
        return self.samples or ctx.batch_size

    def initial(self, ctx: Context) -> State:
        """Return the server's field `pseudo` before the setup: empty if it comes from the clients."""
        return self.from_proxy(ctx) or {"pseudo": torch.zeros(0, device=ctx.task.device)}

    def from_proxy(self, ctx: Context) -> State:
        """Return new pseudo-data of the proxy, or nothing if it comes from the clients."""
        if self.proxy is None:
            return {}
        means = proxy_means(self.proxy, ctx.task.inputs, self.size(ctx), self.images)
        return {"pseudo": means.to(ctx.task.device)}

    def owners(self, ctx: Context) -> State:
        """Return the clients that send the means of the next pseudo-data, newly drawn from the cohort."""
        return {"owners": draw_owners(ctx.cohort, self.size(ctx))} if self.proxy is None else {}

    def means(self, ctx: Context, down: State, data: ClientData) -> State:
        """Return the means that the server has asked this client for."""
        if "owners" not in down or not (count := int((down["owners"] == ctx.client).sum())):
            return {}
        return {"means": sample_means(data.train, count, self.images)}


def pooled(ctx: Context, replies: Replies) -> State:
    """Return new pseudo-data that consists of the means that clients sent, or nothing if there are none."""
    means = [reply.up["means"] for reply in replies.each if "means" in reply.up]
    return {"pseudo": torch.cat(means).to(ctx.task.device)} if means else {}


# Setup


@dataclass(frozen=True)
class CollectMeans(Exchange):
    """Setup: the clients send the means that form the first pseudo-data."""

    source: PseudoDataSource

    def broadcast(self, ctx: Context, server: State) -> State:
        return self.source.owners(ctx)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client, self.source.means(ctx, down, data)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | pooled(ctx, replies)


# Means of the clients' examples


def draw_owners(cohort: tuple[int, ...], count: int) -> Tensor:
    """Draw the client of `cohort` that computes each of `count` means, uniformly with torch's generator."""
    return torch.tensor(cohort, dtype=torch.int32)[torch.randint(len(cohort), (count,))]


def sample_means(part: Any, count: int, size: int) -> Tensor:
    """Return `count` means [count, *shape], each of `size` random examples of `part`, or of all if it has fewer."""
    size = min(size, len(part))
    rows = torch.cat([torch.randperm(len(part))[:size] for _ in range(count)])
    return torch.stack([batch.x.mean(0) for batch in part.batches(size, rows)])


# Mixtures of local examples with means of a proxy dataset


def mixture(proxy: Tensor, batch: Batch, examples: int, classes: int) -> Batch:
    """Average each row of `proxy` [n, ...] with `examples` examples of the batch, and 1/C with their labels (Eq. 4).

    As batches are in random order, row j of `proxy` takes the rows after j of the batch, starting again from row 0 at
    its end.
    """
    rows = torch.arange(len(proxy), device=proxy.device)[:, None] + torch.arange(1, examples + 1, device=proxy.device)
    rows = rows % len(batch.x)
    x = (proxy + batch.x[rows].sum(1)) / (examples + 1)
    return Batch(x, (1 / classes + soft(batch.y, classes)[rows].sum(1)) / (examples + 1))


def check_proxy(name: str, inputs: InputSpec) -> None:
    """Raise UsageError if the proxy is unknown, or if it consists of images and the clients' data does not."""
    if name == NOISE:
        return
    if len(inputs.shape) != 3:
        raise UsageError(
            f"algorithm.proxy={name}: this proxy consists of images, and the clients' data does not; use "
            "algorithm.proxy=noise"
        )
    if name != PHOTOGRAPHS:
        _dataset(name)


def proxy_means(name: str, inputs: InputSpec, count: int, size: int) -> Tensor:
    """Return `count` normalised means [count, *shape] of `size` random examples each, drawn with torch's generator."""
    if name == NOISE:
        return torch.randn(count, size, *inputs.shape).mean(1)
    images = _images(name, inputs.shape)
    rows = torch.cat([torch.randperm(len(images))[:size] for _ in range(count)])
    means = images[rows].view(count, -1, *inputs.shape).mean(1)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (inputs.mean, inputs.std))
    return (means - mean) / std


@functools.lru_cache(maxsize=2)
def _images(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the proxy's images as floats in [0, 1], with the size and the number of channels of `shape`.

    Images with another number of channels become grey, repeated for each channel.
    """
    images = torch.from_numpy(_patches(shape[1:]) if name == PHOTOGRAPHS else _dataset(name).load().images)
    images = images.float() / 255
    if images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if images.shape[2:] != shape[1:]:
        images = F.interpolate(images, shape[1:], mode="bilinear", antialias=True)
    return images.contiguous()


def _patches(sides: tuple[int, ...]) -> np.ndarray:
    """Return patches of scikit-learn's two photographs, with twice the given sides: uint8 [n, 3, height, width]."""
    from sklearn.datasets import load_sample_images  # imported here because it takes a second

    rng = np.random.Generator(np.random.PCG64(0))
    photographs = load_sample_images().images
    height, width = (min(2 * side, limit) for side, limit in zip(sides, photographs[0].shape, strict=False))
    patches = []
    for index in range(PATCHES):
        image = photographs[index % 2]
        top, left = rng.integers(image.shape[0] - height + 1), rng.integers(image.shape[1] - width + 1)
        patches.append(image[top : top + height, left : left + width])
    return np.stack(patches).transpose(0, 3, 1, 2).copy()


def _dataset(name: str):  # type: ignore[no-untyped-def]
    from rayfed.data.loading import build_data  # imported here because few runs need a dataset as proxy

    try:
        return build_data(name)[0]
    except UsageError as error:
        raise UsageError(f"algorithm.proxy={name}: use photographs, noise or the name of a dataset; {error}") from error
