"""A host: a worker that runs clients. It knows neither Ray nor any method."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from rayfed.algorithm import ClientData, Context, Exchange, Phase, Reply, State
from rayfed.core.errors import Diverged
from rayfed.core.ids import ClientIndex
from rayfed.core.rng import seed_torch
from rayfed.data.population import Population
from rayfed.engine.allocator import keep_freed_memory
from rayfed.engine.blocks import Rows
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device import peak_bytes, set_kernels
from rayfed.engine.device_data import Augmented
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.graphs import CudaCapture, StepGraphs
from rayfed.engine.host_data import HostData
from rayfed.engine.metric_collection import Gradients
from rayfed.engine.purity import untouched
from rayfed.engine.requests import ExchangeRequest, ExchangeResult, Request, Scored, ScoreRequest, add_to
from rayfed.engine.scoring import as_score
from rayfed.engine.serialization import bytes_by_field
from rayfed.engine.streamed import room_for
from rayfed.engine.tracing import span
from rayfed.engine.training import Job, Trained, draw_rows, train
from rayfed.metrics.base import OfPredictions, Value

_DRAWN_AHEAD = 64  # clients


class TrainedClient(NamedTuple):
    """A client after local training: its context, its state before, what it received, and what training left."""

    ctx: Context
    client: ClientIndex
    state: State
    down: State
    trained: Trained


class Exchanged(NamedTuple):
    """What a host leaves of an exchange: its result for the server, and what the fleet keeps of every client.

    Attributes:
        states: The next state of every client.
        unweighted: Each client's averaged fields, where the server weighs the replies first; empty otherwise.
    """

    result: ExchangeResult
    states: dict[ClientIndex, State]
    unweighted: dict[ClientIndex, State]


class Host:
    """A worker on one device, which runs any client of the population.

    It keeps nothing between calls that is not also elsewhere: client states come with each call and go back with its
    result, and what it holds of the data is a cache.

    Args:
        device: The device of the host. The process is prepared for it.
        share: The share of the device's memory that the host may use.
        position: The position of the host among those of its fleet.

    Attributes:
        ctx: The context common to all hooks; its task lies on this host's device.
        graphs: The CUDA graphs of its steps; None on a CPU, and where there are to be none.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        device: str | torch.device,
        *,
        share: float = 1.0,
        position: int = 0,
    ):
        torch.set_num_threads(blueprint.threads)
        set_kernels(deterministic=blueprint.deterministic, tf32=blueprint.tf32)
        keep_freed_memory()
        self.position, self.algorithm, self.seed = position, blueprint.algorithm, blueprint.seed
        self.vmap_clients, self.drop_last = blueprint.vmap_clients, blueprint.drop_last
        self.augment, self.availability = blueprint.augment, blueprint.availability
        self.ctx = blueprint.context(population, device)
        room = room_for(blueprint.data_on_device, device, share)
        self.data = HostData(self.algorithm, self.ctx.task, population, seed=self.seed, room=room)
        on_gpu = self.ctx.task.device.type == "cuda"
        self.graphs = StepGraphs(CudaCapture()) if on_gpu and blueprint.graphs else None
        peak_bytes(self.ctx.task.device)  # what another simulation of this process took is not counted

    def exchange(
        self,
        request: ExchangeRequest,
        down: State,
        unicast: Mapping[ClientIndex, State],
        states: Mapping[ClientIndex, State],
    ) -> Exchanged:
        """Train the clients of `request`.

        Args:
            down: What every client receives.
            unicast: The further fields of the clients that receive some.
            states: The states of the clients that have one. The others join.
        """
        began = time.perf_counter()
        exchange = self.algorithm.exchanges(request.moment.stage)[request.moment.exchange]
        result = ExchangeResult(models_before=dict(request.models_before), scoring={self.position: 0.0})
        done = Exchanged(result, {}, {})
        for one in self._trained(exchange, request, down, unicast, states):
            ctx, client, state, received, trained = one
            seed_torch(self.seed, "finish", request.moment, client=client)
            with span("finish"), untouched(f"{type(exchange).__name__}.finish", client=state, down=received):
                next_state, up = exchange.finish(ctx, trained.work, state, received, ctx.data)
            done.states[client] = self.ctx.task.to_memory_format(next_state)
            self._measure(request, one, done.states[client], result)
            add_to(result.bytes_up, bytes_by_field(up))
            averaged = {name: up[name] for name in exchange.averaged if name in up}
            if exchange.server_side_weighting:
                done.unweighted[client] = averaged
            else:
                result.total.add(averaged, request.weights[client])
            result.replies.append(Reply(client, ctx.examples, {name: up[name] for name in up if name not in averaged}))
        self._synchronise()
        result.busy[self.position] = time.perf_counter() - began
        result.gpu_bytes = peak_bytes(self.ctx.task.device)
        if self.graphs is not None:
            result.graphs, self.graphs.counts = self.graphs.counts, Counter()
        return done

    def _measure(self, request: ExchangeRequest, one: TrainedClient, next_state: State, result: ExchangeResult) -> None:
        """Add to `result` the scores of a client's trained model and of its training."""
        ctx, client, state, received, trained = one
        due, values = request.metrics, []
        if due.training and ctx.exchange == 0:
            result.models_before[client] = self.algorithm.downloaded_model(ctx, state, received)
        if request.score_splits or (due.training and due.last):
            self._synchronise()
            began = time.perf_counter()
            model = self.algorithm.trained_model(ctx, trained.work, next_state, received)
            with span("score a trained model"):
                result.scored.add(self.data.score_client(ctx, client, model, "trained", request.score_splits, due))
            if due.training:
                values = due.training_values(ctx, result.models_before.pop(client), model)
            result.scoring[self.position] += time.perf_counter() - began
        values += [Value(name, value, ctx.examples) for name, value in trained.metrics.items()]
        place = self.data.parts(client)["train"].place
        result.training += [as_score(value, point="trained", **place) for value in values]

    def weigh(self, weights: Mapping[ClientIndex, float], unweighted: Mapping[ClientIndex, State]) -> ExactSum:
        """Return the sum of the averaged fields of an exchange, with weights that the server computed."""
        total = ExactSum()
        for client, averaged in unweighted.items():
            total.add(averaged, weights[client])
        return total

    def score_downloads(
        self,
        request: ScoreRequest,
        down: State,
        unicast: Mapping[ClientIndex, State],
        states: Mapping[ClientIndex, State],
    ) -> Scored:
        """Score the clients' models on their own data, as downloaded or after adaptation, and on test sets.

        Clients without a state join for the score alone: nothing of them is kept.
        """
        scored = Scored()
        received = self.ctx.task.to_memory_format(down)
        joined: dict[ClientIndex, State] = {}
        for client in request.clients:
            ctx = self._context(client, request)
            state = self._state(ctx, states)
            if request.client_tests or "downloaded" in request.points:
                fields = received | self.ctx.task.to_memory_format(unicast.get(client, {}))
                model = self.algorithm.downloaded_model(ctx, state, fields)
                splits = request.splits if "downloaded" in request.points else ()
                scored.add(self.data.score_client(ctx, client, model, "downloaded", splits, request.metrics))
                due = request.metrics.only(OfPredictions)
                for test in request.client_tests:
                    scored.add(self.data.score_test(ctx, test, model, due, client))
            if "adapted" in request.points and client not in states:
                joined[client] = state
        if "adapted" in request.points:
            epochs = self.ctx.local._replace(epochs=request.adapt_epochs, steps=None)
            adapting = self._trained(
                self.algorithm.adaptation,
                request,
                down,
                unicast,
                {**states, **joined},
                stage="final",
                local=epochs,
            )
            for ctx, client, state, fields, trained in adapting:
                model = self.algorithm.trained_model(ctx, trained.work, state, fields)
                scored.add(self.data.score_client(ctx, client, model, "adapted", request.splits, request.metrics))
        return scored

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        """Score the server's model on the clients' data, and on the server's test sets of `request`."""
        ctx, model = self.ctx.at(request.moment, cohort=request.cohort), self.ctx.task.to_memory_format(model)
        scored = Scored()
        for client in request.clients:
            scored.add(self.data.score_client(ctx, client, model, "global", request.splits, request.metrics))
        for test in request.tests:
            scored.add(self.data.score_test(ctx, test, model, request.metrics))
        return scored

    def gradients(self, request: ScoreRequest, model: Any) -> list[Gradients]:
        """Return the gradients of the server's model on `request.splits` of the clients' data and test sets, by
        domain."""
        ctx, model = self.ctx.at(request.moment, cohort=request.cohort), self.ctx.task.to_memory_format(model)
        return self.data.gradients(ctx, request.clients, request.tests, model, request.splits)

    def _trained(
        self,
        exchange: Exchange,
        request: Request,
        down: State,
        unicast: Mapping[ClientIndex, State],
        states: Mapping[ClientIndex, State],
        **changes: Any,
    ) -> Iterator[TrainedClient]:
        """Train the clients of `request` in blocks of `vmap_clients`; `changes` are those of their contexts."""
        to_memory_format = self.ctx.task.to_memory_format
        common = to_memory_format(down)
        rows: dict[ClientIndex, list[Rows]] = {}
        for first in range(0, len(request.clients), self.vmap_clients):
            jobs, received, before = [], [], []
            block = request.clients[first : first + self.vmap_clients]
            if block[0] not in rows:
                rows = self._rows_ahead(exchange, request, first, changes)
            for client in block:
                ctx = self._context(client, request, **self._local_work(request, client, changes))
                fields = common | to_memory_format(unicast.get(client, {}))
                state = self._state(ctx, states)
                seed_torch(self.seed, "start", ctx.moment, client=client)
                work = exchange.start(ctx, state, fields)
                jobs.append(Job(client, self.data.parts(client)["train"], work, ctx, rows[client]))
                received.append(fields)
                before.append(state)
            phases = exchange.phases(jobs[0].ctx)
            step = untouched(f"{type(exchange).__name__}.step", down=received[0], client=before[0])
            with span(f"train clients {', '.join(map(str, block))}"), step:
                results = train(
                    exchange,
                    jobs,
                    received[0],
                    phases,
                    seed=self.seed,
                    drop_last=self.drop_last,
                    augment=self.augment,
                    graphs=self.graphs,
                )
            for job, state, fields, trained in zip(jobs, before, received, results, strict=True):
                self._check_finite(job, trained)
                yield TrainedClient(job.ctx, job.client, state, fields, trained)

    def _local_work(self, request: Request, client: ClientIndex, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `changes` with what a client trains in this round, unless they say what it trains."""
        if self.availability.least_work == 1:
            return changes
        work = self.availability.local_work(self.ctx.local, self.seed, request.moment, client)
        return {"local": work} | dict(changes)

    def _rows_ahead(
        self, exchange: Exchange, request: Request, first: int, changes: Mapping[str, Any]
    ) -> dict[ClientIndex, list[Rows]]:
        """Draw the batches of the next clients, from position `first` on.

        Between trainings, numpy's generator is out of the processor's cache and takes ten times as long.
        """
        rows: dict[ClientIndex, list[Rows]] = {}
        for start in range(first, min(first + _DRAWN_AHEAD, len(request.clients)), self.vmap_clients):
            phases: Sequence[Phase] | None = None
            for client in request.clients[start : start + self.vmap_clients]:
                examples = self.data.training_examples(client)
                work = self._local_work(request, client, changes)
                ctx = self.ctx.at(request.moment, cohort=request.cohort, client=client, examples=examples, **work)
                if phases is None or self.availability.least_work < 1:
                    phases = exchange.phases(ctx)
                rows[client] = [
                    draw_rows(
                        ctx,
                        examples,
                        phase,
                        number,
                        seed=self.seed,
                        drop_last=self.drop_last,
                    )
                    for number, phase in enumerate(phases)
                ]
        return rows

    def _check_finite(self, job: Job, trained: Trained) -> None:
        for name, value in trained.metrics.items():
            if not math.isfinite(value):
                client = self.data.population.clients.id(job.client)
                raise Diverged(f"round {job.ctx.round}, client {client}: training {name} is {value}")

    def _context(self, client: ClientIndex, request: Request, **changes: Any) -> Context:
        parts = self.data.parts(client)
        ctx = self.ctx.at(request.moment, cohort=request.cohort, client=client, examples=len(parts["train"]), **changes)
        augmented = None
        if self.augment is not None:
            seed_batch = partial(seed_torch, self.seed, "augmented data", ctx.moment, client=client)
            augmented = Augmented(parts["train"], self.augment, seed_batch)
        return ctx.at(data=ClientData(parts["train"], parts["val"], augmented, parts.get("held_out")))

    def _state(self, ctx: Context, states: Mapping[ClientIndex, State]) -> State:
        """Return the client's state, which is a function of the seed alone until it takes part in an exchange."""
        client = ClientIndex(ctx.client)
        if client in states:
            return states[client]
        seed_torch(self.seed, "join", client=client)
        joined: State = self.ctx.task.to_memory_format(self.algorithm.join(ctx))
        return joined

    def _synchronise(self) -> None:
        if self.ctx.task.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.task.device)
