"""Attackers: clients that train on false data, or send something else than they should.

`share` of the participants, rounded up, are attackers, drawn by the seed, or `clients` names them. All other clients
are honest, and by default they alone are scored.

Attackers know what the honest clients of the round send: u_1 … u_h, after their compression. Methods that send more
than averaged fields send the rest of an attacker honestly.

    μ, σ: the mean and the standard deviation over the honest updates, by coordinate, with h in the denominator
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from rayfed.algorithm import Context, State
from rayfed.channel.updates import Updates, distances, flat_update, moved
from rayfed.core.options import option
from rayfed.core.rng import generator
from rayfed.core.task import Batch, InputSpec


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Base class of attacks. Derive your own from it and declare its options as fields."""

    name: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    poisons: ClassVar[bool] = False
    """Whether attackers train on other data, which `poisoned` returns."""
    sends_other: ClassVar[bool] = False
    """Whether an attacker changes its own update, by `altered`."""
    knows_others: ClassVar[bool] = False
    """Whether all attackers send one update, which `crafted` makes from those of the honest clients."""

    share: float = option(0.2, low=0, below=1, help="share of the participants that attack, rounded up")
    clients: list[int] | None = option(
        None, low=0, help="attackers by their number in the partition, in place of share"
    )
    scored: bool = option(False, help="score attackers, too, so that means are over all clients")

    def poisoned(self, ctx: Context, batch: Batch) -> Batch:
        """Return the training batch of an attacker."""
        return batch

    def altered(self, update: Tensor) -> Tensor:
        """Return what an attacker sends in place of its `update` [n]."""
        return update

    def crafted(self, honest: Updates, attackers: int) -> State:
        """Return the fields that every attacker of a cohort sends."""
        raise NotImplementedError

    def changed(self, sent: State, base: State) -> State:
        """Return the fields that an attacker sends in place of `sent`; see `altered`."""
        update, _ = flat_update(sent, base)
        return moved(sent, base, update, self.altered(update))


def drawn_attackers(attack: Attack, ids: Sequence[int], seed: int) -> frozenset[int]:
    """Return the places of the attackers among participants with these `ids`."""
    if attack.clients is not None:
        return frozenset(place for place, client in enumerate(ids) if client in attack.clients)
    count = math.ceil(attack.share * len(ids) - 1e-9)
    drawn = generator(seed, "attackers").choice(len(ids), count, replace=False)
    return frozenset(drawn.tolist())


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Attackers train with the class C − 1 − y in place of y, of C classes."""

    name: ClassVar[str] = "label_flip"
    reference: ClassVar[str] = "Fang et al. 2020, section 5"
    poisons: ClassVar[bool] = True

    def poisoned(self, ctx: Context, batch: Batch) -> Batch:
        if batch.y.ndim == 2:
            classes = batch.y.flip(1)
        else:
            classes = ctx.task.num_classes - 1 - batch.y
        return batch._replace(y=classes)


@dataclass(frozen=True, kw_only=True)
class Noise(Attack):
    """u + v, where v is Gaussian noise whose norm is about `scale` times that of u."""

    name: ClassVar[str] = "noise"
    reference: ClassVar[str] = "Blanchard et al. 2017, section 5 (Gaussian attack), added to the update"
    sends_other: ClassVar[bool] = True

    scale: float = option(10.0, above=0, help="norm of the noise over that of the update")

    def altered(self, update: Tensor) -> Tensor:
        std = self.scale * float(update.norm()) / math.sqrt(max(1, len(update)))
        return update + std * torch.randn(update.shape, dtype=update.dtype).to(update.device)


@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """−a u."""

    name: ClassVar[str] = "sign_flip"
    reference: ClassVar[str] = "Li et al. 2019 (RSA), section 5"
    sends_other: ClassVar[bool] = True

    factor: float = option(1.0, above=0, help="a, length of what is sent over that of the update")

    def altered(self, update: Tensor) -> Tensor:
        return -self.factor * update


@dataclass(frozen=True, kw_only=True)
class Scale(Attack):
    """a u, so that one client outweighs many."""

    name: ClassVar[str] = "scale"
    reference: ClassVar[str] = "Bagdasaryan et al. 2020, model replacement"
    sends_other: ClassVar[bool] = True

    factor: float = option(10.0, above=0, help="a, length of what is sent over that of the update")

    def altered(self, update: Tensor) -> Tensor:
        return self.factor * update


@dataclass(frozen=True, kw_only=True)
class Alie(Attack):
    """μ − z σ, which hides within the spread of honest updates.

    With n clients and f attackers, s = ⌊n/2 + 1⌋ − f honest clients are to be nearer to the attack than to μ, and
    z = Φ⁻¹((n − f − s) / (n − f)).
    """

    name: ClassVar[str] = "alie"
    reference: ClassVar[str] = "Baruch, Baruch and Goldberg 2019, Alg. 3 (A Little Is Enough)"
    knows_others: ClassVar[bool] = True

    z: float | None = option(None, low=0, help="z, standard deviations from the mean; null: the paper's")

    def crafted(self, honest: Updates, attackers: int) -> State:
        if self.z is None:
            z = alie_z(len(honest) + attackers, attackers)
        else:
            z = self.z
        return honest.each(lambda u: u.mean(0) - z * u.std(0, correction=0))


def alie_z(clients: int, attackers: int) -> float:
    """Return z_max of Alg. 3 for n `clients` of whom f attack; 0 where it would be negative or there is none."""
    honest = clients - attackers
    supporters = clients // 2 + 1 - attackers
    share = (honest - supporters) / honest
    if 0 < share < 1:
        return max(0.0, NormalDist().inv_cdf(share))
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Ipm(Attack):
    """−ε μ: its inner product with the mean of the honest updates is negative."""

    name: ClassVar[str] = "ipm"
    reference: ClassVar[str] = "Xie, Koyejo and Gupta 2020, Fall of Empires, Eq. (2)"
    knows_others: ClassVar[bool] = True

    epsilon: float = option(0.5, above=0, help="ε, length of what is sent over that of the mean")

    def crafted(self, honest: Updates, attackers: int) -> State:
        return honest.each(lambda u: -self.epsilon * u.mean(0))


@dataclass(frozen=True, kw_only=True)
class MinMax(Attack):
    """μ + γ p for the largest γ with which no honest update is farther away than two honest ones are from each other.

    p is −σ (`std`), −μ/‖μ‖ (`unit`) or −sign(μ) (`sign`). The paper searches γ by halving; here it is the root of a
    quadratic for each honest update.
    """

    name: ClassVar[str] = "minmax"
    reference: ClassVar[str] = "Shejwalkar and Houmansadr 2021, Eq. (8) (Min-Max)"
    knows_others: ClassVar[bool] = True

    direction: str = option("std", choices=("std", "unit", "sign"), help="p, direction in which updates are moved")

    def crafted(self, honest: Updates, attackers: int) -> State:
        factor = self.factor(_around(honest, self.direction), distances(honest.products()))
        return honest.each(lambda u: u.mean(0) + factor * _direction(u, self.direction))

    def factor(self, around: "Around", squared: Tensor) -> float:
        """Return γ, given the squared distances of the honest updates from each other [h, h]."""
        return float(_largest_roots(around.length, around.products, around.squares - squared.max()).min())


@dataclass(frozen=True, kw_only=True)
class MinSum(MinMax):
    """As `minmax`, but the sum of squared distances to all honest updates is at most that of an honest update.

    The largest sum of an honest update counts, as in the paper; in the authors' code it is the least.
    """

    name: ClassVar[str] = "minsum"
    reference: ClassVar[str] = "Shejwalkar and Houmansadr 2021, Eq. (9) (Min-Sum)"

    def factor(self, around: "Around", squared: Tensor) -> float:
        spare = around.squares.sum() - squared.sum(1).max()
        length = len(squared) * around.length
        return float(_largest_roots(length, around.products.sum(), spare))


class Around(NamedTuple):
    """How a direction p lies to the honest updates: ‖μ − u_i‖² and ⟨μ − u_i, p⟩ [h], and ‖p‖², all in float64."""

    squares: Tensor
    products: Tensor
    length: Tensor


def _around(honest: Updates, direction: str) -> Around:
    squares = torch.zeros(len(honest), dtype=torch.float64)
    products = torch.zeros_like(squares)
    length = squares.new_zeros(())
    for u in honest.columns():
        p = _direction(u, direction)
        apart = u.mean(0) - u
        squares += apart.square().sum(1).cpu()
        products += (apart @ p).cpu()
        length += (p @ p).cpu()
    return Around(squares, products, length)


def _direction(u: Tensor, direction: str) -> Tensor:
    """Return p [numbers] for the updates [h, numbers]; γ makes up for the length of p."""
    if direction == "std":
        return -u.std(0, correction=0)
    if direction == "sign":
        return -u.mean(0).sign()
    return -u.mean(0)


def _largest_roots(a: Tensor, half_b: Tensor, c: Tensor) -> Tensor:
    """Return the largest γ with aγ² + 2 half_b γ + c ≤ 0, where c ≤ 0; 0 for a = 0, as all honest updates agree."""
    if not a > 0:
        return torch.zeros(())
    return (((half_b.square() - a * c).clamp(min=0).sqrt() - half_b) / a).clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """A white square in the lower right corner of an image, with which a model is to see class `target`."""

    size: int
    target: int

    def fault(self, shape: Sequence[int], continuous: bool, num_classes: int) -> str:
        """Return the key at fault and why, if inputs of this shape have no place for it; "" if they have."""
        if len(shape) != 3 or not continuous:
            kind = " x ".join(map(str, shape)) or "single numbers"
            return f"size={self.size}: the trigger is put on images [channels, height, width], and inputs are {kind}"
        side = min(shape[1:])
        if self.size > side:
            return f"size={self.size}: the trigger is larger than an image of side {side}; give at most that"
        if self.target >= num_classes:
            return f"target={self.target}: there are {num_classes} classes, from 0 on"
        return ""

    def stamped(self, x: Tensor, inputs: InputSpec) -> Tensor:
        """Return images [n, channels, height, width], normalised as `inputs` says, with the square."""
        white = []
        for mean, std in zip(inputs.mean, inputs.std, strict=True):
            white.append((1 - mean) / std)
        stamped = x.clone()
        stamped[..., -self.size :, -self.size :] = torch.tensor(white).to(x).view(-1, 1, 1)
        return stamped


@dataclass(frozen=True, kw_only=True)
class Backdoor(Attack):
    """Attackers put a trigger on a part of each batch, label it as the target class, and send a u.

    The metric `attack_success` says how often a model sees the target class in images of other classes with the
    trigger.
    """

    name: ClassVar[str] = "backdoor"
    reference: ClassVar[str] = "Gu et al. 2017 (BadNets), the trigger; Bagdasaryan et al. 2020, in federated learning"
    poisons: ClassVar[bool] = True

    target: int = option(0, low=0, help="class that the trigger is to be seen as")
    size: int = option(3, low=1, help="side of the trigger in pixels")
    poison: float = option(0.5, above=0, high=1, help="share of each batch that gets the trigger")
    factor: float = option(1.0, above=0, help="a, length of what is sent over that of the update")

    @property
    def sends_other(self) -> bool:  # type: ignore[override]
        return self.factor != 1

    @property
    def trigger(self) -> Trigger:
        """The trigger."""
        return Trigger(size=self.size, target=self.target)

    def poisoned(self, ctx: Context, batch: Batch) -> Batch:
        count = math.ceil(self.poison * len(batch.y))
        stamped = self.trigger.stamped(batch.x[:count], ctx.task.inputs)
        labels = batch.y.clone()
        labels[:count] = self._label(labels)
        return Batch(torch.cat([stamped, batch.x[count:]]), labels)

    def altered(self, update: Tensor) -> Tensor:
        return self.factor * update

    def _label(self, labels: Tensor) -> Tensor:
        """Return the target class in the form of one of `labels`, which are classes or their probabilities."""
        target = torch.tensor(self.target, device=labels.device)
        if labels.ndim == 1:
            return target
        probabilities: Tensor = one_hot(target, labels.shape[1]).to(labels)
        return probabilities
