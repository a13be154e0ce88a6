"""A host: holds some of the clients, their data and their state, and runs them. Knows neither Ray nor any method."""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rayfed.algorithm import Algorithm, ClientData, Context, Reply, State
from rayfed.augment.base import Augment
from rayfed.core.errors import Diverged
from rayfed.core.records import Score
from rayfed.core.rng import seed_torch
from rayfed.data.population import Population
from rayfed.engine.allocator import keep_freed_memory
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device_data import Augmented
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host_data import Holding, Scored
from rayfed.engine.metric_collection import NO_METRICS, CollectedRepresentations, DueMetrics, Gradients
from rayfed.engine.purity import untouched
from rayfed.engine.scoring import ScoredPart
from rayfed.engine.serialization import bytes_by_field
from rayfed.engine.streamed import room_for
from rayfed.engine.training import Job, Trained, train
from rayfed.metrics.base import Value


class Answer(NamedTuple):
    """What a host returns from an exchange. `total` is the `ExactSum` of the averaged fields, empty where
    the server weighs the replies first."""

    total: Any
    replies: list[Reply]
    metrics: list[Score]  # of training: metrics of it, and means over steps of what the algorithm reports
    bytes_up: dict[str, int]
    scores: list[Score]
    collected: list[CollectedRepresentations]
    seconds: float  # in all
    seconds_scoring: float  # of them, on scores and metrics


class Host:
    """Some clients on one device.

    Args:
        ctx: the context common to all hooks; its task lies on this host's device.
        clients: the clients that live here, by their places in the population.
        tests: the test sets of the server that are scored here, by their places.
        vmap_clients: how many of them train at once (1: one after the other; more: `torch.vmap`).
        drop_last: whether an epoch leaves out the examples that do not fill a batch.
        augment: what is done to training batches.
        room: bytes that the inputs of all of them may take on the device; where they take more, they stay where they
            are and are read batch by batch, which changes no result.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        ctx: Context,
        population: Population,
        clients: Sequence[int],
        tests: Sequence[int],
        *,
        vmap_clients: int,
        drop_last: bool,
        seed: int,
        augment: Augment | None = None,
        room: float = math.inf,
    ):
        self.algorithm, self.ctx, self.vmap_clients, self.drop_last, self.seed = (
            algorithm,
            ctx,
            vmap_clients,
            drop_last,
            seed,
        )
        self.augment = augment
        self.holding = Holding(algorithm, ctx.task, population, clients, tests, seed=seed, room=room)
        self.states: dict[int, State] = {}
        self._before: dict[int, Any] = {}  # clients' models before the round, where a metric wants them
        self._waiting: list[tuple[int, State]] = []  # averaged fields, until the server has weighed the replies

    @classmethod
    def of(
        cls,
        blueprint: Blueprint,
        population: Population,
        device: str | torch.device,
        clients: Sequence[int],
        tests: Sequence[int],
        *,
        share: float,
    ) -> "Host":
        """For a process of its own, which this prepares; the host may take `share` of the device's memory."""
        torch.set_num_threads(blueprint.threads)
        keep_freed_memory()
        return cls(
            blueprint.algorithm,
            blueprint.context(population, device),
            population,
            clients,
            tests,
            vmap_clients=blueprint.vmap_clients,
            drop_last=blueprint.drop_last,
            seed=blueprint.seed,
            augment=blueprint.augment,
            room=room_for(blueprint.data_on_device, device, share),
        )

    def exchange(
        self,
        ids: Sequence[int],
        down: State,
        own: Mapping[int, State],
        weights: Mapping[int, float],
        now: Mapping[str, Any],
        score_trained: Sequence[str] = (),
        measures: DueMetrics = NO_METRICS,
    ) -> Answer:
        """Trains the clients `ids` and returns their replies, with the averaged fields already summed by `weights`.

        `own` holds the fields sent to single clients, `now` the time (stage, round, trip, cohort), `score_trained` the
        splits on which the locally trained models are scored, `measures` the further metrics that are due.
        """
        began, scoring = time.perf_counter(), 0.0
        down = self.ctx.task.layout(down)
        replies, metrics, scored = [], [], []
        sizes: dict[str, int] = {}
        total, self._waiting = ExactSum(), []
        for ctx, client, received, trained in self._trained(ids, down, own, now):
            state = self.states[client]
            seed_torch(self.seed, "finish", ctx.stage, ctx.round, ctx.trip, client)
            with untouched(f"{type(self.algorithm).__name__}.finish", client=state, down=received):
                self.states[client], up = self.algorithm.finish(ctx, trained.work, state, received, ctx.data)
            if measures.training and ctx.trip == 0:
                self._before[client] = self.algorithm.downloaded_model(ctx, state, received)
            if score_trained or (measures.training and measures.last):
                self._synchronise()
                since = time.perf_counter()
                model = self.algorithm.trained_model(ctx, trained.work, self.states[client], received)
                scored.append(self.holding.scored(ctx, client, model, "trained", score_trained, measures))
                if measures.training:
                    values = measures.training_values(ctx, self._before.pop(client), model)
                    metrics += [self._training_part(client).score(value) for value in values]
                scoring += time.perf_counter() - since
            for field, size in bytes_by_field(up).items():
                sizes[field] = sizes.get(field, 0) + size
            summed = {name: up[name] for name in self.algorithm.averaged if name in up}
            if self.algorithm.server_side_weighting:
                self._waiting.append((client, summed))
            else:
                total.add(summed, weights[client])
            sent = {name: value for name, value in up.items() if name not in summed}
            replies.append(Reply(client, ctx.examples, sent))
            values = [Value(name, value, ctx.examples) for name, value in trained.metrics.items()]
            metrics += [self._training_part(client).score(value) for value in values]
        self._synchronise()
        seconds = time.perf_counter() - began
        return Answer(total, replies, metrics, sizes, *Scored.together(scored), seconds, scoring)

    def weigh(self, weights: Mapping[int, float]) -> ExactSum:
        """The averaged fields of the last exchange, summed with the weights that the server has found."""
        total = ExactSum()
        for client, summed in self._waiting:
            total.add(summed, weights[client])
        self._waiting = []
        return total

    def score_downloads(
        self,
        ids: Sequence[int],
        down: State,
        own: Mapping[int, State],
        now: Mapping[str, Any],
        points: Sequence[str],
        splits: Sequence[str],
        adapt: int,
        measures: DueMetrics = NO_METRICS,
    ) -> Scored:
        """Scores the clients' models on their own data: as downloaded, or adapted by `adapt` epochs more."""
        down, scored = self.ctx.task.layout(down), []
        for client in ids if "downloaded" in points else ():
            ctx, received = self._context(client, now), down | self.ctx.task.layout(own.get(client, {}))
            model = self.algorithm.downloaded_model(ctx, self._state(ctx), received)
            scored.append(self.holding.scored(ctx, client, model, "downloaded", splits, measures))
        if "adapted" in points:
            now = {**now, "stage": "final", "local": self.ctx.local._replace(epochs=adapt, steps=None)}
            for ctx, client, received, trained in self._trained(ids, down, own, now):
                model = self.algorithm.trained_model(ctx, trained.work, self.states[client], received)
                scored.append(self.holding.scored(ctx, client, model, "adapted", splits, measures))
        return Scored.together(scored)

    def score_global(
        self,
        ids: Sequence[int],
        model: Any,
        now: Mapping[str, Any],
        splits: Sequence[str],
        measures: DueMetrics = NO_METRICS,
    ) -> Scored:
        """Scores the server's model on the clients' data, and on the test sets that nobody holds."""
        ctx, model = self.ctx.at(**now), self.ctx.task.layout(model)
        found = [self.holding.scored(ctx, client, model, "global", splits, measures) for client in ids]
        return Scored.together([*found, *self.holding.scored_tests(ctx, model, measures)])

    def gradients(
        self, ids: Sequence[int], model: Any, now: Mapping[str, Any], splits: Collection[str]
    ) -> list[Gradients]:
        """The gradients of the server's model on these splits of the clients' data and on test sets, by domain."""
        return self.holding.gradients(self.ctx.at(**now), ids, self.ctx.task.layout(model), splits)

    def save(self) -> dict[int, State]:
        """The state of every client that has been asked for so far."""
        return self.states

    def load(self, states: Mapping[int, State]) -> None:
        self.states = {i: self.ctx.task.layout(states[i]) for i in states if i in self.holding.parts}

    def _trained(self, ids: Sequence[int], down: State, own: Mapping[int, State], now: Mapping[str, Any]) -> Iterator:
        """Trains `ids` in blocks of `vmap_clients`; yields (context, client, down, trained) one client after the other."""
        for first in range(0, len(ids), self.vmap_clients):
            block, jobs, received = ids[first : first + self.vmap_clients], [], []
            for client in block:
                ctx, mine = self._context(client, now), down | self.ctx.task.layout(own.get(client, {}))
                seed_torch(self.seed, "start", ctx.stage, ctx.round, ctx.trip, client)
                work = self.algorithm.start(ctx, self._state(ctx), mine)
                jobs.append(Job(client, self.holding.parts[client]["train"], work, ctx))
                received.append(mine)
            phases = self.algorithm.phases(jobs[0].ctx)
            with untouched(f"{type(self.algorithm).__name__}.step", down=received[0], client=self._state(jobs[0].ctx)):
                how: dict[str, Any] = {"seed": self.seed, "drop_last": self.drop_last, "augment": self.augment}
                done = train(self.algorithm, jobs, received[0], phases, **how)
            for job, mine, trained in zip(jobs, received, done, strict=True):
                self._finite(job, trained)
                yield job.ctx, job.client, mine, trained

    def _training_part(self, client: int) -> ScoredPart:
        """Return the training data of a client, with its trained model."""
        number, domain = self.holding.numbers[client], self.holding.domains[client]
        return ScoredPart(client=number, domain=domain, split="train", point="trained")

    def _finite(self, job: Job, trained: Trained) -> None:
        for name, value in trained.metrics.items():
            if not math.isfinite(value):
                client = self.holding.numbers[job.client]
                raise Diverged(f"round {job.ctx.round}, client {client}: training {name} is {value}")

    def _context(self, client: int, now: Mapping[str, Any]) -> Context:
        parts = self.holding.parts[client]
        ctx = self.ctx.at(client=client, examples=len(parts["train"]), **now)
        augmented = None
        if self.augment is not None:
            key = (self.seed, "as trained", ctx.stage, ctx.round, ctx.trip, client)
            augmented = Augmented(parts["train"], self.augment, key)
        return ctx.at(data=ClientData(parts["train"], parts["val"], augmented))

    def _state(self, ctx: Context) -> State:
        if ctx.client not in self.states:
            seed_torch(self.seed, "join", ctx.client)
            self.states[ctx.client] = self.ctx.task.layout(self.algorithm.join(ctx))
        return self.states[ctx.client]

    def _synchronise(self) -> None:
        if self.ctx.task.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.task.device)
