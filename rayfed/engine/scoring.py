"""Scores of models: accuracy, loss, and the metrics that are due in a round.

A metric's `measure` returns a `Value`, and `as_score` makes a `Score` of it, which then travels unchanged to the table
`metrics`: in `Scored` from a host to the server, and in a `Record` to the recorder. Hosts compute the metrics of
predictions and of training. For metrics of representations and of gradients, hosts collect what is needed and the
server computes the values.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rayfed.algorithm import Algorithm, Context
from rayfed.core.errors import BadHook
from rayfed.core.exact_sum import ExactSum
from rayfed.core.example_losses import sums_of_parts
from rayfed.core.outputs import labels_with_loss, scored_values, with_loss
from rayfed.core.rng import generator
from rayfed.core.round_record import Predictions, RepresentationMap, Score, Selection, lower_is_better_by_name
from rayfed.core.task import Task
from rayfed.core.trees import named_tensors
from rayfed.engine.device_data import Part
from rayfed.metrics.base import (
    OF_CLASSES,
    Metric,
    OfChangedInputs,
    OfGradients,
    OfPredictions,
    OfRepresentations,
    OfTraining,
    Representations,
    Value,
)
from rayfed.metrics.from_torchmetrics import TorchMetric
from rayfed.metrics.heterogeneity import full_gradient
from rayfed.metrics.representations import Tsne, collect_representations

_VALUES = {"cpu": 2**16, "cuda": 2**22}
"""The numbers in the inputs of a batch.

On a CPU the outputs of a layer should fit its cache: the four-layer CNN on images of 28 x 28 takes 80 µs per example in
batches of 83, and 90 in batches of 200. A GPU needs larger batches.
"""
_ROWS = {"cpu": (16, 512), "cuda": (64, 4096)}
_HELD = {"cpu": 2**16, "cuda": 2**22}
"""The numbers in the outputs that are held until those of other models are known."""
_UNIT = 2.0**-10
"""The unit in which gradients of summed losses are added up: a power of two that keeps them where sums are exact."""

TESTED = ("test", "ood")
"""The splits of whose examples predictions are kept."""
_Metric = TypeVar("_Metric", bound=Metric)


@dataclass
class Scored:
    """The scores of models, the representations for the metrics that the server computes, and kept predictions.

    Attributes:
        unread: What is still on the device; `read` makes scores of it.
        predictions: The predictions for test examples, if they are kept.
    """

    scores: list[Score] = field(default_factory=list)
    collected: list[Representations] = field(default_factory=list)
    unread: list["Unread"] = field(default_factory=list)
    predictions: list[Predictions] = field(default_factory=list)
    _held: int = 0  # numbers in the outputs of `unread`

    def add(self, other: "Scored") -> None:
        """Append what `other` has."""
        self.scores += other.scores
        self.collected += other.collected
        self.unread += other.unread
        self.predictions += other.predictions
        for unread in other.unread:
            if unread.outputs is not None:
                self._held += unread.outputs.logits.numel()
                if self._held > _most_held(unread.outputs.logits.device):
                    self._compute_numbers()

    def read(self) -> "Scored":
        """Append the scores that are still on the device, after a single wait for it, and return this object."""
        self._compute_numbers()
        if self.unread:
            numbers = torch.cat([unread.numbers for unread in self.unread])
            rows = iter(numbers.tolist())
            for unread in self.unread:
                self.scores += unread.scores(itertools.islice(rows, len(unread.numbers)))
        self.unread = []
        return self

    def _compute_numbers(self) -> None:
        """Compute the numbers of all models whose outputs are held, with as many operations as for one of them."""
        held = []
        for unread in self.unread:
            if unread.outputs is not None:
                held.append((unread, unread.outputs))
        for _, group in itertools.groupby(held, key=lambda pair: pair[1].form):
            pairs = list(group)
            found = _numbers_of_models([outputs for _, outputs in pairs])
            for (unread, _), numbers in zip(pairs, found, strict=True):
                unread.numbers = numbers
                unread.outputs = None
        self._held = 0


def _most_held(device: torch.device) -> int:
    return _HELD.get(device.type, _HELD["cpu"])


class ModelOutputs(NamedTuple):
    """The outputs of a model for all examples of some parts [examples, classes], and the labels of each part."""

    task: Task
    logits: Tensor
    labels: list[Tensor]

    @property
    def form(self) -> tuple[int, int]:
        """What models have in common that are scored together."""
        return id(self.task), self.logits.shape[1]


@dataclass
class Unread:
    """Scores of a model at `point` whose numbers are still on the device.

    Attributes:
        numbers: The accuracy of each part, NaN if no label counts, its loss, and whether it has one: [parts, 3].
        outputs: The outputs of which the numbers are still to be computed, together with those of other models.
        places: The columns of the scores of each part that say whose it is.
        examples: The number of examples of each part.
        more: The values of further metrics on each part.
        of_classes: Whether there is an accuracy.
    """

    numbers: Tensor
    outputs: ModelOutputs | None
    places: list[dict[str, Any]]
    examples: list[int]
    more: list[list[Value]]
    of_classes: bool
    point: str
    selection: Selection | None

    def scores(self, rows: Iterable[list[float]]) -> list[Score]:
        """Return the scores; `rows` are `numbers`."""
        scores = []
        for (accuracy, loss, has_loss), place, n, more in zip(rows, self.places, self.examples, self.more, strict=True):
            if math.isnan(accuracy):
                continue
            values = []
            if self.of_classes:
                values.append(Value("accuracy", accuracy, n, higher_is_better=True))
            if has_loss:
                values.append(Value("loss", loss, n, higher_is_better=False))
            values += more
            scores += [as_score(value, self.selection, point=self.point, **place) for value in values]
        return scores


def score(
    algorithm: Algorithm,
    ctx: Context,
    model: Any,
    point: str,
    parts: Sequence[Part],
    metrics: Sequence[OfPredictions] = (),
    selection: Selection | None = None,
) -> list[Score]:
    """Return the scores of `unread_scores`, after a wait for the device."""
    return Scored(unread=[unread_scores(algorithm, ctx, model, point, parts, metrics, selection)]).read().scores


@torch.no_grad()
def unread_scores(
    algorithm: Algorithm,
    ctx: Context,
    model: Any,
    point: str,
    parts: Sequence[Part],
    metrics: Sequence[OfPredictions] = (),
    selection: Selection | None = None,
    kept: list[Predictions] | None = None,
) -> Unread:
    """Return the scores of the model at `point` on each of `parts`, in their order; no part may be empty.

    The predictions for test examples are added to `kept`, if it is given.

    The scores are `accuracy` in [0, 1] where the outputs stand for classes (`rayfed.core.outputs`), `loss` as the mean
    over examples, and those of `metrics`. A part has no scores if all of its labels are ignored, and no loss if they
    all have the weight 0. The parts share batches, which is several times as fast for small parts, unless an example's
    output depends on its batch.
    """
    task = ctx.task
    lengths = list(map(len, parts))
    held = None
    more: list[list[Value]] = [[] for _ in parts]
    outputs: Iterable[Tensor] = predictions(algorithm, ctx, model, parts)
    if parts and task.outputs.kind == "classes":
        whole = _all_predictions(algorithm, ctx, model, parts)
        outputs = whole.split(lengths)
        if task.has_example_losses(whole, parts[0].y):
            held = ModelOutputs(task, whole, [part.y for part in parts])
    rows = []
    if held is None or metrics or kept is not None:
        for place, (part, logits) in enumerate(zip(parts, outputs, strict=True)):
            scored = scored_values(task.outputs, logits, part.y)
            if held is None:
                rows.append(_numbers(ctx, model, logits, part, scored))
            values = _measured(metrics, logits, part, scored)
            if kept is not None and part.split in TESTED and scored is not None:
                kept.append(_predictions(task.outputs.kind, *scored, part, point))
            if task.outputs.kind == "positions":  # rows count examples
                values = [value._replace(n=len(part)) for value in values]
            more[place] = values
    if rows:
        numbers = torch.stack(rows)
    else:
        numbers = torch.empty(0, 3, dtype=torch.float64, device=task.device)
    places = [part.place for part in parts]
    return Unread(numbers, held, places, lengths, more, task.outputs.kind in OF_CLASSES, point, selection)


def _numbers(ctx: Context, model: Any, logits: Tensor, part: Part, scored: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the accuracy and the loss on a part, and whether it has a loss: [3]."""
    loss = ctx.task.scoring_loss(logits, part.y, model).double()
    accuracy = torch.zeros_like(loss)
    if ctx.task.outputs.kind in OF_CLASSES and scored is not None:
        is_right = scored[0].argmax(1) == scored[1]
        accuracy = is_right.double().mean()  # NaN if no label counts
    has_loss = with_loss(part.y, ctx.task.without_loss)[1]
    return torch.stack([accuracy, loss, has_loss.double()])


def _numbers_of_models(outputs: Sequence[ModelOutputs]) -> tuple[Tensor, ...]:
    """Return `_numbers` of the parts of each model [parts, 3], by sums over each part.

    The bits of a part's numbers do not depend on the other models.
    """
    task = outputs[0].task
    labels = []
    for of_model in outputs:
        labels += of_model.labels
    logits = torch.cat([of_model.logits for of_model in outputs])
    y = torch.cat(labels)
    of_examples = task.example_losses(logits, y)
    assert of_examples is not None, "outputs are held where losses of examples are known"
    ignored = task.outputs.ignored
    counts = torch.ones_like(y, dtype=torch.bool)
    if ignored is not None:
        counts = y != ignored
    is_right = (logits.argmax(1) == y) & counts
    has_loss = labels_with_loss(y, task.without_loss)
    columns = [is_right.double(), counts.double(), of_examples.losses, of_examples.weights, has_loss.double()]
    lengths = [len(part) for part in labels]
    right, counted, losses, weights, with_a_loss = sums_of_parts(torch.stack(columns, 1), lengths).unbind(1)
    numbers = torch.stack([right / counted, losses / weights, with_a_loss], 1)
    parts_of_models = [len(of_model.labels) for of_model in outputs]
    return torch.split(numbers, parts_of_models)


@torch.no_grad()
def scores_of_changed_inputs(
    algorithm: Algorithm,
    ctx: Context,
    model: Any,
    point: str,
    parts: Sequence[Part],
    metrics: Sequence[OfChangedInputs],
) -> list[Score]:
    """Return the values of metrics that change the inputs of each of `parts`; none where no example is left."""
    scores = []
    for metric in metrics:
        for part in parts:
            logits = []
            labels = []
            for batch in part.batches(batch_size(part)):
                x, y = metric.changed(batch.x, batch.y, ctx.task.inputs)
                if len(y):
                    logits.append(algorithm.predict(ctx, model, x))
                    labels.append(y)
            if labels:
                for value in metric.measure(torch.cat(logits), torch.cat(labels)):
                    scores.append(as_score(metric.declared(value), point=point, **part.place))
    return scores


def _predictions(kind: str, outputs: Tensor, labels: Tensor, part: Part, point: str) -> Predictions:
    rows = outputs.float().cpu().numpy().reshape(len(outputs), -1)
    place = part.place
    return Predictions(place["client"], place["domain"], place["split"], point, kind, rows, labels.cpu().numpy())


def as_score(value: Value, selection: Selection | None = None, **place: Any) -> Score:
    """Return `value` as a score; `place` has `point`, `split` and the other fields that say what was scored.

    Where nothing declares whether higher is better, `selection` decides for its own metric, and else the name does.
    """
    higher_is_better = value.higher_is_better
    if higher_is_better is None:
        higher_is_better = not lower_is_better_by_name(value.metric)
        if selection is not None and selection.metric == value.metric:
            higher_is_better = selection.higher_is_better
    return Score(metric=value.metric, value=value.value, n=value.n, higher_is_better=higher_is_better, **place)


def _measured(
    metrics: Sequence[OfPredictions], logits: Tensor, part: Part, scored: tuple[Tensor, Tensor] | None
) -> list[Value]:
    """Return the values of `metrics`; `scored` is what `scored_values` returns for `logits` and the labels.

    A value of a user's own metric replaces a value of the same name by one of rayfed's metrics.
    """
    ours = list[Value]()
    own = list[Value]()
    for metric in metrics:
        outputs = logits
        y = part.y
        if metric.requires_classes and scored is not None:
            outputs, y = scored
        if not len(y):
            continue
        if not _has_users_code(metric):
            ours += metric.values(outputs, y)
            continue
        measured = metric.values(outputs.clone(), y.clone())  # it may change them in place
        if type(metric).__module__.startswith("rayfed."):
            ours += measured
        else:
            own += measured
    replaced = {value.metric for value in own}
    values = [*(value for value in ours if value.metric not in replaced), *own]
    for name, count in Counter(value.metric for value in values).items():
        if count > 1:
            raise BadHook(f"metrics: two metrics return a value called {name} on the same data; rename one of them")
    return values


def _has_users_code(metric: OfPredictions) -> bool:
    """Return whether a metric is the user's own, or one of torchmetrics, which may be the user's class."""
    return isinstance(metric, TorchMetric) or not type(metric).__module__.startswith("rayfed.")


@torch.no_grad()
def predictions(algorithm: Algorithm, ctx: Context, model: Any, parts: Sequence[Part]) -> Iterator[Tensor]:
    """Yield the outputs [n, ...] of each part, in their order."""
    if ctx.task.rows_interact:
        for part in parts:  # in batches of nearly one size, so that none has one example
            count = -(-len(part) // batch_size(part))
            ends = []
            for k in range(count + 1):
                ends.append(k * len(part) // count)
            inputs = (part.normalise(part.x[start:stop]) for start, stop in itertools.pairwise(ends))
            yield torch.cat([_predicted(algorithm, ctx, model, x) for x in inputs])
        return
    pieces: list[Tensor] = []  # logits that are not yet yielded
    batches = _batches(parts)
    for part in parts:
        while sum(map(len, pieces)) < len(part):
            pieces.append(_predicted(algorithm, ctx, model, next(batches)))
        if len(pieces) > 1:
            logits = torch.cat(pieces)
        else:
            logits = pieces[0]
        yield logits[: len(part)]
        pieces = [logits[len(part) :]]


def _all_predictions(algorithm: Algorithm, ctx: Context, model: Any, parts: Sequence[Part]) -> Tensor:
    """Return the outputs of all parts, one after the other."""
    if ctx.task.rows_interact:
        outputs = list(predictions(algorithm, ctx, model, parts))
    else:
        outputs = [_predicted(algorithm, ctx, model, x) for x in _batches(parts)]
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs)


def _predicted(algorithm: Algorithm, ctx: Context, model: Any, x: Tensor) -> Tensor:
    """Return a copy of the outputs: the model may write its next ones to the same memory."""
    return algorithm.predict(ctx, model, x).clone()


def _batches(parts: Sequence[Part]) -> Iterator[Tensor]:
    """Yield the normalised inputs of all parts in turn, in batches that may span several parts."""
    if not parts:
        return
    size = batch_size(parts[0])
    waiting: list[Tensor] = []
    room = size
    for part in parts:
        start = 0
        while start < len(part):
            rows = part.x[start : start + room]
            waiting.append(rows)
            start = start + len(rows)
            room = room - len(rows)
            if not room:
                if len(waiting) > 1:
                    rows = torch.cat(waiting)
                yield part.normalise(rows)
                waiting = []
                room = size
    if waiting:
        yield parts[-1].normalise(torch.cat(waiting))


def batch_size(part: Part) -> int:
    """Return how many examples of `part` to score at once, by the size of an input and the kind of device."""
    device = part.y.device.type
    least, most = _ROWS.get(device, _ROWS["cpu"])
    values = _VALUES.get(device, _VALUES["cpu"])
    of_one = max(1, part.x[:1].numel())
    return max(least, min(most, values // of_one))


@dataclass(frozen=True)
class DueMetrics:
    """The metrics that are due in a round.

    Attributes:
        metrics: The metrics by name.
        groups: The number of clients and test sets that have examples of each split.
        last: Whether this is the last exchange of its round. Earlier exchanges only keep the models before training.
        selection: The metric that chooses rounds.
        keep_predictions: Whether the predictions for test examples are kept.
    """

    metrics: Mapping[str, Metric]
    groups: Mapping[str, int] = field(default_factory=dict)
    last: bool = True
    selection: Selection | None = None
    keep_predictions: bool = False

    def only(self, *kinds: type) -> "DueMetrics":
        """Return the metrics of these kinds."""
        chosen = {}
        for name, metric in self.metrics.items():
            if isinstance(metric, kinds):
                chosen[name] = metric
        return replace(self, metrics=chosen)

    def of(self, kind: type[_Metric]) -> list[_Metric]:
        """Return the metrics of a kind as a list."""
        return [metric for metric in self.metrics.values() if isinstance(metric, kind)]

    @property
    def fitted(self) -> set[str]:
        """The splits on which a metric is fitted and not measured; they need not be scored."""
        splits: set[str] = set()
        for metric in self.of(OfRepresentations):
            splits |= metric.splits - {metric.split}
        return splits

    def collect(
        self, algorithm: Algorithm, ctx: Context, model: Any, point: str, part: Part, seed: int
    ) -> list[Representations]:
        """Return, on a host, the model's representations of a sample of `part`, one item per layer."""
        groups = self.groups.get(part.split, 1)
        layers = set[str]()
        count = 0
        for metric in self.of(OfRepresentations):
            if part.split in metric.splits:
                layers.update(metric.layers)
                count = max(count, metric.share(groups))
        if not layers or not len(part):
            return []
        rng = generator(seed, "metrics", round=ctx.round, client=part.client, domain=part.domain, split=part.split)
        rows = torch.from_numpy(rng.permutation(len(part))[:count])
        y = part.y.cpu()[rows]
        by_layer = collect_representations(algorithm, ctx, model, part, rows, sorted(layers))
        found = []
        for layer, z in by_layer.items():
            found.append(Representations(part.client, part.domain, z, y, part.split, point, layer))
        return found

    def training_values(self, ctx: Context, before: Any, after: Any) -> list[Value]:
        """Return, on a host, the values of the metrics of training for a client's model before and after it."""
        buffers = set(ctx.task.buffers)
        before_by_path = _floats(before)
        after_by_path = _floats(after)
        start = {}
        end = {}
        for path, tensor in before_by_path.items():
            other = after_by_path.get(path)
            if path not in buffers and other is not None and other.shape == tensor.shape:
                start[path] = tensor
                end[path] = other
        if not start:
            return []
        values = []
        for metric in self.of(OfTraining):
            for name, value in metric.measure(start, end):
                values.append(metric.declared(Value(name, value, ctx.examples)))
        return values

    def representation_scores(
        self,
        collected: Iterable[Representations],
        classes: int,
        seed: int,
        device: torch.device,
        tell: Callable[[str], None] = lambda doing: None,
        *,
        joint: Iterable[Representations] = (),
    ) -> tuple[list[Score], list[RepresentationMap]]:
        """Return, on the server, the scores and maps from the representations that all hosts collected.

        A metric has no value where a representation or its square is not finite, as after a model diverged: the
        libraries behind the metrics would end the trial. `tell` is called with what is measured. `joint` has the
        representations of the whole round, for maps of several points; it is empty before the end of the round.
        """
        by_layer: dict[tuple[str, str], list[Representations]] = {}
        for item in collected:
            by_layer.setdefault((item.point, item.layer), []).append(item)
        for item in joint:
            by_layer.setdefault((JOINT, item.layer), []).append(item)
        scores: list[Score] = []
        maps = []
        for name, metric in self.metrics.items():
            if not isinstance(metric, OfRepresentations):
                continue
            is_joint = isinstance(metric, Tsne) and metric.joint
            for point, layer in sorted(by_layer):
                if layer not in metric.layers or (point == JOINT) != is_joint:
                    continue
                samples = _samples(metric, by_layer[point, layer], device)
                if not samples:
                    continue
                tell(f"measuring {name}")
                if isinstance(metric, Tsne):
                    drawn = metric.map(samples, seed)
                    maps.append(RepresentationMap(name, point, metric.split, layer, drawn))
                else:
                    scores += _layer_scores(metric, samples, classes, seed)
        return scores, maps


def _samples(
    metric: OfRepresentations, groups: Iterable[Representations], device: torch.device
) -> list[Representations]:
    """Return the share of each group that a metric takes, in a fixed order; none where it has no value."""
    groups = [group for group in groups if group.split in metric.splits]
    held = {(group.split, group.client, group.domain) for group in groups}
    counts = Counter(split for split, _, _ in held)
    are_finite = all(bool(group.z.square().isfinite().all()) for group in groups)
    if metric.split not in counts or not are_finite:
        return []
    samples = []
    for group in sorted(groups, key=lambda group: (group.point, group.client, group.domain, group.split)):
        share = metric.share(counts[group.split])
        z = group.z[:share].to(device)
        samples.append(group._replace(z=z, y=group.y[:share].to(device)))
    return samples


def _layer_scores(
    metric: OfRepresentations, samples: Sequence[Representations], classes: int, seed: int
) -> list[Score]:
    """Return the scores of a metric from the representations of one layer at one point."""
    point = samples[0].point
    layer = samples[0].layer
    suffix = ""
    if layer != "features":
        suffix = f"@{layer}"
    scores = []
    for client, domain, value in metric.measure(samples, classes, seed):
        value = metric.declared(value)
        value = value._replace(metric=value.metric + suffix)
        scores.append(as_score(value, client=client, domain=domain, split=metric.split, point=point))
    return scores


def _floats(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of floats in a model, by their path."""
    return {path: tensor for path, tensor in named_tensors(tree) if tensor.is_floating_point()}


JOINT = "joint"
NO_METRICS = DueMetrics({})


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
    return [Gradients(*place, *summed) for place, summed in sums.items()]


def _mean_gradient(totals: Sequence[ExactSum], n: int) -> dict[str, Tensor]:
    """Return the mean over `n` examples of summed gradients."""
    sums = [total.value for total in totals]
    mean = {}
    for name in sums[0]:
        whole = sum(one[name] for one in sums)
        mean[name] = whole / (n * _UNIT)
    return mean


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
            parts = []
            for split in dict.fromkeys(metric.splits):
                if (domain, split) in sums:
                    parts.append(sums[domain, split])
            n = sum(examples for _, examples in parts)
            if n:
                means[domain] = _mean_gradient([total for total, _ in parts], n), n
        for domain, value in metric.measure(means):
            value = metric.declared(value)
            scores.append(as_score(value, domain=domain, split=metric.splits[0], point="global"))
    return scores
