"""A host: a worker that runs clients. It knows neither Ray nor any method."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, Phase, Reply, State
from rayfed.core.errors import Diverged
from rayfed.core.ids import ClientIndex
from rayfed.core.rng import seed_torch, torch_state_kept
from rayfed.core.trees import nbytes
from rayfed.data.population import Population
from rayfed.engine.allocator import keep_freed_memory
from rayfed.engine.block_width import fastest_width
from rayfed.engine.blocks import Rows
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device import peak_bytes, set_kernels
from rayfed.engine.device_data import Augmented
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host_data import HostData
from rayfed.engine.metric_collection import Gradients
from rayfed.engine.purity import untouched
from rayfed.engine.requests import ExchangeRequest, ExchangeResult, Request, Scored, ScoreRequest, add_to
from rayfed.engine.scoring import as_score
from rayfed.engine.serialization import bytes_by_field
from rayfed.engine.streamed import room_for
from rayfed.engine.training import Job, Trained, draw_rows, train
from rayfed.metrics.base import OfPredictions, Value

_DRAWN_AHEAD = 64  # clients
_MEASURED_STEPS = 10  # of a phase, to choose the clients that train at once
_COPIES = 4  # of the `work` of a client in a block: as it came, in the block, its gradients, as it goes


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
        self.drop_last = blueprint.drop_last
        self.augment, self.availability = blueprint.augment, blueprint.availability
        self.ctx = blueprint.context(population, device)
        room = room_for(blueprint.data_on_device, device, share)
        self._share = share
        self.data = HostData(self.algorithm, self.ctx.task, population, seed=self.seed, room=room)
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
        result.total = ExactSum(untrained=self.ctx.task.untrained)
        done = Exchanged(result, {}, {})
        for one in self._trained(exchange, request, down, unicast, states):
            self._finish(exchange, request, one, done)
            del one  # its weights would stay in memory while the next client trains
        self._synchronise()
        result.busy[self.position] = time.perf_counter() - began
        result.gpu_bytes = peak_bytes(self.ctx.task.device)
        return done

    def _finish(self, exchange: Exchange, request: ExchangeRequest, one: TrainedClient, done: Exchanged) -> None:
        """Add what a trained client keeps and sends to `done`."""
        ctx, client, state, received, trained = one
        seed_torch(self.seed, "finish", request.moment, client=client)
        with untouched(f"{type(exchange).__name__}.finish", client=state, down=received):
            next_state, up = exchange.finish(ctx, trained.work, state, received, ctx.data)
        done.states[client] = self.ctx.task.to_memory_format(next_state)
        self._measure(request, one, done.states[client], done.result)
        add_to(done.result.bytes_up, bytes_by_field(up))
        averaged = {name: up[name] for name in exchange.averaged if name in up}
        if exchange.server_side_weighting:
            done.unweighted[client] = averaged
        else:
            done.result.total.add(averaged, request.weights[client])
        others = {name: up[name] for name in up if name not in averaged}
        done.result.replies.append(Reply(client, ctx.examples, others))

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
            result.scored.add(self.data.score_client(ctx, client, model, "trained", request.score_splits, due))
            if due.training:
                values = due.training_values(ctx, result.models_before.pop(client), model)
            result.scoring[self.position] += time.perf_counter() - began
        values += [Value(name, value, ctx.examples) for name, value in trained.metrics.items()]
        place = self.data.parts(client)["train"].place
        result.training += [as_score(value, point="trained", **place) for value in values]

    def weigh(self, unweighted: Iterable[tuple[State, float]]) -> ExactSum:
        """Return the sum of clients' averaged fields, each with a weight that the server computed."""
        total = ExactSum(untrained=self.ctx.task.untrained)
        for averaged, weight in unweighted:
            total.add(averaged, weight)
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

    def fastest_width(
        self,
        request: Request,
        down: State,
        unicast: Mapping[ClientIndex, State],
        states: Mapping[ClientIndex, State],
    ) -> int:
        """Return how many clients to train at once, at most `request.vmap_clients`.

        This is measured on a few steps of copies of the one client of `request`, which are dropped. As random streams
        are keyed, later draws are the same.
        """
        (client,), task = request.clients, self.ctx.task
        ctx, part = self._context(client, request), self.data.parts(client)["train"]
        fields = task.to_memory_format(down) | task.to_memory_format(unicast.get(client, {}))
        exchange = self.algorithm.exchanges(request.moment.stage)[request.moment.exchange]
        with torch_state_kept():
            work = exchange.start(ctx, self._state(ctx, states), fields)
            rows = [some[:_MEASURED_STEPS] for some in self._rows_ahead(exchange, request, 0, {})[client]]
            job = Job(client, part, work, ctx, rows)
            room = 2 * room_for(None, task.device, self._share)  # half of the memory, beside data and states
            inputs = part.x.nbytes if isinstance(part.x, Tensor) else 0  # of which a block has copies
            most = int(room / (inputs + _COPIES * nbytes(work) + 1))

            def block(width: int) -> None:
                self._train(exchange, [job] * width, fields)
                self._synchronise()
                if peak_bytes(task.device) > room:
                    raise torch.OutOfMemoryError(f"{width} clients leave too little memory")

            # CPU seconds, as other processes may use the CPU as well
            clock = time.process_time if task.device.type == "cpu" else time.perf_counter
            return fastest_width(min(request.vmap_clients, most), block, clock)

    def _trained(
        self,
        exchange: Exchange,
        request: Request,
        down: State,
        unicast: Mapping[ClientIndex, State],
        states: Mapping[ClientIndex, State],
        **changes: Any,
    ) -> Iterator[TrainedClient]:
        """Train the clients of `request` in blocks of its `vmap_clients`; `changes` are those of their contexts."""
        to_memory_format = self.ctx.task.to_memory_format
        common = to_memory_format(down)
        rows: dict[ClientIndex, list[Rows]] = {}
        for first in range(0, len(request.clients), request.vmap_clients):
            jobs, received, before = [], [], []
            block = request.clients[first : first + request.vmap_clients]
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
            with untouched(f"{type(exchange).__name__}.step", down=received[0], client=before[0]):
                results = self._train(exchange, jobs, received[0])
            for job, state, fields in zip(jobs, before, received, strict=True):
                self._check_finite(job, results[0])
                yield TrainedClient(job.ctx, job.client, state, fields, results.pop(0))

    def _train(self, exchange: Exchange, jobs: Sequence[Job], down: State) -> list[Trained]:
        phases = exchange.phases(jobs[0].ctx)
        return train(exchange, jobs, down, phases, seed=self.seed, drop_last=self.drop_last, augment=self.augment)

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
        for start in range(first, min(first + _DRAWN_AHEAD, len(request.clients)), request.vmap_clients):
            phases: Sequence[Phase] | None = None
            for client in request.clients[start : start + request.vmap_clients]:
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
