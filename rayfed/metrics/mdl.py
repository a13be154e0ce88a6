"""Minimum description length of labels given representations: how easily a probe learns the classes from them.

Zhang et al. 2023 (DBE), Tables 1, 2, 4 and 7, by the protocol of Voita and Titov 2020, "Information-Theoretic Probing
with Minimum Description Length". Lower is better. A probe, a network with two hidden layers, is trained anew on the
first n_1 < … < n_K examples; with L_k its mean loss, over `seeds` probes:

    validation  Σ_k (n_k − n_{k−1}) L_k, n_0 = 0, L_k on a tenth of the examples held out (the library of DBE's authors)
    online      n_1 log C + Σ_{k<K} (n_{k+1} − n_k) L_k, L_k on the examples n_k to n_{k+1} (Voita and Titov, Eq. 3)

Values grow with the number of examples, so compare runs with the same `examples`. The published effort is `seeds=5
steps=4000 lr=1e-4`, about an hour of one CPU for 2000 examples. The defaults take a fiftieth of it: one probe, with a
tenth of the steps, each ten times as large.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.core.options import option
from rayfed.metrics.base import OfRepresentations, Representations, Value


@dataclass(frozen=True, kw_only=True)
class Mdl(OfRepresentations):
    """`mdl`: the description length of the labels, in nats or bits."""

    higher_is_better = False

    coding: str = option(
        "validation", choices=("validation", "online"), help="validation: as in DBE; online: Voita and Titov, Eq. 3"
    )
    unit: str = option("nats", choices=("nats", "bits"), help="unit of the description length")
    sizes: int = option(10, low=2, help="K, the number of training set sizes, log-spaced from 10 examples up")
    seeds: int = option(1, low=1, help="probes for each training set size")
    hidden: int = option(512, low=1, help="units in each of the probe's two hidden layers")
    steps: int = option(400, low=1, help="training steps of a probe")
    batch_size: int = option(256, low=1, help="examples in a batch, drawn with replacement")
    lr: float = option(1e-3, above=0, help="learning rate of Adam")

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        z, y = torch.cat([group.z for group in groups]), torch.cat([group.y for group in groups])
        if len(y) < 20:
            return
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
        z, y = z[order], y[order]
        length = self.length(z, y, classes, seed)
        yield -1, "", Value("mdl", length / (math.log(2) if self.unit == "bits" else 1), len(y))

    def length(self, z: Tensor, y: Tensor, classes: int, seed: int) -> float:
        """Return the description length in nats of `y` [n] given `z` [n, d], which must be in random order."""
        held_out = len(y) // 10 if self.coding == "validation" else 0
        kept = len(y) - held_out
        mean, std = z[:kept].mean(), z[:kept].std()  # one number each, as in the library of DBE's authors
        z = (z - mean) / std.clamp_min(1e-12)
        sizes = training_sizes(kept, self.sizes)
        if self.coding == "validation":
            pairs = itertools.pairwise([0, *sizes])
            return sum(
                (size - before) * self._loss(z, y, size, slice(kept, None), classes, seed) for before, size in pairs
            )
        pairs = itertools.pairwise(sizes)
        rest = sum((after - size) * self._loss(z, y, size, slice(size, after), classes, seed) for size, after in pairs)
        return sizes[0] * math.log(classes) + rest

    def _loss(self, z: Tensor, y: Tensor, size: int, test: slice, classes: int, seed: int) -> float:
        """Return the mean loss on `test` of probes trained on the first `size` examples, all probes at once."""
        rng = torch.Generator().manual_seed(seed * 1_000_003 + size)
        widths = (z.shape[1], self.hidden, self.hidden, classes)
        layers = []
        for fan_in, fan_out in itertools.pairwise(widths):
            bound = fan_in**-0.5  # torch's own initialisation of linear layers
            for shape in ((self.seeds, fan_in, fan_out), (self.seeds, 1, fan_out)):
                start = (torch.rand(shape, generator=rng) * 2 - 1) * bound
                layers.append(start.to(z.device).requires_grad_())
        optimizer = torch.optim.Adam(layers, lr=self.lr, fused=True)  # one pass over the weights
        with torch.enable_grad():
            for _ in range(self.steps):
                rows = torch.randint(size, (self.seeds, min(self.batch_size, size)), generator=rng).to(z.device)
                logits = _probe(layers, z[rows])
                # summed over the probes, so that each gets the gradient of its own mean loss
                loss = F.cross_entropy(logits.flatten(0, 1), y[rows].flatten()) * self.seeds
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            logits = _probe(layers, z[test].expand(self.seeds, -1, -1))
            return float(F.cross_entropy(logits.flatten(0, 1).double(), y[test].repeat(self.seeds)))


def _probe(layers: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the logits [probes, batch, classes] of `x` [probes, batch, d]."""
    for weight, bias in zip(layers[:-2:2], layers[1:-2:2], strict=True):
        x = torch.baddbmm(bias, x, weight).relu()
    return torch.baddbmm(layers[-1], x, layers[-2])


def training_sizes(examples: int, count: int) -> list[int]:
    """Return `count` sizes from 10 to `examples`, evenly spaced on a log scale, rounded up; fewer if they coincide."""
    spaced = np.logspace(math.log10(min(10, examples)), math.log10(examples), count)
    return sorted({min(examples, math.ceil(size - 1e-9)) for size in spaced})
