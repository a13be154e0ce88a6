"""The data that a host holds, of its clients and some of the server's test sets, and the scores of models on them."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rayfed.algorithm import Algorithm, Context
from rayfed.core.records import Score
from rayfed.core.task import Task
from rayfed.data.population import Examples, Population
from rayfed.engine.device_data import Normalise, Part
from rayfed.engine.metric_collection import CollectedRepresentations, DueMetrics, Gradients, domain_gradients
from rayfed.engine.scoring import ScoredPart, score
from rayfed.engine.streamed import fits

PARTS = ("train", "val", "test")


class Scored(NamedTuple):
    """The scores of one host, or of all, and the representations collected for the metrics that the server computes."""

    scores: Sequence[Score]
    collected: Sequence[CollectedRepresentations]

    @classmethod
    def together(cls, parts: Sequence["Scored"]) -> "Scored":
        """Join `parts`, in their order."""
        return cls(
            [score for part in parts for score in part.scores], [item for part in parts for item in part.collected]
        )


class HostData:
    """The parts of clients' data by client and split, and test sets, on one device.

    The arguments are those of `Host`; `room` is the number of bytes that the inputs may take on the device.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        population: Population,
        clients: Sequence[int],
        tests: Sequence[int],
        *,
        seed: int,
        room: float = math.inf,
    ):
        self.algorithm, self.seed = algorithm, seed
        normalise = Normalise(population, task.device, channels_last=task.channels_last)
        self.numbers = {i: population.clients[i].id for i in clients}
        self.domains = {i: population.clients[i].domain for i in clients}
        by_client = {i: {name: getattr(population.clients[i], name) for name in PARTS} for i in clients}
        test_sets = [population.tests[k] for k in tests]
        examples = [part for parts in by_client.values() for part in parts.values()]
        data_on_device = fits([*examples, *(test.examples for test in test_sets)], room)

        def make_part(examples: Examples) -> Part:
            return Part(examples, task.device, normalise, data_on_device=data_on_device)

        self.parts = {i: {name: make_part(part) for name, part in parts.items()} for i, parts in by_client.items()}
        self.tests = [(test, make_part(test.examples)) for test in test_sets]

    def score_client(
        self, ctx: Context, client: int, model: Any, point: str, splits: Sequence[str], due: DueMetrics
    ) -> Scored:
        """Score one model on those `splits` of a client that have examples.

        The splits of one client share batches with each other and never with another client's: the floating-point
        rounding of a row depends on the size of its batch, and which clients share a host is a matter of placement.
        """
        parts = self._client_parts(client, splits, point)
        fitted = self._client_parts(client, sorted(due.fitted - set(splits)), point) if parts else {}
        return self._score(ctx, model, parts, due, fitted, unseen=client >= ctx.task.num_clients)

    def _client_parts(self, client: int, splits: Sequence[str], point: str) -> dict[ScoredPart, Part]:
        parts = {split: self.parts[client][split] for split in splits if len(self.parts[client][split])}
        number, domain = self.numbers[client], self.domains[client]
        return {
            ScoredPart(client=number, domain=domain, split=split, point=point): part for split, part in parts.items()
        }

    def score_tests(self, ctx: Context, model: Any, due: DueMetrics) -> list[Scored]:
        """Score the server's model on each test set that belongs to no client."""
        parts = [{ScoredPart(domain=test.domain, split=test.split, point="global"): part} for test, part in self.tests]
        return [self._score(ctx, model, part, due) for part in parts]

    def gradients(self, ctx: Context, ids: Sequence[int], model: Any, splits: Collection[str]) -> list[Gradients]:
        """Return the gradients of a model on these splits of the clients `ids` and of the test sets, by domain."""
        of_clients = [(self.domains[i], name, part) for i in ids for name, part in self.parts[i].items()]
        of_tests = [(test.domain, test.split, part) for test, part in self.tests]
        return domain_gradients(ctx, model, [item for item in (*of_clients, *of_tests) if item[1] in splits])

    def _score(
        self,
        ctx: Context,
        model: Any,
        parts: Mapping[ScoredPart, Part],
        due: DueMetrics,
        fitted: Mapping[ScoredPart, Part] | None = None,
        *,
        unseen: bool = False,
    ) -> Scored:
        """Score one model on `parts`, none of which may be empty.

        From `fitted` only representations are collected: scoring it would change the batches of the others.
        """
        values = score(self.algorithm, ctx, model, list(parts.values()), due.predictions)
        scores, collected = [], []
        for (scored, part), of_part in zip(parts.items(), values, strict=True):
            scores += [scored.score(value, unseen=unseen) for value in of_part]
            collected += due.collect(self.algorithm, ctx, model, part, self.seed, scored)
        for scored, part in (fitted or {}).items():
            collected += due.collect(self.algorithm, ctx, model, part, self.seed, scored)
        return Scored(scores, collected)
