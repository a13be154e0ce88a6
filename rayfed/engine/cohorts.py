"""The cohorts of rounds: what a sampler is told, and the weights of the clients that it draws."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from rayfed.core.errors import BadHook
from rayfed.core.ids import ClientIndex
from rayfed.core.records import Record
from rayfed.core.rng import generator
from rayfed.core.trees import is_counter
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.fleet import add_to
from rayfed.sampling.base import Cohort, Drawing, Uniform

_LOSS_BYTES = 4  # a reported loss is a float32

Losses = Callable[[int, Sequence[ClientIndex]], tuple[Mapping[ClientIndex, float], Mapping[str, int]]]
"""losses(round, clients): each client's loss of the model that it would download, and a download's bytes by field."""


class Cohorts:
    """Draws the cohorts of a simulation; `losses` asks clients for their losses."""

    def __init__(self, blueprint: Blueprint, population: Population, examples: np.ndarray, losses: Losses):
        self._blueprint, self._losses = blueprint, losses
        self.participants = participants_of(population)
        self.is_uniform = type(blueprint.sampler) is Uniform
        sizes = np.maximum(examples[: len(self.participants)].astype(float), 1.0)
        self._shares = sizes / sizes.sum()
        self._clients = population.clients
        self._last_losses = np.full(len(self.participants), np.nan)
        self._participated: set[int] = set()
        self._cohort: Cohort | None = None
        self._asked: set[int] = set()  # the clients that evaluated the model for the sampler in this round
        self._sizes: Mapping[str, int] = {}  # the bytes of one download by field
        self._seconds = 0.0  # of the evaluation

    def draw(self, round: int) -> tuple[ClientIndex, ...]:
        """Return the clients of a round, in ascending order.

        With `sample_without_replacement` no client takes part twice in ⌊N / cohort⌋ rounds, in which N mod cohort
        clients do not take part.
        """
        self._cohort, self._asked, self._seconds = None, set(), 0.0
        how, size, clients = self._blueprint, self._blueprint.cohort, len(self.participants)
        if size == clients:
            return tuple(self.participants)
        if how.algorithm.sample_without_replacement:
            cycle, turn = divmod(round - 1, clients // size)
            order = generator(how.seed, "cohorts", cycle=cycle).permutation(clients)
            return tuple(sorted(map(ClientIndex, order[turn * size : (turn + 1) * size].tolist())))
        drawing = Drawing(
            round=round,
            size=size,
            shares=self._shares.copy(),
            last_losses=self._last_losses.copy(),
            rng=generator(how.seed, "cohort", round=round),
            losses=partial(self._losses_now, round),
        )
        cohort = how.sampler.draw(drawing)
        self._cohort = self._checked(cohort, size)
        return tuple(ClientIndex(i) for i in self._cohort.clients)

    def weights(self, own: Callable[[ClientIndex], float], cohort: Sequence[ClientIndex]) -> dict[ClientIndex, float]:
        """Return the weights of a cohort in the aggregate, given the method's `own` weights before normalisation."""
        drawn = self._cohort
        if drawn is not None and drawn.equal:
            return dict.fromkeys(cohort, 1 / len(cohort))
        if drawn is not None and drawn.factors is not None:
            total = math.fsum(own(i) for i in self.participants)
            factors = dict(zip(drawn.clients, drawn.factors, strict=True))
            return {i: factors[i] * own(i) / total if total else 0.0 for i in cohort}
        return normalised_weights(own, cohort)

    @property
    def has_factors(self) -> bool:
        """Whether the weights of this round need not sum to 1."""
        return self._cohort is not None and self._cohort.factors is not None

    def update(self, record: Record, cohort: Sequence[ClientIndex]) -> None:
        """Note what the clients of a round have reported, and add the cost of sampling to its record."""
        if self.is_uniform:
            return
        self._participated.update(cohort)
        for score in record.scores:
            if (score.metric, score.split, score.point) == ("loss", "train", "trained") and not score.unseen:
                self._last_losses[self._clients.place(score.client)] = score.value
        if not self._asked:
            return
        more = len(self._asked - set(cohort))  # clients of the cohort have downloaded the model already
        add_to(record.bytes_down, {name: size * more for name, size in self._sizes.items()})
        record.bytes_up["sampling loss"] = _LOSS_BYTES * len(self._asked)
        record.seconds["evaluate"] += self._seconds
        record.seconds["total"] += self._seconds

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps, as JSON; None for uniform sampling, which keeps nothing."""
        if self.is_uniform:
            return None
        losses = {str(i): float(loss) for i, loss in enumerate(self._last_losses) if np.isfinite(loss)}
        return {"participated": sorted(self._participated), "last_losses": losses}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._participated = set(state["participated"])
        self._last_losses[:] = np.nan
        for i, loss in state["last_losses"].items():
            self._last_losses[int(i)] = loss

    def _losses_now(self, round: int, clients: Sequence[int]) -> np.ndarray:
        began = time.perf_counter()
        asked = tuple(sorted({ClientIndex(i) for i in clients}))
        losses, self._sizes = self._losses(round, asked)
        self._asked.update(asked)
        self._seconds += time.perf_counter() - began
        return np.array([losses[ClientIndex(i)] for i in clients])

    def _checked(self, cohort: Cohort, size: int) -> Cohort:
        """Return a cohort with its clients in ascending order; raise BadHook if it is not valid."""
        name = f"{type(self._blueprint.sampler).__name__}.draw"
        clients = [int(i) for i in cohort.clients]
        if not 1 <= len(clients) <= size or len(set(clients)) < len(clients):
            raise BadHook(f"{name} returned {len(clients)} clients, expected 1 to {size} different ones")
        if unknown := {i for i in clients if i not in self.participants}:
            expected = f"positions from 0 to {len(self.participants) - 1}"
            raise BadHook(f"{name} returned client {min(unknown)}, expected {expected}")
        order = sorted(range(len(clients)), key=clients.__getitem__)
        factors = cohort.factors
        if factors is not None:
            if len(factors) != len(clients) or not all(math.isfinite(f) and f >= 0 for f in factors):
                raise BadHook(f"{name}: factors must be one finite non-negative number per client")
            factors = [float(factors[position]) for position in order]
        if (factors is not None or cohort.equal) and not self._blueprint.sampler.reweights:
            raise BadHook(f"{name} returned weights; the class must declare reweights = True")
        return Cohort([clients[position] for position in order], factors, cohort.equal)


def participants_of(population: Population) -> Sequence[ClientIndex]:
    """Return the positions of all clients that take part in training."""
    return range(len(population.clients) - population.unseen_clients)  # type: ignore[return-value]


def normalised_weights(own: Callable[[ClientIndex], float], cohort: Sequence[ClientIndex]) -> dict[ClientIndex, float]:
    """Return the `own` weights of a cohort, divided by their sum; all are 0 where they sum to 0."""
    weights = {i: own(i) for i in cohort}
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()} if total else weights


def completed(total: ExactSum, trees: Sequence[Any], rule: Callable[[Tensor, Sequence[Any], str], Tensor]) -> ExactSum:
    """Return a sum of averaged fields with every tensor completed from `trees`, payloads that the server has sent.

    `rule(value, sent, name)` returns the completed value of a leaf, given the leaf of each of `trees`, None where there
    is none of this shape. Counters keep their maximum.
    """

    def walk(value: Any, sent: Sequence[Any], name: str) -> Any:
        if isinstance(value, Mapping):
            below = [tree if isinstance(tree, Mapping) else {} for tree in sent]
            return {key: walk(one, [tree.get(key) for tree in below], key) for key, one in value.items()}
        alike = [tree if isinstance(tree, Tensor) and tree.shape == value.shape else None for tree in sent]
        return value if is_counter(value) else rule(value, alike, name)

    value = walk(total.value, trees, "")
    return ExactSum(value, total.dtypes, equal=total.equal)
