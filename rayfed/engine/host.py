"""A host: holds some of the clients, with their data and state, and runs them. It knows neither Ray nor any method."""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from rayfed.algorithm import Algorithm, ClientData, Context, Exchange, Reply, State
from rayfed.augment.base import Augment
from rayfed.core.errors import Diverged
from rayfed.core.ids import ClientIndex
from rayfed.core.rng import seed_torch
from rayfed.data.population import Population
from rayfed.engine.allocator import keep_freed_memory
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device_data import Augmented
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host_data import HostData, Scored
from rayfed.engine.metric_collection import Gradients
from rayfed.engine.purity import untouched
from rayfed.engine.requests import ExchangeRequest, ExchangeResult, Request, ScoreRequest
from rayfed.engine.scoring import ScoredPart
from rayfed.engine.serialization import bytes_by_field
from rayfed.engine.streamed import room_for
from rayfed.engine.training import Job, Trained, train
from rayfed.metrics.base import Value


class TrainedClient(NamedTuple):
    """A client after local training: its context, what it received, and what training left."""

    ctx: Context
    client: ClientIndex
    down: State
    trained: Trained


class Host:
    """Some of the clients, on one device.

    Args:
        ctx: The context common to all hooks; its task lies on this host's device.
        clients: The clients that live here, by their index in the population.
        tests: The server's test sets that are scored here, by their position.
        vmap_clients: The number of clients to train at once with `torch.vmap`; 1 trains one after the other.
        drop_last: Whether an epoch leaves out the examples that do not fill a batch.
        augment: The augmentation of training batches.
        room: The bytes that the inputs of all clients may take on the device. Larger data stay where they are and are
            read batch by batch, which changes no result.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        ctx: Context,
        population: Population,
        clients: Sequence[ClientIndex],
        tests: Sequence[int],
        *,
        vmap_clients: int,
        drop_last: bool,
        seed: int,
        augment: Augment | None = None,
        room: float = math.inf,
    ):
        self.algorithm, self.ctx, self.seed = algorithm, ctx, seed
        self.vmap_clients, self.drop_last, self.augment = vmap_clients, drop_last, augment
        self.data = HostData(algorithm, ctx.task, population, clients, tests, seed=seed, room=room)
        self.states: dict[ClientIndex, State] = {}
        self._models_before: dict[ClientIndex, Any] = {}  # of this round, where a metric needs them
        self._unweighted: list[tuple[ClientIndex, State]] = []  # averaged fields, until the server sends the weights

    @classmethod
    def of(
        cls,
        blueprint: Blueprint,
        population: Population,
        device: str | torch.device,
        clients: Sequence[ClientIndex],
        tests: Sequence[int],
        *,
        share: float,
    ) -> "Host":
        """Return a host for this process, and prepare the process; the host may use `share` of the device's memory."""
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

    def exchange(self, request: ExchangeRequest, down: State, unicast: Mapping[ClientIndex, State]) -> ExchangeResult:
        """Train the clients of `request` and return their replies, with the averaged fields already summed.

        Args:
            down: What every client receives.
            unicast: The further fields of the clients that receive some.
        """
        began, scoring = time.perf_counter(), 0.0
        exchange = self.algorithm.exchanges(request.moment.stage)[request.moment.exchange]
        due = request.metrics
        replies, metrics, scored = [], [], []
        bytes_up: dict[str, int] = {}
        total, self._unweighted = ExactSum(), []
        for ctx, client, received, trained in self._trained(exchange, request, down, unicast):
            state = self.states[client]
            seed_torch(self.seed, "finish", request.moment, client=client)
            with untouched(f"{type(exchange).__name__}.finish", client=state, down=received):
                self.states[client], up = exchange.finish(ctx, trained.work, state, received, ctx.data)
            if due.training and ctx.exchange == 0:
                self._models_before[client] = self.algorithm.downloaded_model(ctx, state, received)
            if request.score_splits or (due.training and due.last):
                self._synchronise()
                since = time.perf_counter()
                model = self.algorithm.trained_model(ctx, trained.work, self.states[client], received)
                scored.append(self.data.score_client(ctx, client, model, "trained", request.score_splits, due))
                if due.training:
                    values = due.training_values(ctx, self._models_before.pop(client), model)
                    metrics += [self._training_part(client).score(value) for value in values]
                scoring += time.perf_counter() - since
            for field, size in bytes_by_field(up).items():
                bytes_up[field] = bytes_up.get(field, 0) + size
            averaged = {name: up[name] for name in exchange.averaged if name in up}
            if exchange.server_side_weighting:
                self._unweighted.append((client, averaged))
            else:
                total.add(averaged, request.weights[client])
            replies.append(Reply(client, ctx.examples, {name: up[name] for name in up if name not in averaged}))
            means = [Value(name, value, ctx.examples) for name, value in trained.metrics.items()]
            metrics += [self._training_part(client).score(value) for value in means]
        self._synchronise()
        scores = Scored.together(scored)
        return ExchangeResult(
            total=total,
            replies=replies,
            metrics=metrics,
            bytes_up=bytes_up,
            scores=scores.scores,
            collected=scores.collected,
            seconds=time.perf_counter() - began,
            seconds_scoring=scoring,
        )

    def weigh(self, weights: Mapping[ClientIndex, float]) -> ExactSum:
        """Return the averaged fields of the last exchange, summed with weights that the server computed."""
        total = ExactSum()
        for client, averaged in self._unweighted:
            total.add(averaged, weights[client])
        self._unweighted = []
        return total

    def score_downloads(self, request: ScoreRequest, down: State, unicast: Mapping[ClientIndex, State]) -> Scored:
        """Score the clients' models on their own data, as downloaded or after adaptation."""
        scored = []
        received = self.ctx.task.to_memory_format(down)
        for client in request.clients if "downloaded" in request.points else ():
            ctx = self._context(client, request)
            fields = received | self.ctx.task.to_memory_format(unicast.get(client, {}))
            model = self.algorithm.downloaded_model(ctx, self._state(ctx), fields)
            scored.append(self.data.score_client(ctx, client, model, "downloaded", request.splits, request.metrics))
        if "adapted" in request.points:
            epochs = self.ctx.local._replace(epochs=request.adapt_epochs, steps=None)
            adapting = self._trained(self.algorithm.adaptation, request, down, unicast, stage="final", local=epochs)
            for ctx, client, fields, trained in adapting:
                model = self.algorithm.trained_model(ctx, trained.work, self.states[client], fields)
                scored.append(self.data.score_client(ctx, client, model, "adapted", request.splits, request.metrics))
        return Scored.together(scored)

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        """Score the server's model on the clients' data, and on the server's test sets of this host."""
        ctx, model = self.ctx.at(request.moment, cohort=request.cohort), self.ctx.task.to_memory_format(model)
        splits, due = request.splits, request.metrics
        scored = [self.data.score_client(ctx, client, model, "global", splits, due) for client in request.clients]
        return Scored.together([*scored, *self.data.score_tests(ctx, model, due)])

    def gradients(self, request: Request, model: Any, splits: Collection[str]) -> list[Gradients]:
        """Return the gradients of the server's model on `splits` of the clients' data and test sets, by domain."""
        ctx = self.ctx.at(request.moment, cohort=request.cohort)
        return self.data.gradients(ctx, request.clients, self.ctx.task.to_memory_format(model), splits)

    def save(self) -> dict[ClientIndex, State]:
        """Return the state of every client that has been asked for so far."""
        return self.states

    def load(self, states: Mapping[ClientIndex, State]) -> None:
        """Take over the states of the clients that live here."""
        self.states = {i: self.ctx.task.to_memory_format(states[i]) for i in states if i in self.data.parts}

    def _trained(
        self,
        exchange: Exchange,
        request: Request,
        down: State,
        unicast: Mapping[ClientIndex, State],
        **changes: Any,
    ) -> Iterator[TrainedClient]:
        """Train the clients of `request` in blocks of `vmap_clients`; `changes` are those of their contexts."""
        to_memory_format = self.ctx.task.to_memory_format
        common = to_memory_format(down)
        for first in range(0, len(request.clients), self.vmap_clients):
            jobs, received = [], []
            for client in request.clients[first : first + self.vmap_clients]:
                ctx = self._context(client, request, **changes)
                fields = common | to_memory_format(unicast.get(client, {}))
                seed_torch(self.seed, "start", ctx.moment, client=client)
                work = exchange.start(ctx, self._state(ctx), fields)
                jobs.append(Job(client, self.data.parts[client]["train"], work, ctx))
                received.append(fields)
            phases = exchange.phases(jobs[0].ctx)
            with untouched(f"{type(exchange).__name__}.step", down=received[0], client=self._state(jobs[0].ctx)):
                results = train(
                    exchange,
                    jobs,
                    received[0],
                    phases,
                    seed=self.seed,
                    drop_last=self.drop_last,
                    augment=self.augment,
                )
            for job, fields, trained in zip(jobs, received, results, strict=True):
                self._check_finite(job, trained)
                yield TrainedClient(job.ctx, job.client, fields, trained)

    def _training_part(self, client: ClientIndex) -> ScoredPart:
        """Return the training data of a client, with its trained model."""
        number, domain = self.data.numbers[client], self.data.domains[client]
        return ScoredPart(client=number, domain=domain, split="train", point="trained")

    def _check_finite(self, job: Job, trained: Trained) -> None:
        for name, value in trained.metrics.items():
            if not math.isfinite(value):
                client = self.data.numbers[job.client]
                raise Diverged(f"round {job.ctx.round}, client {client}: training {name} is {value}")

    def _context(self, client: ClientIndex, request: Request, **changes: Any) -> Context:
        parts = self.data.parts[client]
        ctx = self.ctx.at(request.moment, cohort=request.cohort, client=client, examples=len(parts["train"]), **changes)
        augmented = None
        if self.augment is not None:
            seed_batch = partial(seed_torch, self.seed, "augmented data", ctx.moment, client=client)
            augmented = Augmented(parts["train"], self.augment, seed_batch)
        return ctx.at(data=ClientData(parts["train"], parts["val"], augmented))

    def _state(self, ctx: Context) -> State:
        client = ClientIndex(ctx.client)
        if client not in self.states:
            seed_torch(self.seed, "join", client=client)
            self.states[client] = self.ctx.task.to_memory_format(self.algorithm.join(ctx))
        return self.states[client]

    def _synchronise(self) -> None:
        if self.ctx.task.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.task.device)
