"""A host, a worker that runs clients, and the fleet of one host in this process. They know neither Ray nor methods."""

import copy
import itertools
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, Reply, State
from rayfed.core.errors import Diverged
from rayfed.core.exact_sum import ExactSum
from rayfed.core.ids import ClientIndex
from rayfed.core.rng import global_state_kept
from rayfed.core.round_record import Predictions
from rayfed.core.trees import nbytes, owned, without
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.client_store import ClientStore
from rayfed.engine.device import check_bf16, keep_freed_memory, peak_bytes, room_for_states, set_kernels
from rayfed.engine.device_data import Augmented, HostData, Part, room_for
from rayfed.engine.fleet import ExchangeRequest, ExchangeResult, Request, ScoreRequest, States, Versions, scoring_blocks
from rayfed.engine.graphs import CudaCapture, StepGraphs
from rayfed.engine.purity import untouched
from rayfed.engine.scoring import (
    DueMetrics,
    Gradients,
    Scored,
    as_score,
    domain_gradients,
    scores_of_changed_inputs,
    unread_scores,
)
from rayfed.engine.training import InBf16, Job, Phases, Trained, TrainedBlock, draw_phases, fastest_width, train
from rayfed.metrics.base import OfChangedInputs, OfPredictions, OfTraining, Value

CLIENTS_AT_ONCE = 64
"""Clients whose states `LocalFleet` holds beside its store at any time."""
_Request = TypeVar("_Request", bound=Request)
_AHEAD = 16  # clients whose batches are drawn together
_MEASURED_STEPS = 10  # the steps of a phase on which the number of clients that train at once is measured
_COPIES = 4  # copies of a client's `work` in a block: before training, in training, its gradients, after training


class Host:
    """A worker on one device, which runs any client of the population.

    It keeps nothing between calls that is not also elsewhere: client states come with each call and go back with its
    result, and its data are a cache.

    Args:
        share: The share of the device's memory that the host may use.
        position: The position of the host among the hosts of its fleet.

    Attributes:
        ctx: The context common to all hooks; its task lies on this host's device.
        graphs: The CUDA graphs of its steps; None on a CPU, and where there are to be none.
        room_ahead: The bytes of trained clients that may wait while others train; 0 on a CPU, which is always busy.
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
        self.position = position
        self.algorithm = blueprint.algorithm
        self.seed = blueprint.seed
        self._streams = blueprint.streams
        self.drop_last = blueprint.drop_last
        self.bf16 = blueprint.bf16
        if self.bf16:
            check_bf16(torch.device(device))
        self.augment = blueprint.augment
        self.availability = blueprint.availability
        self.ctx = blueprint.context(population, device)
        on_gpu = self.ctx.task.device.type == "cuda"
        self.graphs: StepGraphs | None = None
        if on_gpu and blueprint.cuda_graphs:
            self.graphs = StepGraphs(CudaCapture(self.ctx.task.device))
        self.room_ahead = 0.0
        if on_gpu:
            self.room_ahead = room_for(None, self.ctx.task.device, share) / 4
        self._share = share
        room = room_for(blueprint.data_on_device, device, share)
        held_out = self.algorithm.held_out_share
        task = self.ctx.task
        self.data = HostData(population, task, held_out_share=held_out, seed=self.seed, room=room)
        peak_bytes(self.ctx.task.device)  # leaves out what another simulation of this process took

    @property
    def room_for_training(self) -> float:
        """The bytes that clients which train at once may take: half of the memory, beside data and states."""
        return 2 * room_for(None, self.ctx.task.device, self._share)

    def empty_sum(self) -> ExactSum:
        """Return a sum for the averaged fields of clients."""
        return ExactSum(untrained=self.ctx.task.untrained)

    def exchange(
        self, request: ExchangeRequest, down: State | Versions, unicast: States, states: States, total: ExactSum
    ) -> ExchangeResult:
        """Train the clients of `request`, and add their averaged fields to `total`, an `empty_sum` at first.

        `down` is what all receive, `unicast` what single clients receive as well. Clients without a state join.
        """
        began = time.perf_counter()
        exchange = self.algorithm.exchanges(request.moment.stage)[request.moment.exchange]
        result = ExchangeResult(models_before=dict(request.models_before), scoring={self.position: 0.0})
        averaged: dict[ClientIndex, State] = {}  # of the clients of a block
        for job, trained in self._trained(exchange, request, down, unicast, states):
            averaged[job.client] = self._finish(exchange, request, job, trained, result)
            del trained  # its weights would stay in memory while the next client trains
            is_last = job.client == request.clients[-1]
            if len(averaged) == request.vmap_clients or is_last:
                if exchange.server_side_weighting or request.origins:
                    result.unweighted |= averaged
                elif exchange.averaged:
                    weights = [request.weights[client] for client in averaged]
                    total.add_all(list(averaged.values()), weights)
                averaged = {}
        self._synchronise()
        began_to_read = time.perf_counter()
        result.scored.read()
        result.scoring[self.position] += time.perf_counter() - began_to_read
        result.busy[self.position] = time.perf_counter() - began
        result.gpu_bytes = peak_bytes(self.ctx.task.device)
        return result

    def _finish(
        self, exchange: Exchange, request: ExchangeRequest, job: Job, trained: Trained, result: ExchangeResult
    ) -> State:
        """Return the averaged fields that a trained client sends; add what else it sends and keeps to `result`."""
        ctx = job.ctx
        client = job.client
        self._streams.begin("finish", ctx.moment, client=client)
        hook = f"{type(exchange).__name__}.finish"
        with untouched(hook, client=job.state, down=job.down):
            next_state, up = exchange.finish(ctx, trained.work, job.state, job.down, ctx.data)
        result.states[client] = self.ctx.task.to_memory_format(next_state)
        self._measure(request, job, trained, result.states[client], result)
        result.sent[client] = dict(exchange.sent_bytes(up))
        others = owned(without(up, exchange.averaged))
        result.replies.append(Reply(client, ctx.examples, others))
        return {name: up[name] for name in exchange.averaged if name in up}

    def _measure(
        self, request: ExchangeRequest, job: Job, trained: Trained, next_state: State, result: ExchangeResult
    ) -> None:
        """Add to `result` the scores of a client's trained model and of its training."""
        ctx = job.ctx
        client = job.client
        due = request.metrics
        values = []
        measures_training = bool(due.of(OfTraining))
        if measures_training and ctx.exchange == 0:
            result.models_before[client] = self.algorithm.downloaded_model(ctx, job.state, job.down)
        if request.score_splits or (measures_training and due.last):
            self._synchronise()
            began = time.perf_counter()
            model = self.algorithm.trained_model(ctx, trained.work, next_state, job.down)
            scored = self._score_clients(ctx, [client], model, "trained", request.score_splits, due)
            result.scored.add(scored)
            if measures_training:
                values = due.training_values(ctx, result.models_before.pop(client), model)
            result.scoring[self.position] += time.perf_counter() - began
        for name, mean in trained.metrics.items():
            values.append(Value(name, mean, ctx.examples))
        for value in values:
            result.training.append(as_score(value, point="trained", **job.part.place))

    def weigh(self, unweighted: Iterable[tuple[State, float]]) -> ExactSum:
        """Return the sum of clients' averaged fields, each with a weight that the server computed."""
        total = self.empty_sum()
        for averaged, weight in unweighted:
            total.add(averaged, weight)
        return total

    def score_downloads(self, request: ScoreRequest, down: State, unicast: States, states: States) -> Scored:
        """Score the clients' models on their own data, as downloaded or after adaptation, and on test sets.

        Clients without a state join for the score alone: nothing of them is kept.
        """
        scored = Scored()
        received = self.ctx.task.to_memory_format(down)
        joined: dict[ClientIndex, State] = {}
        for client in request.clients:
            ctx = self._with_data(self._context(client, request))
            state = self._state(ctx, states)
            if request.client_tests or "downloaded" in request.points:
                fields = received | self.ctx.task.to_memory_format(unicast.get(client, {}))
                model = self.algorithm.downloaded_model(ctx, state, fields)
                splits: Collection[str] = ()
                if "downloaded" in request.points:
                    splits = request.splits
                scored.add(self._score_clients(ctx, [client], model, "downloaded", splits, request.metrics))
                due = request.metrics.only(OfPredictions)
                for number in request.client_tests:
                    test = copy.copy(self.data.test(number))
                    test.client = self.data.population.clients.id(client)
                    scored.add(self._score(ctx, model, "downloaded", [test], due))
            if "adapted" in request.points and client not in states:
                joined[client] = state
        if "adapted" in request.points:
            local = self.ctx.local._replace(epochs=request.adapt_epochs, steps=None)
            states = {**states, **joined}
            adaptation = self.algorithm.adaptation
            jobs = self._trained(adaptation, request, down, unicast, states, stage="final", local=local)
            for job, trained in jobs:
                model = self.algorithm.trained_model(job.ctx, trained.work, job.state, job.down)
                splits = request.splits
                due = request.metrics
                scored.add(self._score_clients(job.ctx, [job.client], model, "adapted", splits, due))
        return scored.read()

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        """Score the server's model on the clients' data, and on the server's test sets of `request`."""
        ctx = self.ctx.at(request.moment, cohort=request.cohort)
        model = self.ctx.task.to_memory_format(model)
        scored = Scored()
        for block in request.blocks or scoring_blocks(self.data.population, request):
            scored.add(self._score_clients(ctx, block, model, "global", request.splits, request.metrics))
        for test in request.tests:
            parts = [self.data.test(test)]
            scored.add(self._score(ctx, model, "global", parts, request.metrics))
        return scored.read()

    def gradients(self, request: ScoreRequest, model: Any) -> list[Gradients]:
        """Return the server model's gradients on `request.splits` of clients' data and test sets, by domain."""
        ctx = self.ctx.at(request.moment, cohort=request.cohort)
        model = self.ctx.task.to_memory_format(model)
        return domain_gradients(ctx, model, self._parts_on(request))

    def _parts_on(self, request: ScoreRequest) -> Iterator[Part]:
        """Yield the parts of clients and the test sets of `request` that are on its splits, one after the other."""
        for client in request.clients:
            for name, part in self.data.parts(client).items():
                if name in request.splits:
                    yield part
        tests = self.data.population.tests
        for number in request.tests:
            if tests[number].split in request.splits:
                yield self.data.test(number)

    def _score_clients(
        self,
        ctx: Context,
        clients: Sequence[ClientIndex],
        model: Any,
        point: str,
        splits: Collection[str],
        due: DueMetrics,
    ) -> Scored:
        """Score a model on those `splits` of clients that have examples; `Scored.read` waits for the numbers.

        They share batches with each other, and with no others: see `scoring_blocks`. The splits that a metric is only
        fitted to are not scored, because that would change the batches of the others; their representations are
        collected.
        """
        parts: list[Part] = []
        fitted: list[Part] = []
        for client in clients:
            data = self.data.parts(client)
            own = [data[split] for split in splits if len(data[split])]
            parts += own
            if own:
                fitted += [data[split] for split in sorted(due.fitted.difference(splits))]
        return self._score(ctx, model, point, parts, due, fitted)

    def _score(
        self, ctx: Context, model: Any, point: str, parts: Sequence[Part], due: DueMetrics, fitted: Sequence[Part] = ()
    ) -> Scored:
        if self._streams.everywhere:  # a user's model or metric may draw
            places = [part.place for part in parts]
            self._streams.begin("score", ctx.moment, client=ctx.client, point=point, places=places)
        kept: list[Predictions] = []
        keep = None
        if due.keep_predictions:
            keep = kept
        unread = unread_scores(self.algorithm, ctx, model, point, parts, due.of(OfPredictions), due.selection, keep)
        scores = scores_of_changed_inputs(self.algorithm, ctx, model, point, parts, due.of(OfChangedInputs))
        collected = []
        for part in (*parts, *fitted):
            collected.append(due.collect(self.algorithm, ctx, model, point, part, self.seed))
        return Scored(scores, list(itertools.chain.from_iterable(collected)), [unread], kept)

    def fastest_width(self, request: Request, down: State, unicast: States, states: States) -> int:
        """Return how many clients to train at once, at most `request.vmap_clients`.

        This is measured on a few steps of copies of the single client of `request`, which are dropped. As random
        streams are keyed, later draws are the same.
        """
        (client,) = request.clients
        task = self.ctx.task
        ctx = self._with_data(self._context(client, request))
        part = self.data.parts(client)["train"]
        fields = task.to_memory_format(down) | task.to_memory_format(unicast.get(client, {}))
        exchange = self.algorithm.exchanges(request.moment.stage)[request.moment.exchange]
        with global_state_kept():
            state = self._state(ctx, states)
            work = exchange.start(ctx, state, fields)
            drawn = draw_phases(exchange, ctx, seed=self.seed, drop_last=self.drop_last)
            phases = []
            for phase, rows in drawn:
                phases.append((phase, rows[:_MEASURED_STEPS]))
            job = Job(client, part, phases, work, ctx, state, fields)
            room = self.room_for_training
            # a block has copies of them
            inputs = 0
            if isinstance(part.x, Tensor):
                inputs = part.x.nbytes
            most = int(room / (inputs + _COPIES * nbytes(work) + 1))

            graphs = None
            if self.graphs is not None:  # all blocks but the first one replay their steps, as most steps of a run
                graphs = StepGraphs(self.graphs.capture, enough_steps=1)

            def block(width: int) -> None:
                self._train(exchange, [job] * width, graphs)
                self._synchronise()
                if peak_bytes(task.device) > room:
                    raise torch.OutOfMemoryError(f"{width} clients leave too little memory")

            # CPU seconds, as other processes may use the CPU as well
            if task.device.type == "cpu":
                clock = time.process_time
            else:
                clock = time.perf_counter
            return fastest_width(min(request.vmap_clients, most), block, clock)

    def _trained(
        self,
        exchange: Exchange,
        request: Request,
        down: State | Versions,
        unicast: States,
        states: States,
        **changes: Any,
    ) -> Iterator[tuple[Job, Trained]]:
        """Train the clients of `request` in blocks of its `vmap_clients`; `changes` apply to their contexts.

        What a client trains in this round depends on its availability, unless `changes` says it.
        """
        blocks = self._trained_blocks(exchange, request, down, unicast, states, changes)
        for block in self._one_ahead(blocks):
            for job, trained in block.clients():
                self._check_finite(job, trained)
                yield job, trained
                del job, trained  # whose weights would stay in memory while the next block trains

    def _one_ahead(self, blocks: Iterator[TrainedBlock]) -> Iterator[TrainedBlock]:
        """Yield each block when the next one was launched, where both may be in the memory of a GPU.

        Whoever reads the results of a block then waits while the GPU has work.
        """
        before: TrainedBlock | None = None
        for block in blocks:
            if before is not None:
                yield before
                before = None
            is_small = self.room_ahead > 0 and nbytes(block.work) < self.room_ahead
            if is_small:
                before = block
            else:
                yield block
            del block
        if before is not None:
            yield before

    def _trained_blocks(
        self,
        exchange: Exchange,
        request: Request,
        down: State | Versions,
        unicast: States,
        states: States,
        changes: dict[str, Any],
    ) -> Iterator[TrainedBlock]:
        """Start the clients of `request`, and launch their steps, block by block; see `_trained`."""
        to_memory_format = self.ctx.task.to_memory_format
        common = to_memory_format(down)
        drawn = self._drawn(exchange, request, changes)
        hook = f"{type(exchange).__name__}.step"
        while block := list(itertools.islice(drawn, request.vmap_clients)):
            jobs = []
            for ctx, phases in block:
                client = ClientIndex(ctx.client)
                if request.origins:
                    received = common[ctx.round]
                else:
                    received = common
                fields = received | to_memory_format(unicast.get(client, {}))
                state = self._state(self._with_data(ctx), states)
                self._streams.begin("start", ctx.moment, client=client)
                work = exchange.start(ctx, state, fields)
                part = self.data.parts(client)["train"]
                jobs.append(Job(client, part, phases, work, ctx, state, fields))
            with untouched(hook, down=jobs[0].down, client=jobs[0].state):
                launched = self._train(exchange, jobs, self.graphs)
            del jobs
            yield launched

    def _drawn(self, exchange: Exchange, request: Request, changes: dict[str, Any]) -> Iterator[tuple[Context, Phases]]:
        """Yield the context of each client of `request`, without its data, and the batches of its phases.

        Both are made for some clients together: after a training, their code is not in the processor's cache and takes
        up to ten times as long.
        """
        for first in range(0, len(request.clients), _AHEAD):
            ahead = []
            for client in request.clients[first : first + _AHEAD]:
                moment, _ = request.origin(client)
                local = self.availability.local_work(self.ctx.local, self.seed, moment, client)
                ctx = self._context(client, request, **({"local": local} | changes))
                phases = draw_phases(exchange, ctx, seed=self.seed, drop_last=self.drop_last)
                ahead.append((ctx, phases))
            while ahead:
                yield ahead.pop(0)  # which would else keep the client's data

    def _train(self, exchange: Exchange, jobs: Sequence[Job], graphs: StepGraphs | None) -> TrainedBlock:
        if self.bf16:
            exchange = InBf16(exchange)
        return train(exchange, jobs, self._streams, self.augment, graphs)

    def _check_finite(self, job: Job, trained: Trained) -> None:
        for name, value in trained.metrics.items():
            if not math.isfinite(value):
                client = self.data.population.clients.id(job.client)
                raise Diverged(f"round {job.ctx.round}, client {client}: training {name} is {value}")

    def _context(self, client: ClientIndex, request: Request, **changes: Any) -> Context:
        """Return the context of a client, without its data."""
        (moment, cohort) = request.origin(client)
        examples = self.data.training_examples(client)
        return self.ctx.at(moment, cohort=cohort, client=client, examples=examples, **changes)

    def _with_data(self, ctx: Context) -> Context:
        """Add the client's data to its context."""
        parts = self.data.parts(ctx.client)
        augmented = None
        if self.augment is not None:
            seed_batch = partial(self._streams.begin, "augmented data", ctx.moment, client=ctx.client)
            augmented = Augmented(parts["train"], self.augment, seed_batch)
        held_out = parts.get("held_out")
        ctx.data = ClientData(parts["train"], parts["val"], augmented, held_out)
        return ctx

    def _state(self, ctx: Context, states: States) -> State:
        """Return the client's state, which is a function of the seed alone until it takes part in an exchange."""
        client = ClientIndex(ctx.client)
        if client in states:
            return states[client]
        self._streams.begin("join", client=client)
        joined: State = self.ctx.task.to_memory_format(self.algorithm.join(ctx))
        return joined

    def _synchronise(self) -> None:
        if self.ctx.task.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.task.device)


class LocalFleet:
    """One host in this process, without Ray, so that a debugger works.

    Args:
        gpus: The GPUs that the process reserved; a share below 1 limits the memory that the host's data may take.
        share: On a CPU, the share of the memory for this process.
        state_memory: The bytes that the clients' states may take in memory, beside those on the GPU; the rest is on
            disk.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        device: str | torch.device = "cpu",
        *,
        gpus: float = 0.0,
        share: float = 1.0,
        state_memory: float = math.inf,
    ):
        share = min(gpus, 1.0) or share
        self.host = Host(blueprint, population, device, share=share)
        self.states = ClientStore(state_memory, device, device_memory=room_for_states(device, share))
        self._unweighted: dict[ClientIndex, State] = {}
        self._ahead: dict[ClientIndex, State] = {}
        self.vmap_clients = blueprint.vmap_clients

    def choose_vmap_clients(self, request: Request, down: State, unicast: States) -> None:
        self.vmap_clients = self.host.fastest_width(request, down, unicast, self._states_of(request.clients))

    def exchange(self, request: ExchangeRequest, down: State | Versions, unicast: States) -> ExchangeResult:
        result = ExchangeResult(total=self.host.empty_sum())
        for part in self._parts(request):
            states = self._states_of(part.clients)
            done = self.host.exchange(part, down, unicast, states, result.total)
            for client, state in done.states.items():
                self._ahead[client] = owned(state)
            if not request.origins:
                self.commit(done.states)
            self._unweighted |= owned(done.unweighted)
            result.add(done)
        return result

    def weigh(self, weights: Mapping[ClientIndex, float]) -> ExactSum:
        replies = ((self._unweighted.pop(client), weight) for client, weight in weights.items())
        return self.host.weigh(replies)

    def commit(self, clients: Iterable[ClientIndex]) -> None:
        for client in clients:
            self.states[client] = self._ahead.pop(client)

    def score_downloads(self, request: ScoreRequest, down: State, unicast: States) -> Scored:
        scored = Scored()
        for part in self._parts(request):
            states = self._states_of(part.clients)
            scored.add(self.host.score_downloads(part, down, unicast, states))
        return scored

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        return self.host.score_global(request, model)

    def gradients(self, request: ScoreRequest, model: Any) -> list[Gradients]:
        return self.host.gradients(request, model)

    def load(self, states: Iterable[tuple[ClientIndex, State]]) -> None:
        self.states.clear()
        for client, state in states:
            self.states[client] = self.host.ctx.task.to_memory_format(state)

    def take_traffic(self) -> tuple[int, int]:
        return 0, 0

    def _parts(self, request: _Request) -> Iterator[_Request]:
        width = self.vmap_clients or 1
        request = replace(request, vmap_clients=width)
        size = max(1, CLIENTS_AT_ONCE // width) * width
        for first in range(0, len(request.clients), size):
            yield request.part(request.clients[first : first + size])

    def _states_of(self, clients: Sequence[ClientIndex]) -> dict[ClientIndex, State]:
        return {client: self.states[client] for client in clients if client in self.states}
