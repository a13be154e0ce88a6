"""The local steps that every participant has taken, and what they have spent of the privacy of its records."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rayfed.algorithm import Context, Exchange, Privacy
from rayfed.core.round_record import Record
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.scoring import as_score
from rayfed.engine.training import steps_of
from rayfed.metrics.base import Value

METRIC = "record_epsilon"
"""The name of ε for one record of a client, in the table `scores`."""


def note_privacy(record: Record, spent: Privacy) -> None:
    """Write the privacy that was spent into the record of a round."""
    record.epsilon = spent.epsilon
    record.privacy_unit = spent.unit
    record.delta = spent.delta
    record.accountant = spent.accountant
    record.neighbours = spent.neighbours


class StepsOfRecords:
    """Counts the steps on clients' records, where a method protects single records.

    Args:
        examples: The numbers of training examples of the clients.
    """

    def __init__(self, blueprint: Blueprint, population: Population, examples: np.ndarray):
        self._blueprint = blueprint
        self._clients = population.clients
        self._examples = examples
        self._steps = np.zeros(len(population.participants), np.int64)

    def add(self, exchange: Exchange, ctx: Context) -> None:
        """Count the steps of an exchange with the cohort of `ctx`."""
        if not exchange.draws_poisson:
            return
        blueprint = self._blueprint
        for client in ctx.cohort:
            local = blueprint.availability.local_work(ctx.local, blueprint.seed, ctx.moment, client)
            of_client = ctx.at(client=client, examples=int(self._examples[client]), local=local)
            self._steps[client] += steps_of(exchange, of_client, drop_last=blueprint.drop_last)

    def report(self, ctx: Context, record: Record) -> None:
        """Add what the cohort of `ctx` has spent to `record`, and the most of all clients where it has no other ε."""
        if not self._steps.any():
            return
        most = self._most(ctx)
        if most is None:
            return
        if record.epsilon is None:
            note_privacy(record, most)
        for client in ctx.cohort:
            spent = self._spent(ctx, client)
            assert spent is not None, "there is a guarantee for one of the clients"
            value = Value(METRIC, spent.epsilon, int(self._examples[client]), higher_is_better=False)
            whose = self._clients.id(client)
            domain = self._clients.domain(client)
            record.scores.append(as_score(value, split="train", point="trained", client=whose, domain=domain))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON; nothing where no steps are counted."""
        if not self._steps.any():
            return {}
        return {"steps_of_records": self._steps.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._steps = np.array(state.get("steps_of_records", np.zeros_like(self._steps)), np.int64)

    def _spent(self, ctx: Context, client: int) -> Privacy | None:
        of_client = ctx.at(client=client, examples=int(self._examples[client]))
        return self._blueprint.algorithm.privacy_of_record(of_client, int(self._steps[client]))

    def _most(self, ctx: Context) -> Privacy | None:
        """Return the largest ε of all participants; clients with as many records and steps have spent as much."""
        records = self._examples[: len(self._steps)]
        _, first = np.unique(np.stack([records, self._steps]), axis=1, return_index=True)
        spent = [self._spent(ctx, client) for client in first.tolist()]
        guaranteed = [one for one in spent if one is not None]
        return max(guaranteed, key=lambda one: one.epsilon, default=None)
