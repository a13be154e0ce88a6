"""Metrics besides accuracy and loss: which are due in a round, what hosts collect for them, and their scores.

Metrics of predictions and of training are computed on the hosts. For metrics of representations and of gradients, hosts
collect what is needed and the server computes the scores.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfed.algorithm import Algorithm, Context
from rayfed.core.records import RepresentationMap, Score, Selection
from rayfed.core.rng import generator
from rayfed.core.trees import named_tensors
from rayfed.engine.device_data import Part
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.scoring import as_score
from rayfed.metrics.base import (
    Metric,
    OfGradients,
    OfPredictions,
    OfRepresentations,
    OfTraining,
    Representations,
    Value,
)
from rayfed.metrics.heterogeneity import full_gradient
from rayfed.metrics.representations import collect_representations
from rayfed.metrics.tsne import Tsne


@dataclass(frozen=True)
class DueMetrics:
    """The metrics that are due in a round.

    Attributes:
        metrics: the metrics by name.
        groups: how many clients and test sets have examples of each split.
        last: whether this is the last exchange of its round. The exchanges before it only note the models before
            training.
        selection: the metric that chooses rounds, and whether higher is better of it.
    """

    metrics: Mapping[str, Metric]
    groups: Mapping[str, int] = field(default_factory=dict)
    last: bool = True
    selection: Selection | None = None

    def only(self, *kinds: type) -> "DueMetrics":
        """Return the metrics of these kinds."""
        return replace(self, metrics={name: m for name, m in self.metrics.items() if isinstance(m, kinds)})

    def of(self, kind: type) -> list[Any]:
        """Return the metrics of one kind, as a list."""
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
        """The splits that a metric is fitted to but not measured on; they need not be scored."""
        return {split for metric in self.of(OfRepresentations) for split in metric.splits - {metric.split}}

    def collect(
        self, algorithm: Algorithm, ctx: Context, model: Any, point: str, part: Part, seed: int
    ) -> list[Representations]:
        """Collect, on a host, the representations of `part` by the model at `point` for the metrics that need them.

        The examples are a random sample, drawn by the seed.
        """
        metrics = [metric for metric in self.of(OfRepresentations) if part.split in metric.splits]
        layers = sorted({layer for metric in metrics for layer in metric.layers})
        if not layers or not len(part):
            return []
        count = max(metric.share(self.groups.get(part.split, 1)) for metric in metrics)
        rng = generator(seed, "metrics", round=ctx.round, client=part.client, domain=part.domain, split=part.split)
        rows = torch.from_numpy(rng.permutation(len(part))[:count])
        y = part.y.cpu()[rows]
        by_layer = collect_representations(algorithm, ctx, model, part, rows, layers)
        return [
            Representations(part.client, part.domain, z, y, part.split, point, layer) for layer, z in by_layer.items()
        ]

    def training_values(self, ctx: Context, before: Any, after: Any) -> list[Value]:
        """Return, on a host, the values of the metrics of training for a client's model before and after it."""
        buffers = set(ctx.task.buffers)
        start, end = (
            {p: t for p, t in named_tensors(m) if t.is_floating_point() and p not in buffers} for m in (before, after)
        )
        common = [path for path in start if path in end and start[path].shape == end[path].shape]
        if not common:
            return []
        start, end = {path: start[path] for path in common}, {path: end[path] for path in common}
        return [
            metric.declared(Value(name, value, ctx.examples))
            for metric in self.training
            for name, value in metric.each(metric.measure(start, end))
        ]

    def representation_scores(
        self,
        collected: Iterable[Representations],
        classes: int,
        seed: int,
        device: torch.device,
        tell: Callable[[str], None] = lambda doing: None,
    ) -> tuple[list[Score], list[RepresentationMap]]:
        """Return, on the server, the scores and maps from the representations that all hosts collected.

        Where one of them is NaN, infinite or nearly so, as of a model that diverged, the metrics that use it have no
        values: the libraries that compute them would end the trial. `tell` is called with what is being done.
        """
        by_layer: dict[tuple[str, str], list[Representations]] = {}
        for item in collected:
            by_layer.setdefault((item.point, item.layer), []).append(item)
        scores, maps = [], []
        for name, metric in self.metrics.items():
            for (point, layer), groups in sorted(by_layer.items(), key=lambda pair: pair[0]):
                if not isinstance(metric, OfRepresentations) or layer not in metric.layers:
                    continue
                groups = [group for group in groups if group.split in metric.splits]
                counts = Counter(group.split for group in groups)
                if metric.split not in counts or not all(bool(g.z.square().isfinite().all()) for g in groups):
                    continue
                samples = []
                for g in sorted(groups, key=lambda g: (g.client, g.domain, g.split)):
                    share = metric.share(counts[g.split])
                    samples.append(g._replace(z=g.z[:share].to(device), y=g.y[:share].to(device)))
                tell(f"measuring {name}")
                if isinstance(metric, Tsne):
                    maps.append(RepresentationMap(name, point, metric.split, layer, metric.map(samples, seed)))
                    continue
                suffix = "" if layer == "features" else f"@{layer}"
                for client, domain, value in metric.each(metric.measure(samples, classes, seed)):
                    value = metric.declared(value)
                    value = value._replace(metric=value.metric + suffix)
                    scores.append(as_score(value, client=client, domain=domain, split=metric.split, point=point))
        return scores, maps


NO_METRICS = DueMetrics({})


# Gradients of summed losses are added up in this unit, a power of two, so that they stay where sums are exact.
_UNIT = 2.0**-10


class Gradients(NamedTuple):
    """The gradient of the summed loss over one domain and split, in units of `_UNIT`, and the number of examples."""

    domain: str
    split: str
    total: ExactSum
    n: int


def domain_gradients(ctx: Context, weights: Any, parts: Iterable[Part]) -> list[Gradients]:
    """Return, on a host, the gradients at `weights`, summed over the parts of a domain and split."""
    sums: dict[tuple[str, str], tuple[ExactSum, int]] = {}
    for part in parts:
        if len(part):
            total, n = sums.get((part.domain, part.split), (ExactSum(), 0))
            total.add(full_gradient(ctx.task, weights, part), len(part) * _UNIT)
            sums[part.domain, part.split] = total, n + len(part)
    return [Gradients(domain, split, total, n) for (domain, split), (total, n) in sums.items()]


def gradient_scores(metrics: Sequence[OfGradients], gradients: Iterable[Gradients]) -> list[Score]:
    """Return, on the server, the scores of the metrics of gradients from the gradients of all hosts."""
    sums: dict[tuple[str, str], tuple[ExactSum, int]] = {}
    for gradient in gradients:
        total, n = sums.setdefault((gradient.domain, gradient.split), (ExactSum(), 0))
        total.merge(gradient.total)
        sums[gradient.domain, gradient.split] = total, n + gradient.n
    scores = []
    for metric in metrics:
        means: dict[str, tuple[dict[str, Tensor], int]] = {}
        for domain in sorted({domain for domain, _ in sums}):
            parts = [sums[domain, split] for split in dict.fromkeys(metric.splits) if (domain, split) in sums]
            if n := sum(examples for _, examples in parts):
                totals = [total.value for total, _ in parts]
                means[domain] = ({name: sum(part[name] for part in totals) / (n * _UNIT) for name in totals[0]}, n)
        for domain, value in metric.each(metric.measure(means)):
            value = metric.declared(value)
            scores.append(as_score(value, domain=domain, split=metric.splits[0], point="global"))
    return scores
