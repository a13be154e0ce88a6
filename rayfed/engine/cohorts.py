"""Which clients take part in a round, and which weight each has in the mean.

A sampler draws the clients. It may give them weights of its own.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rayfed.core.errors import BadHook
from rayfed.core.ids import ClientIndex
from rayfed.core.rng import generator
from rayfed.core.round_record import Record
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.evaluation import participants_of
from rayfed.engine.fleet import add_to
from rayfed.sampling.base import WITHOUT_REPLACEMENT, Cohort, Drawing, Uniform

_LOSS_BYTES = 4  # a reported loss is a float32

Losses = Callable[[int, Sequence[ClientIndex]], tuple[Mapping[ClientIndex, float], Mapping[str, int]]]
"""losses(round, clients): each client's loss of the model that it would download, and a download's bytes by field."""


class Cohorts:
    """Draws the cohorts of a simulation; `losses` asks clients for their losses."""

    def __init__(self, blueprint: Blueprint, population: Population, examples: np.ndarray, losses: Losses):
        self._blueprint = blueprint
        self._losses = losses
        self.participants = participants_of(population)
        self.is_uniform = type(blueprint.sampler) is Uniform
        of_participants = examples[: len(self.participants)]
        sizes = np.maximum(of_participants.astype(float), 1.0)
        self._shares = sizes / sizes.sum()
        self._clients = population.clients
        self._last_losses = np.full(len(self.participants), np.nan)
        self._participated: set[int] = set()
        self._cohort: Cohort | None = None
        self._asked: set[int] = set()  # the clients that evaluated the model for the sampler in this round
        self._sizes: Mapping[str, int] = {}  # the bytes of one download by field
        self._seconds = 0.0  # of the evaluation

    def draw(self, round: int) -> tuple[ClientIndex, ...]:
        """Return the clients of a round, in ascending order."""
        self._cohort = None
        self._asked = set()
        self._seconds = 0.0
        blueprint = self._blueprint
        size = self._blueprint.cohort
        clients = len(self.participants)
        if size == clients:
            return tuple(self.participants)
        rng = generator(blueprint.seed, "cohort", round=round)
        drawing = Drawing(
            round=round,
            size=size,
            shares=self._shares.copy(),
            last_losses=self._last_losses.copy(),
            rng=rng,
            rng_of_cycle=lambda rounds: generator(blueprint.seed, "cohorts", cycle=(round - 1) // rounds),
            losses=partial(self._losses_now, round),
        )
        sampler = blueprint.sampler
        if blueprint.algorithm.traits.sample_without_replacement:
            sampler = WITHOUT_REPLACEMENT
        most = size
        if sampler.varies:
            most = clients
        self._cohort = self._checked(sampler.draw(drawing), most)
        return tuple(map(ClientIndex, self._cohort.clients))

    def weights(self, own: Callable[[ClientIndex], float], cohort: Sequence[ClientIndex]) -> dict[ClientIndex, float]:
        """Return the weights of a cohort in the aggregate, given the method's `own` weights before normalisation."""
        drawn = self._cohort
        if drawn is not None and drawn.stand_in:
            return dict.fromkeys(cohort, 0.0)
        if drawn is not None and drawn.equal:
            return dict.fromkeys(cohort, 1 / len(cohort))
        if drawn is not None and drawn.factors is not None:
            total = math.fsum(map(own, self.participants))
            factors = dict(zip(drawn.clients, drawn.factors, strict=True))
            if not total:
                return dict.fromkeys(cohort, 0.0)
            return {i: factors[i] * own(i) / total for i in cohort}
        return normalised_weights(own, cohort)

    @property
    def has_factors(self) -> bool:
        """Whether the weights of this round need not sum to 1."""
        return self._cohort is not None and self._cohort.factors is not None

    @property
    def is_empty(self) -> bool:
        """Whether nobody was drawn for this round, so that a client stands in whose reply has no weight."""
        return self._cohort is not None and self._cohort.stand_in

    def update(self, record: Record, cohort: Sequence[ClientIndex]) -> None:
        """Note what the clients of a round have reported, and add the cost of sampling to its record."""
        if self.is_uniform:
            return
        self._participated.update(cohort)
        for score in record.scores:
            is_training_loss = (score.metric, score.split, score.point) == ("loss", "train", "trained")
            if is_training_loss and not score.unseen:
                self._last_losses[self._clients.place(score.client)] = score.value
        if not self._asked:
            return
        more = len(self._asked - set(cohort))  # clients of the cohort have downloaded the model already
        sizes = {}
        for name, size in self._sizes.items():
            sizes[name] = size * more
        add_to(record.bytes_down, sizes)
        record.bytes_up["sampling loss"] = _LOSS_BYTES * len(self._asked)
        record.seconds["evaluate"] += self._seconds
        record.seconds["total"] += self._seconds

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps, as JSON; None for uniform sampling, which keeps nothing."""
        if self.is_uniform:
            return None
        losses = {}
        for i, loss in enumerate(self._last_losses):
            if np.isfinite(loss):
                losses[str(i)] = float(loss)
        return {"participated": sorted(self._participated), "last_losses": losses}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._participated = set(state["participated"])
        self._last_losses[:] = np.nan
        for i, loss in state["last_losses"].items():
            self._last_losses[int(i)] = loss

    def _losses_now(self, round: int, clients: Sequence[int]) -> np.ndarray:
        began = time.perf_counter()
        asked = tuple(sorted(set(map(ClientIndex, clients))))
        losses, self._sizes = self._losses(round, asked)
        self._asked.update(asked)
        self._seconds += time.perf_counter() - began
        return np.array([losses[ClientIndex(i)] for i in clients])

    def _checked(self, cohort: Cohort, size: int) -> Cohort:
        """Return a cohort with its clients in ascending order; raise BadHook if it is not valid."""
        name = f"{type(self._blueprint.sampler).__name__}.draw"
        clients = list(map(int, cohort.clients))
        are_different = len(set(clients)) == len(clients)
        if not 1 <= len(clients) <= size or not are_different:
            raise BadHook(f"{name} returned {len(clients)} clients, expected 1 to {size} different ones")
        for client in sorted(clients):
            if client not in self.participants:
                expected = f"positions from 0 to {len(self.participants) - 1}"
                raise BadHook(f"{name} returned client {client}, expected {expected}")
        order = sorted(range(len(clients)), key=clients.__getitem__)
        factors = cohort.factors
        if factors is not None:
            are_weights = all(math.isfinite(f) and f >= 0 for f in factors)
            if len(factors) != len(clients) or not are_weights:
                raise BadHook(f"{name}: factors must be one finite non-negative number per client")
            factors = [float(factors[position]) for position in order]
        if (factors is not None or cohort.equal) and not self._blueprint.sampler.reweights:
            raise BadHook(f"{name} returned weights; the class must declare reweights = True")
        return Cohort([clients[position] for position in order], factors, cohort.equal, cohort.stand_in)


def normalised_weights(own: Callable[[ClientIndex], float], cohort: Sequence[ClientIndex]) -> dict[ClientIndex, float]:
    """Return the `own` weights of a cohort, divided by their sum; all are 0 where they sum to 0."""
    weights = {i: own(i) for i in cohort}
    total = math.fsum(weights.values())
    if total:
        return {i: weight / total for i, weight in weights.items()}
    return weights
