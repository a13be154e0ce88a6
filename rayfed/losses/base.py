"""The interface of losses: (outputs [n, ...], labels [n, ...]) -> mean over the batch, a scalar tensor."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rayfed.core.errors import UsageError
from rayfed.core.options import build
from rayfed.core.registry import resolve
from rayfed.losses import LOSSES

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class NamedLoss:
    """Base class of rayfed's losses. A user's own loss need not derive from it."""

    def outputs(self, label_shape: tuple[int, ...], num_classes: int) -> int:
        """Return how many outputs per example a model needs, by the shape of one label and the number of classes."""
        return num_classes

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of `outputs` [n, ...] for the labels `y` [n, ...]."""
        raise NotImplementedError


def build_loss(name: str, options: Mapping[str, Any]) -> Loss:
    """Return the loss called `name`.

    Args:
        name: A key of `LOSSES` or a user's `module:Name`: a function (outputs, y, **options), or a class whose
            instances are called with (outputs, y) and whose fields or arguments are the options.

    Raises:
        UsageError: The name or an option is unknown, or an option has the wrong type or is out of range.
    """
    target = resolve(name, LOSSES, where="loss.name")
    if inspect.isclass(target) and dataclasses.is_dataclass(target):
        loss: Any = build(target, options, where="loss", also=("name",))
    else:
        is_class = inspect.isclass(target)
        how = "made with (**options)" if is_class else "called with (outputs, labels, **options)"
        try:
            inspect.signature(target).bind(*(() if is_class else (None, None)), **options)
        except TypeError as error:
            raise UsageError(f"loss.name={name}: is {how}: {error}") from error
        except ValueError:  # some callables have no signature
            pass
        loss = target(**options) if is_class else functools.partial(target, **options) if options else target
    return loss  # type: ignore[no-any-return]


def needed_outputs(loss: Loss, label_shape: tuple[int, ...], num_classes: int) -> int:
    """Return how many outputs per example `loss` needs; one per class for a loss of the user's own."""
    return loss.outputs(label_shape, num_classes) if isinstance(loss, NamedLoss) else num_classes
