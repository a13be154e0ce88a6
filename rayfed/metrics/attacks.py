"""Metrics of attacks: how a model sees inputs that an attacker has changed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rayfed.channel.attacks import Trigger
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import InputSpec
from rayfed.metrics.base import OfChangedInputs, Value


@dataclass(frozen=True, kw_only=True)
class AttackSuccess(OfChangedInputs):
    """`attack_success`: the share of images of other classes that are seen as class `target` once they have a trigger.

    It is on with attack.name=backdoor, with the keys of the attack. Without an attack, it is how often a model is wrong
    in favour of that class.
    """

    higher_is_better: ClassVar[bool | None] = False

    target: int = option(0, low=0, help="class that the trigger is to be seen as")
    size: int = option(3, low=1, help="side of the trigger in pixels")

    @property
    def trigger(self) -> Trigger:
        """The trigger."""
        return Trigger(size=self.size, target=self.target)

    def check(self, inputs: InputSpec, num_classes: int) -> None:
        fault = self.trigger.fault(inputs.shape, inputs.continuous, num_classes)
        if fault:
            raise UsageError(f"metrics.attack_success.{fault}")

    def changed(self, x: Tensor, y: Tensor, inputs: InputSpec) -> tuple[Tensor, Tensor]:
        others = y != self.target
        return self.trigger.stamped(x[others], inputs), y[others]

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        yield Value("attack_success", float((logits.argmax(1) == self.target).double().mean()), len(y))
