"""Metrics of representations, and how a network's outputs at any layer are captured while an algorithm predicts."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import Algorithm, Context
from rayfed.core.errors import UsageError
from rayfed.core.options import option, suggestion
from rayfed.core.records import MapPoint
from rayfed.metrics.base import OfRepresentations, Representations, Value

LOGITS = "logits"


def check_layer(model: nn.Module, layer: str, where: str) -> None:
    """Raise `UsageError` if `model` has no such layer; `where` is the option's name in the message."""
    names = [name for name, _ in model.named_modules() if name]
    if layer not in (LOGITS, "features", "head") and layer not in names:
        raise UsageError(f"{where}: the model has no layer {layer!r}; {suggestion(layer, [LOGITS, *names])}")


@torch.no_grad()
def collect_representations(
    algorithm: Algorithm, ctx: Context, model: Any, part: Any, rows: Tensor, layers: Sequence[str]
) -> dict[str, Tensor]:
    """Return the representations of `rows` of `part` by layer, float32 [n, d] on the CPU, in evaluation mode."""
    outputs: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    for batch in part.batches(500, rows):
        with _captured_outputs(ctx.task.model.module, layers) as captured:
            captured[LOGITS] = algorithm.predict(ctx, model, batch.x)
        for layer in layers:
            outputs[layer].append(captured[layer].flatten(1).float().cpu())
    return {layer: torch.cat(parts) for layer, parts in outputs.items()}


@contextmanager
def _captured_outputs(module: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Within, collect the outputs of the `layers` of `module` in a dict, each that of the layer's last call."""
    captured: dict[str, Tensor] = {}
    undo: list[Callable[[], object]] = []
    for layer in layers:
        if layer == LOGITS:
            continue
        modules = dict(module.named_modules())  # before methods: DBE's model has both, and its bias lies between them
        part = modules[layer] if layer in modules else getattr(module, layer)
        if not isinstance(part, nn.Module):  # a method, which an attribute of the object shadows
            module.__dict__[layer] = partial(_capture, part, layer, captured)
            undo.append(partial(module.__dict__.pop, layer))
        elif layer == "head":
            undo.append(part.register_forward_pre_hook(lambda _, args: captured.update(head=args[0])).remove)
        else:
            undo.append(part.register_forward_hook(lambda _, args, out, key=layer: captured.update({key: out})).remove)
    try:
        yield captured
    finally:
        for step in undo:
            step()


def _capture(method: Callable[[Tensor], Tensor], layer: str, captured: dict[str, Tensor], x: Tensor) -> Tensor:
    out = method(x)
    captured[layer] = x if layer == "head" else out
    return out


@dataclass(frozen=True, kw_only=True)
class HeadAccuracy(OfRepresentations):
    """`head_accuracy`: each client's accuracy on `split`, by logistic regression (scikit-learn's, on standardised
    representations) that is fitted to its `fit` parts. A client without examples of both has no value.

    The new head on frozen representations is FRAug's case study (Chen et al. 2023, section 3.2). The paper trains a
    model on 10 % of each client's data, and then its head alone on all of them. Here, partition.validation=0.9 and
    `fit` = [train, val] do the same. Each client has a head of its own, multinomial logistic regression trained to its
    optimum; the paper takes steps of SGD.
    """

    higher_is_better = True

    fit: list[str] = option(
        ["train"], choices=("train", "val"), help="parts of a client's data that its head is fitted to"
    )
    penalty: float = option(1.0, above=0, help="weight of the L2 penalty")
    examples: int = option(
        20000, low=2, help="examples of each part in all, equally many of each client that has enough"
    )

    @property
    def splits(self) -> frozenset[str]:
        return frozenset({self.split, *self.fit})

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        from sklearn.linear_model import LogisticRegression  # takes a second, and every host imports this module
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        for test in groups:
            fit = [g for g in groups if g.client == test.client and g.split in self.fit]
            if test.split != self.split or not fit:
                continue
            (z, y), (test_z, test_y) = _joined(fit), _joined([test])
            if len(np.unique(y)) == 1:  # logistic regression needs two classes
                predictions = np.full(len(test_y), y[0])
            else:
                head = make_pipeline(StandardScaler(), LogisticRegression(C=1 / self.penalty, max_iter=500))
                predictions = head.fit(z, y).predict(test_z)
            yield test.client, test.domain, Value("head_accuracy", float(np.mean(predictions == test_y)), len(test_y))


def _joined(groups: Sequence[Representations]) -> tuple[np.ndarray, np.ndarray]:
    z, y = torch.cat([group.z for group in groups]), torch.cat([group.y for group in groups])
    return z.cpu().numpy(), y.cpu().numpy()


class Frechet(OfRepresentations):
    """`frechet`: the distance of each client (and test set) from all of them pooled, as the ADCOL paper's FID of its
    parties. `frechet_mean`: the mean of these distances.

    The Fréchet distance between distributions is Eq. 6 of Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update
    Rule", here of the model's own representations in place of Inception's:

        d² = ‖m₁ − m₂‖² + tr(C₁ + C₂ − 2 (C₁ C₂)^½)

    with means m and covariances C (divided by n − 1). Inception's features would give the FID. Other features give
    other numbers, so compare values only between runs with the same network, and never with the FID of a paper.
    """

    higher_is_better = False

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        parts = [group.z.cpu().numpy().astype(np.float64) for group in groups]
        pooled, distances = np.concatenate(parts), []
        for group, part in zip(groups, parts, strict=True):
            if len(part) > 1:
                distances.append(frechet_distance(part, pooled))
                yield group.client, group.domain, Value("frechet", distances[-1], len(part))
        if distances:
            yield -1, "", Value("frechet_mean", float(np.mean(distances)), len(pooled))


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the squared Fréchet distance of the Gaussians fitted to `a` [n, d] and `b` [m, d], 2 rows or more each."""
    from scipy import linalg  # takes half a second

    ca, cb = (np.atleast_2d(np.cov(x, rowvar=False)) for x in (a, b))
    # tr (C₁ C₂)^½ sums the square roots of the eigenvalues of C₁^½ C₂ C₁^½, which is symmetric: no complex parts
    values, vectors = linalg.eigh(ca)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(linalg.eigvalsh(root @ cb @ root).clip(0)).sum()
    distance = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(ca) + np.trace(cb) - 2 * cross
    return float(max(distance, 0.0))


@dataclass(frozen=True, kw_only=True)
class Mdl(OfRepresentations):
    """`mdl`: the minimum description length of labels given representations, in nats or bits: how easily a probe learns
    the classes from them.

    Zhang et al. 2023 (DBE), Tables 1, 2, 4 and 7, by the protocol of Voita and Titov 2020, "Information-Theoretic
    Probing with Minimum Description Length". Lower is better. A probe is a network with two hidden layers, which is
    trained anew on the first n_1 < … < n_K examples. L_k is the mean loss of `seeds` probes trained on n_k examples, on

        validation  a tenth of the examples, held out (as by DBE's authors): Σ_k (n_k − n_{k−1}) L_k with n_0 = 0
        online      the examples n_k to n_{k+1} (Voita and Titov, Eq. 3): n_1 log C + Σ_{k<K} (n_{k+1} − n_k) L_k

    Values grow with the number of examples, so compare runs with the same `examples`. The published effort is `seeds=5
    steps=4000 lr=1e-4`, about an hour of one CPU for 2000 examples. The defaults take a fiftieth of it: one probe with
    a tenth of the steps, each ten times as large.
    """

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


@dataclass(frozen=True, kw_only=True)
class Tsne(OfRepresentations):
    """A map of representations in the plane, a file in the folder `maps` that reports plot: each example's client,
    domain, class and coordinates, by t-SNE (van der Maaten and Hinton 2008, in scikit-learn's implementation)."""

    joint: bool = option(False, help="show all scored points of a layer, such as global and trained, in one projection")
    perplexity: float = option(30.0, above=0, help="perplexity of t-SNE; reduced if there are too few examples")

    def map(self, groups: Sequence[Representations], seed: int) -> list[MapPoint]:
        """Return the coordinates of every example; none if there are fewer than four.

        Representations that are all the same, such as those of a network whose last ReLU is always 0, lie in one point.
        """
        count = sum(len(group.z) for group in groups)
        if count < 4:
            return []
        from sklearn.manifold import TSNE  # as above

        z = np.concatenate([group.z.cpu().numpy() for group in groups])
        if float(np.ptp(z, axis=0).max()) ** 2 < np.finfo(np.float32).tiny:
            coordinates = np.zeros((count, 2))  # scikit-learn would divide by their spread, and then end the process
        else:
            perplexity, init = min(self.perplexity, (count - 1) / 3), "pca" if z.shape[1] > 1 else "random"
            coordinates = TSNE(perplexity=perplexity, init=init, random_state=seed).fit_transform(z)
        rows = [(g.client, g.domain, label, g.point) for g in groups for label in g.y.tolist()]
        return [
            MapPoint(client, domain, label, float(x), float(y), point)
            for (client, domain, label, point), (x, y) in zip(rows, coordinates, strict=True)
        ]
