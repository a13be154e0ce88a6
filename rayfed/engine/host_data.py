"""The data that a host works on, of clients and the server's test sets, and the scores of models on them."""

import copy
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rayfed.algorithm import Algorithm, Context
from rayfed.core.ids import ClientIndex
from rayfed.core.least_recent import LeastRecent
from rayfed.core.task import Task
from rayfed.data.clients import SPLITS, Examples, MadeClients
from rayfed.data.lazy_rows import LazyRows
from rayfed.data.population import Population
from rayfed.engine.device_data import Normalise, Part, held_bytes
from rayfed.engine.held_out import divide, held_out_count
from rayfed.engine.metric_collection import DueMetrics, Gradients, domain_gradients
from rayfed.engine.requests import Scored
from rayfed.engine.scoring import score

_MOST_VIEWS = 1024
"""Clients whose parts are kept where these hold no inputs themselves: they take ten KB each, and are quickly made."""


class HostData:
    """The clients' data and the server's test sets, on one device, as far as they fit.

    What is on the device is a cache: the parts of a client are made when the client is run here, and those that have
    not been used for the longest time go when the inputs would take more than `room` bytes. On a CPU, inputs in memory
    are not copied. A client or test set that does not fit even alone is read batch by batch. None of this changes a
    result.

    Raises:
        UsageError: A file of the population is not on this machine, or differs.
    """

    def __init__(self, algorithm: Algorithm, task: Task, population: Population, *, seed: int, room: float = math.inf):
        self.algorithm, self.task, self.population, self.seed = algorithm, task, population, seed
        self._normalise = Normalise(population, task.device, channels_last=task.channels_last)
        self._room = room
        self._held = LeastRecent[tuple[str, int], dict[str, Part]](room)
        self._views = LeastRecent[tuple[str, int], dict[str, Part]](_MOST_VIEWS)
        files = {id(part.x.file): part.x for part in population.examples() if isinstance(part.x, LazyRows)}
        for rows in files.values():  # a file that is not on this machine is noticed before the first round
            rows[:1]

    def parts(self, client: int) -> dict[str, Part]:
        """Return the parts of a client's data by split, and what the algorithm holds out of its training part."""
        clients = self.population.clients

        def examples() -> dict[str, Examples]:
            of_client = clients[client]
            train, held_out = divide(of_client, self.algorithm.held_out_share, self.seed)
            parts = {"train": train, "val": of_client.val, "test": of_client.test}
            return parts | ({"held_out": held_out} if len(held_out) else {})

        is_made = isinstance(clients.source, MadeClients)
        copied = {*SPLITS, "held_out"} if is_made else {"train", "held_out"} if self.algorithm.held_out_share else set()
        whose = {
            "client": clients.id(client),
            "domain": clients.domain(client),
            "unseen": client >= self.task.num_clients,
        }
        return self._make("client", client, examples, whose, copied=copied)

    def training_examples(self, client: int) -> int:
        """Return the number of examples that a client trains on."""
        examples = int(self.population.clients.sizes[client, 0])
        return examples - held_out_count(examples, self.algorithm.held_out_share)

    def test(self, number: int) -> Part:
        """Return one of the server's test sets."""
        test = self.population.tests[number]
        return self._make("test", number, lambda: {test.split: test.examples}, {"domain": test.domain})[test.split]

    def _make(
        self,
        kind: str,
        number: int,
        make: Callable[[], Mapping[str, Examples]],
        whose: Mapping[str, Any],
        *,
        copied: Collection[str] = (),
    ) -> dict[str, Part]:
        """Return the parts of the examples that `make` returns, whose inputs in `copied` belong to nobody else."""
        key = kind, number
        if (made := self._held.get(key) or self._views.get(key)) is not None:
            return made
        device, examples = self.task.device, make()
        on_device = sum(part.x.nbytes for part in examples.values()) <= self._room
        sizes = {name: part.x.nbytes if name in copied else held_bytes(part, device) for name, part in examples.items()}
        held = sum(sizes.values()) if on_device else 0
        cache, size = (self._held, held) if held else (self._views, 1)
        cache.make_room(size)
        made = {
            name: Part(part, device, self._normalise, data_on_device=on_device, split=name, **whose)
            for name, part in examples.items()
        }
        cache.put(key, made, size)
        return made

    def score_client(
        self, ctx: Context, client: int, model: Any, point: str, splits: Collection[str], due: DueMetrics
    ) -> Scored:
        """Score one model on those `splits` of a client that have examples.

        The splits of one client share batches with each other and never with another client's: the floating-point
        rounding of a row depends on the size of its batch, and which clients share a host is a matter of placement.
        From the splits that a metric is only fitted to, representations are collected and nothing else: scoring them
        would change the batches of the others.
        """
        data = self.parts(client)
        parts = [data[split] for split in splits if len(data[split])]
        fitted = [data[split] for split in sorted(due.fitted.difference(splits))] if parts else []
        return self._score(ctx, model, point, parts, due, fitted)

    def score_test(
        self, ctx: Context, number: int, model: Any, due: DueMetrics, client: ClientIndex | None = None
    ) -> Scored:
        """Score the server's model, or the one that a client downloads, on a test set that belongs to no client."""
        part = self.test(number)
        if client is None:
            return self._score(ctx, model, "global", [part], due)
        part = copy.copy(part)
        part.client = self.population.clients.id(client)
        return self._score(ctx, model, "downloaded", [part], due)

    def gradients(
        self, ctx: Context, ids: Sequence[int], tests: Sequence[int], model: Any, splits: Collection[str]
    ) -> list[Gradients]:
        """Return the gradients of a model on these splits of clients `ids` and of some test sets, by domain."""
        of_clients = (part for i in ids for name, part in self.parts(i).items() if name in splits)
        of_tests = (self.test(k) for k in tests if self.population.tests[k].split in splits)
        return domain_gradients(ctx, model, itertools.chain(of_clients, of_tests))

    def _score(
        self,
        ctx: Context,
        model: Any,
        point: str,
        parts: Sequence[Part],
        due: DueMetrics,
        fitted: Sequence[Part] = (),
    ) -> Scored:
        scores = score(self.algorithm, ctx, model, point, parts, due.predictions, due.selection)
        collected = [due.collect(self.algorithm, ctx, model, point, part, self.seed) for part in (*parts, *fitted)]
        return Scored(scores, list(itertools.chain.from_iterable(collected)))
