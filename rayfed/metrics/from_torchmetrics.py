"""Any metric of torchmetrics by its path, as `metrics.torchmetrics:classification.MulticlassCohenKappa`."""

import contextlib
import importlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.core.errors import UsageError, one_line
from rayfed.core.options import arguments_for, option, suggestion
from rayfed.core.outputs import Kind, Outputs, scored_values
from rayfed.metrics import PREFIX
from rayfed.metrics.base import OF_CLASSES, OfPredictions, Value


@dataclass(frozen=True, kw_only=True)
class TorchMetric(OfPredictions):
    """A metric of torchmetrics, on one part of a client's data. Its values have the name of its class.

    Metrics of classes receive probabilities; Binary* metrics receive the probability of class 1. All other metrics
    receive the outputs as they are. A part that lacks examples, by torchmetrics' own judgement, has no value.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (*OF_CLASSES, "labels", "numbers", "unknown")

    path: str = option(help="path of the class in torchmetrics")
    options: dict = option({}, help="its arguments")  # type: ignore[type-arg]

    @cached_property
    def _metric(self) -> Any:
        return self.made()

    def made(self) -> Any:
        """Return the metric; UsageError if there is no such class, or an argument is wrong."""
        import torchmetrics  # takes two seconds

        where = f"metrics.{PREFIX}{self.path}"
        owner: Any = torchmetrics
        for name in self.path.split("."):
            if owner is torchmetrics:  # which does not import all of its packages, such as segmentation
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"torchmetrics.{name}")
            if not hasattr(owner, name):
                known = [key for key in dir(owner) if not key.startswith("_")]
                raise UsageError(f"{where}: torchmetrics has no such metric; {suggestion(name, known)}")
            owner = getattr(owner, name)
        try:
            return owner(**arguments_for(owner, self.options))
        except Exception as error:  # torchmetrics raises anything
            raise UsageError(f"{where}={self.options}: {one_line(error)}") from error

    def check(self, outputs: Outputs, values: Tensor, y: Tensor) -> None:
        """Raise UsageError if the metric fails on outputs of a model and labels."""
        arguments = (values, y)
        if self.requires_classes:
            arguments = scored_values(outputs, values, y) or arguments
        try:
            list(self.measure(*arguments))
        except Exception as error:  # as above
            raise UsageError(f"metrics.{PREFIX}{self.path}={self.options}: {one_line(error)}") from error

    def measure(self, outputs: Tensor, y: Tensor) -> Iterable[Value]:
        metric = self._metric.to(outputs.device)
        metric.reset()
        metric.update(*self._arguments(outputs, y))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="(?s)No (positive|negative) samples")
            try:
                computed = metric.compute()
            except (UserWarning, ValueError):  # such as R2Score of one example
                return
        for name, number in named_numbers(type(metric).__name__, computed):
            if not math.isnan(number) or not bool(outputs.isfinite().all()):
                yield Value(name, number, len(y), metric.higher_is_better)

    def _arguments(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions and targets in the form in which the metric takes them."""
        name = type(self._metric).__name__
        if name == "Perplexity":
            return outputs[None], y[None]
        if name.startswith("Multiclass"):
            return outputs.double().softmax(1), y
        if name.startswith("Binary") and y.ndim == 1 and outputs.ndim == 2:
            if outputs.shape[1] != 2:
                raise ValueError(
                    f"{outputs.shape[1]} classes; a metric of two is called Binary*, one of more Multiclass*"
                )
            return outputs.double().softmax(1)[:, 1], y
        if name.startswith(("Binary", "Multilabel")):
            return outputs.double().sigmoid(), y.long()
        return outputs, y


class TorchSegmentation(TorchMetric):
    """A metric of `torchmetrics.segmentation`, which gets the predicted classes [n, ...] and the labels [n, ...]."""

    requires_classes: ClassVar[bool] = False

    def _arguments(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.ndim > y.ndim:
            predicted = outputs.argmax(1)
        else:
            predicted = (outputs > 0).long().reshape(y.shape)
        return predicted, y.long()


def named_numbers(name: str, computed: Any) -> Iterator[tuple[str, float]]:
    """Yield what a metric of torchmetrics computed as (name, number): a number, several of them, or a mapping of such.

    The key of a mapping and the place of a number among several are appended to the name.
    """
    if isinstance(computed, Mapping):
        for key, value in computed.items():
            if key:
                yield from named_numbers(f"{name}_{key}", value)
            else:
                yield from named_numbers(name, value)
        return
    numbers = torch.as_tensor(computed).reshape(-1).tolist()
    if len(numbers) == 1:
        yield name, numbers[0]
        return
    for place, number in enumerate(numbers):
        yield f"{name}_{place}", number


def torch_metric(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `TorchMetric` for the options that a configuration gives to the metric at `path`."""
    given = dict(values)
    given.pop("path", None)  # as a recorded configuration has it
    own = {}
    if "every" in given:
        own["every"] = given.pop("every")
    options = given.pop("options", {}) | given
    return {"path": path, "options": options, **own}
