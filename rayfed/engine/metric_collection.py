"""Metrics beside accuracy and loss: what is due in a round, what hosts gather for it, what the server makes of it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfed.algorithm import Algorithm, Context
from rayfed.core.rng import generator
from rayfed.core.trees import named_tensors
from rayfed.engine.device_data import Part
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.scoring import Score
from rayfed.metrics.base import Metric, OfGradients, OfPredictions, OfRepresentations, OfTraining, Representations
from rayfed.metrics.gradient_norm import full_gradient
from rayfed.metrics.representations import represented
from rayfed.metrics.tsne import Map, Tsne


class Where(NamedTuple):
    """A part of a client's data (or a test set: client -1), and the point whose model is measured on it."""

    client: int
    domain: str
    split: str
    point: str


class Caught(NamedTuple):
    """Representations of the examples somewhere, at one layer."""

    where: Where
    layer: str
    of: Representations


@dataclass(frozen=True)
class Measures:
    """The metrics that are due in a round, by name, and how many clients and test sets have examples of each split.

    `last` is false in the exchanges of a round before its last, which only take note of the models before training.
    """

    metrics: Mapping[str, Metric]
    groups: Mapping[str, int] = field(default_factory=dict)
    last: bool = True

    def only(self, *kinds: type) -> "Measures":
        return replace(self, metrics={name: m for name, m in self.metrics.items() if isinstance(m, kinds)})

    def of(self, kind: type) -> list[Any]:
        return [metric for metric in self.metrics.values() if isinstance(metric, kind)]

    @property
    def predictions(self) -> list[OfPredictions]:
        return self.of(OfPredictions)

    @property
    def training(self) -> list[OfTraining]:
        return self.of(OfTraining)

    @property
    def gradients(self) -> list[OfGradients]:
        return self.of(OfGradients)

    @property
    def fitted(self) -> set[str]:
        """Splits whose representations something is fitted to, and which need not be scored for that."""
        return {split for metric in self.of(OfRepresentations) for split in metric.splits - {metric.split}}

    def catch(
        self, algorithm: Algorithm, ctx: Context, model: Any, part: Part, seed: int, where: Where
    ) -> list[Caught]:
        """On a host: the representations that the metrics want of this part of a client's data."""
        wanted = [metric for metric in self.of(OfRepresentations) if where.split in metric.splits]
        layers = sorted({layer for metric in wanted for layer in metric.layers})
        if not layers or not len(part):
            return []
        count = max(metric.share(self.groups.get(where.split, 1)) for metric in wanted)
        order = generator(seed, "metrics", ctx.round, *where[:3]).permutation(len(part))[:count]
        rows = torch.from_numpy(order)
        y = part.y.cpu()[rows]
        found = represented(algorithm, ctx, model, part, rows, layers)
        return [
            Caught(where, layer, Representations(where.client, where.domain, z, y, where.split))
            for layer, z in found.items()
        ]

    def moved(self, ctx: Context, before: Any, after: Any) -> list[tuple[str, float]]:
        """On a host: what the metrics of training say of a client's model before and after."""
        buffers = set(ctx.task.model.buffers)
        start, end = (
            {p: t for p, t in named_tensors(m) if t.is_floating_point() and p not in buffers} for m in (before, after)
        )
        common = [path for path in start if path in end and start[path].shape == end[path].shape]
        if not common:
            return []
        start, end = {path: start[path] for path in common}, {path: end[path] for path in common}
        return [value for metric in self.training for value in metric.measure(start, end)]

    def represented(
        self, caught: Iterable[Caught], classes: int, seed: int, device: torch.device
    ) -> tuple[list[Score], list[Map]]:
        """On the server: values and maps from what all hosts caught."""
        groups: dict[tuple[str, str], list[Representations]] = {}
        for item in caught:
            groups.setdefault((item.where.point, item.layer), []).append(item.of)
        scores, maps = [], []
        for name, metric in self.metrics.items():
            for (point, layer), everything in sorted(groups.items(), key=lambda pair: pair[0]):
                if not isinstance(metric, OfRepresentations) or layer not in metric.layers:
                    continue
                found = [group for group in everything if group.split in metric.splits]
                held = Counter(group.split for group in found)
                if metric.split not in held:
                    continue
                chosen = []
                for g in sorted(found, key=lambda g: (g.client, g.domain, g.split)):
                    share = metric.share(held[g.split])
                    chosen.append(g._replace(z=g.z[:share].to(device), y=g.y[:share].to(device)))
                if isinstance(metric, Tsne):
                    maps.append(Map(name, point, metric.split, layer, metric.map(chosen, seed)))
                    continue
                suffix = "" if layer == "features" else f"@{layer}"
                for client, domain, value in metric.measure(chosen, classes, seed):
                    scores.append(
                        Score(client, domain, metric.split, point, value.metric + suffix, value.value, value.n)
                    )
        return scores, maps


NOTHING = Measures({})


# Gradients of summed losses are added up in this unit, a power of two, so that they stay where sums are exact.
_UNIT = 2.0**-10


class Gradients(NamedTuple):
    """Of one domain and split: the gradient of the summed loss, in units, and the number of examples."""

    domain: str
    split: str
    total: Any  # an ExactSum, or one packed for another process
    n: int


def gradients_of(ctx: Context, weights: Any, parts: Iterable[tuple[str, str, Part]]) -> list[Gradients]:
    """On a host: gradients at `weights` of (domain, split, part)s, those of a domain's clients put together."""
    sums: dict[tuple[str, str], tuple[ExactSum, int]] = {}
    for domain, split, part in parts:
        if len(part):
            total, n = sums.get((domain, split), (ExactSum(), 0))
            total.add(full_gradient(ctx.task, weights, part), len(part) * _UNIT)
            sums[domain, split] = total, n + len(part)
    return [Gradients(domain, split, *found) for (domain, split), found in sums.items()]


def gradient_scores(metrics: Sequence[OfGradients], found: Iterable[Gradients]) -> list[Score]:
    """On the server: values of the metrics of gradients, from what all hosts found."""
    sums: dict[tuple[str, str], tuple[ExactSum, int]] = {}
    for one in found:
        total, n = sums.setdefault((one.domain, one.split), (ExactSum(), 0))
        total.merge(one.total)
        sums[one.domain, one.split] = total, n + one.n
    scores = []
    for metric in metrics:
        means: dict[str, tuple[dict[str, Tensor], int]] = {}
        for domain in sorted({domain for domain, _ in sums}):
            parts = [sums[domain, split] for split in dict.fromkeys(metric.splits) if (domain, split) in sums]
            if n := sum(examples for _, examples in parts):
                whole = [total.value for total, _ in parts]
                means[domain] = ({name: sum(part[name] for part in whole) / (n * _UNIT) for name in whole[0]}, n)
        for domain, value in metric.measure(means):
            scores.append(Score(-1, domain, metric.splits[0], "global", *value))
    return scores
