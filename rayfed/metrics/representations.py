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
from rayfed.core.round_record import MapPoint
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
            z = captured[layer].flatten(1)
            outputs[layer].append(z.float().cpu())
    return {layer: torch.cat(parts) for layer, parts in outputs.items()}


@contextmanager
def _captured_outputs(module: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Within, collect the outputs of the `layers` of `module` in a dict, each that of the layer's last call."""
    captured: dict[str, Tensor] = {}
    undo: list[Callable[[], object]] = []
    for layer in layers:
        if layer != LOGITS:
            undo.append(_capture(module, layer, captured))
    try:
        yield captured
    finally:
        for step in undo:
            step()


def _capture(module: nn.Module, layer: str, captured: dict[str, Tensor]) -> Callable[[], object]:
    """Have a layer's output, or the input of `head`, put into `captured` at each call; return what ends that."""
    modules = dict(module.named_modules())  # before methods: DBE's model has both, and its bias lies between them
    if layer in modules:
        part = modules[layer]
    else:
        part = getattr(module, layer)
    takes_input = layer == "head"

    def method(x: Tensor) -> Any:
        out = part(x)
        if takes_input:
            captured[layer] = x
        else:
            captured[layer] = out
        return out

    def before(_: Any, args: tuple[Tensor, ...]) -> None:
        captured[layer] = args[0]

    def after(_: Any, args: Any, out: Tensor) -> None:
        captured[layer] = out

    if not isinstance(part, nn.Module):  # a method, which an attribute of the object shadows
        module.__dict__[layer] = method
        return partial(module.__dict__.pop, layer)
    if takes_input:
        return part.register_forward_pre_hook(before).remove
    return part.register_forward_hook(after).remove


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
        for test in groups:
            if test.split != self.split:
                continue
            fit = [group for group in groups if group.client == test.client and group.split in self.fit]
            if fit:
                test_z, test_y = _joined([test])
                predictions = self.predictions(*_joined(fit), test_z)
                accuracy = np.mean(predictions == test_y)
                yield test.client, test.domain, Value("head_accuracy", float(accuracy), len(test_y))

    def predictions(self, z: np.ndarray, y: np.ndarray, test_z: np.ndarray) -> np.ndarray:
        """Return the classes [m] of `test_z` [m, d] by logistic regression fitted to `z` [n, d] and `y` [n]."""
        from sklearn.linear_model import LogisticRegression  # takes a second, and every host imports this module
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        if len(np.unique(y)) == 1:  # logistic regression needs two classes
            return np.full(len(test_z), y[0])
        regression = LogisticRegression(C=1 / self.penalty, max_iter=500)
        head = make_pipeline(StandardScaler(), regression)
        return np.asarray(head.fit(z, y).predict(test_z))


def _joined(groups: Sequence[Representations]) -> tuple[np.ndarray, np.ndarray]:
    """Return the representations [n, d] and the classes [n] of several groups."""
    z = torch.cat([group.z for group in groups])
    y = torch.cat([group.y for group in groups])
    return z.cpu().numpy(), y.cpu().numpy()


class Frechet(OfRepresentations):
    """`frechet`: the distance of each client (and test set) from all of them pooled, as the ADCOL paper's FID of its
    parties. `frechet_mean`: the mean of these distances.

    The Fréchet distance between distributions is Eq. 6 of Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update
    Rule". Here the model's own representations take the place of Inception's:

        d² = ‖m₁ − m₂‖² + tr(C₁ + C₂ − 2 (C₁ C₂)^½)

    with means m and covariances C (divided by n − 1). Inception's features would give the FID. Other features give
    other numbers, so compare values only between runs with the same network, and never with the FID of a paper.
    """

    higher_is_better = False

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        parts = [group.z.cpu().numpy().astype(np.float64) for group in groups]
        pooled = np.concatenate(parts)
        distances = []
        for group, part in zip(groups, parts, strict=True):
            if len(part) > 1:
                distance = frechet_distance(part, pooled)
                distances.append(distance)
                yield group.client, group.domain, Value("frechet", distance, len(part))
        if distances:
            yield -1, "", Value("frechet_mean", float(np.mean(distances)), len(pooled))


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the squared Fréchet distance of the Gaussians fitted to `a` [n, d] and `b` [m, d], 2 rows or more each."""
    from scipy import linalg  # takes half a second

    ca = np.atleast_2d(np.cov(a, rowvar=False))
    cb = np.atleast_2d(np.cov(b, rowvar=False))
    # tr (C₁ C₂)^½ sums the square roots of the eigenvalues of C₁^½ C₂ C₁^½, which is symmetric: no complex parts
    values, vectors = linalg.eigh(ca)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    eigenvalues = linalg.eigvalsh(root @ cb @ root)
    cross = np.sqrt(eigenvalues.clip(0)).sum()
    of_means = np.square(a.mean(0) - b.mean(0)).sum()
    distance = of_means + np.trace(ca) + np.trace(cb) - 2 * cross
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
        z = torch.cat([group.z for group in groups])
        y = torch.cat([group.y for group in groups])
        if len(y) < 20:
            return
        rng = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(y), generator=rng).to(y.device)
        length = self.length(z[order], y[order], classes, seed)
        if self.unit == "bits":
            length /= math.log(2)
        yield -1, "", Value("mdl", length, len(y))

    def length(self, z: Tensor, y: Tensor, classes: int, seed: int) -> float:
        """Return the description length in nats of `y` [n] given `z` [n, d], which must be in random order."""
        kept = len(y)
        if self.coding == "validation":
            kept -= len(y) // 10
        mean = z[:kept].mean()  # one number, as in the library of DBE's authors
        std = z[:kept].std()
        z = (z - mean) / std.clamp_min(1e-12)
        sizes = training_sizes(kept, self.sizes)
        length = 0.0
        if self.coding == "validation":
            for before, size in itertools.pairwise([0, *sizes]):
                length += (size - before) * self._loss(z, y, size, slice(kept, None), classes, seed)
            return length
        for size, after in itertools.pairwise(sizes):
            length += (after - size) * self._loss(z, y, size, slice(size, after), classes, seed)
        return sizes[0] * math.log(classes) + length

    def _loss(self, z: Tensor, y: Tensor, size: int, test: slice, classes: int, seed: int) -> float:
        """Return the mean loss on `test` of probes trained on the first `size` examples, all probes at once."""
        rng = torch.Generator().manual_seed(seed * 1_000_003 + size)
        layers = self._layers(z, classes, rng)
        optimizer = torch.optim.Adam(layers, lr=self.lr, fused=True)  # one pass over the weights
        batch = (self.seeds, min(self.batch_size, size))
        with torch.enable_grad():
            for _ in range(self.steps):
                rows = torch.randint(size, batch, generator=rng).to(z.device)
                logits = _probe(layers, z[rows])
                # summed over the probes, so that each gets the gradient of its own mean loss
                loss = F.cross_entropy(logits.flatten(0, 1), y[rows].flatten()) * self.seeds
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            logits = _probe(layers, z[test].expand(self.seeds, -1, -1))
            logits = logits.flatten(0, 1).double()
            return float(F.cross_entropy(logits, y[test].repeat(self.seeds)))

    def _layers(self, z: Tensor, classes: int, rng: torch.Generator) -> list[Tensor]:
        """Return the weights and biases of each layer of the probes, drawn like those of torch's linear layers."""
        widths = (z.shape[1], self.hidden, self.hidden, classes)
        layers = []
        for fan_in, fan_out in itertools.pairwise(widths):
            bound = fan_in**-0.5
            for shape in ((self.seeds, fan_in, fan_out), (self.seeds, 1, fan_out)):
                drawn = torch.rand(shape, generator=rng)
                start = (drawn * 2 - 1) * bound
                layers.append(start.to(z.device).requires_grad_())
        return layers


def _probe(layers: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the logits [probes, batch, classes] of `x` [probes, batch, d]."""
    for weight, bias in zip(layers[:-2:2], layers[1:-2:2], strict=True):
        x = torch.baddbmm(bias, x, weight).relu()
    return torch.baddbmm(layers[-1], x, layers[-2])


def training_sizes(examples: int, count: int) -> list[int]:
    """Return `count` sizes from 10 to `examples`, evenly spaced on a log scale, rounded up; fewer if they coincide."""
    smallest = min(10, examples)
    spaced = np.logspace(math.log10(smallest), math.log10(examples), count)
    sizes = {math.ceil(size - 1e-9) for size in spaced}
    return sorted({min(examples, size) for size in sizes})


@dataclass(frozen=True, kw_only=True)
class Tsne(OfRepresentations):
    """A map of representations in the plane, by t-SNE (van der Maaten and Hinton 2008, scikit-learn's implementation).
    It is a file in the folder `maps` that reports plot: each example's client, domain, class and coordinates."""

    joint: bool = option(False, help="show all scored points of a layer, such as global and trained, in one projection")
    perplexity: float = option(30.0, above=0, help="perplexity of t-SNE; reduced if there are too few examples")

    def map(self, groups: Sequence[Representations], seed: int) -> list[MapPoint]:
        """Return the coordinates of every example; none if there are fewer than four.

        Representations may be all the same, such as behind a last ReLU that is always 0. They lie in one point.
        """
        if sum(len(group.z) for group in groups) < 4:
            return []
        z = np.concatenate([group.z.cpu().numpy() for group in groups])
        coordinates = iter(self.coordinates(z, seed))
        points = []
        for group in groups:
            for label in group.y.tolist():
                x, y = next(coordinates)
                points.append(MapPoint(group.client, group.domain, label, float(x), float(y), group.point))
        return points

    def coordinates(self, z: np.ndarray, seed: int) -> np.ndarray:
        """Return the place [n, 2] of each representation in `z` [n, d]."""
        from sklearn.manifold import TSNE  # as above

        spread = float(np.ptp(z, axis=0).max())
        if spread**2 < np.finfo(np.float32).tiny:
            return np.zeros((len(z), 2))  # scikit-learn would divide by their spread, and then end the process
        perplexity = min(self.perplexity, (len(z) - 1) / 3)
        start = "random"
        if z.shape[1] > 1:
            start = "pca"
        projection = TSNE(perplexity=perplexity, init=start, random_state=seed)
        return np.asarray(projection.fit_transform(z))
