"""The data that a host holds, its clients' and some of the server's test sets, and what models are worth on them."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rayfed.algorithm import Algorithm, Context
from rayfed.core.task import Task
from rayfed.data.population import Examples, Population
from rayfed.engine.device_data import Normalise, Part
from rayfed.engine.metric_collection import Caught, Gradients, Measures, Where, gradients_of
from rayfed.engine.scoring import Score, score
from rayfed.engine.streamed import fits

PARTS = ("train", "val", "test")


class Scored(NamedTuple):
    """What a host returns from scoring, or all hosts together."""

    scores: Sequence[Score]
    caught: Sequence[Caught]

    @classmethod
    def together(cls, found: Sequence["Scored"]) -> "Scored":
        return cls([score for one in found for score in one.scores], [item for one in found for item in one.caught])


class Holding:
    """Parts of clients' data by client and split, and test sets, on one device; see `Host` for the arguments."""

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
        own = {i: {name: getattr(population.clients[i], name) for name in PARTS} for i in clients}
        chosen = [population.tests[k] for k in tests]
        everything = [part for parts in own.values() for part in parts.values()] + [test.examples for test in chosen]
        data_on_device = fits(everything, room)

        def placed(examples: Examples) -> Part:
            return Part(examples, task.device, normalise, data_on_device=data_on_device)

        self.parts = {i: {name: placed(part) for name, part in parts.items()} for i, parts in own.items()}
        self.tests = [(test, placed(test.examples)) for test in chosen]

    def scored(
        self, ctx: Context, client: int, model: Any, point: str, splits: Sequence[str], measures: Measures
    ) -> Scored:
        """Of one model on the splits of a client that hold anything.

        These share batches with each other and with no other client's: a row's last bits depend on the size of its
        batch, and who lives here is a matter of placement.
        """
        own = self._places(client, splits, point)
        more = self._places(client, sorted(measures.fitted - set(splits)), point) if own else {}
        return self._measured(ctx, model, own, measures, more, unseen=client >= ctx.task.num_clients)

    def _places(self, client: int, splits: Sequence[str], point: str) -> dict[Where, Part]:
        parts = {split: self.parts[client][split] for split in splits if len(self.parts[client][split])}
        return {Where(self.numbers[client], self.domains[client], split, point): part for split, part in parts.items()}

    def scored_tests(self, ctx: Context, model: Any, measures: Measures) -> list[Scored]:
        """Of the server's model on each test set that nobody holds."""
        places = [{Where(-1, test.domain, test.split, "global"): part} for test, part in self.tests]
        return [self._measured(ctx, model, place, measures) for place in places]

    def gradients(self, ctx: Context, ids: Sequence[int], model: Any, splits: Collection[str]) -> list[Gradients]:
        """Of a model on these splits of the clients `ids` and on such test sets, by domain."""
        own = [(self.domains[i], name, part) for i in ids for name, part in self.parts[i].items()]
        tests = [(test.domain, test.split, part) for test, part in self.tests]
        return gradients_of(ctx, model, [found for found in (*own, *tests) if found[1] in splits])

    def _measured(
        self,
        ctx: Context,
        model: Any,
        parts: Mapping[Where, Part],
        measures: Measures,
        more: Mapping[Where, Part] | None = None,
        *,
        unseen: bool = False,
    ) -> Scored:
        """Of one model on `parts`, none of which is empty; of `more`, representations alone, since they are not
        scored and would change the batches of those that are."""
        made = score(self.algorithm, ctx, model, list(parts.values()), measures.predictions)
        scores, caught = [], []
        for (where, part), values in zip(parts.items(), made, strict=True):
            scores += [Score(*where, *value, unseen=unseen) for value in values]
            caught += measures.catch(self.algorithm, ctx, model, part, self.seed, where)
        for where, part in (more or {}).items():
            caught += measures.catch(self.algorithm, ctx, model, part, self.seed, where)
        return Scored(scores, caught)
