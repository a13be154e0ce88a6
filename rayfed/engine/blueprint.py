"""A blueprint: what server and hosts need to know about a simulation, as a value that is sent to other processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.algorithm import Algorithm, Context, Phase, ProblemSpec
from rayfed.augment.base import Augment
from rayfed.core.errors import UsageError
from rayfed.core.ids import Moment, Stage
from rayfed.core.lr_schedule import CONSTANT, LrSchedule
from rayfed.core.modules import Parcel
from rayfed.core.optim import Optimizer
from rayfed.core.outputs import CLASSES, Outputs
from rayfed.core.rng import Streams, global_state_kept
from rayfed.core.round_schedule import Buffered
from rayfed.core.task import InputSpec, Task
from rayfed.core.trees import named_tensors, only
from rayfed.data.population import Population, SizesById
from rayfed.engine.clock import ALWAYS, NO_CLOCK, Availability, Clock
from rayfed.engine.device import prefers_channels_last
from rayfed.engine.device_data import client_data, held_out_count
from rayfed.models.single_example_batchnorm import batch_size_advice, leaves_single_example, trains_on_single_examples
from rayfed.sampling.base import UNIFORM, Sampler, Uniform


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """One simulation, independent of where it runs.

    Attributes:
        model: The model; its weights are the initial weights.
        loss: (logits, y) -> scalar mean over the batch.
        training_loss: The loss that models are trained by, where it is not `loss`, which scores them.
        buffered: The schedule of asynchronous rounds; None for rounds in which the server waits for its cohort.
        local: The local training of a round.
        keep_optimizer: Whether clients keep the optimiser's state between rounds; None: as the algorithm does.
        vmap_clients: The number of clients that a host trains at once. Values above 1 change rounding. None: a host
            measures which number is fast before it first trains.
        threads: torch threads of a host on a CPU. Values above 1 change rounding.
        deterministic: Whether an operation without a deterministic kernel is an error.
        tf32: Whether GPUs may multiply in TF32.
        cuda_graphs: Whether GPUs replay local steps from CUDA graphs where that gives the same numbers.
        bf16: Whether steps of local training compute in bfloat16 where torch.autocast does.
        data_on_device: Whether clients' inputs stay on their host's device; None: if they fit. It changes no result.
        rows_interact: Whether an example's output depends on the others in its batch when models are scored.
        own_code: Whether code of the user's takes part, which may draw from Python's and NumPy's generators.
    """

    algorithm: Algorithm
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_norm: str
    optimizer: Optimizer
    local: Phase
    batch_size: int
    drop_last: bool
    rounds: int
    cohort: int
    seed: int
    keep_optimizer: bool | None = None
    vmap_clients: int | None = 1
    threads: int = 1
    deterministic: bool = False
    tf32: bool = False
    cuda_graphs: bool = True
    bf16: bool = False
    augment: Augment | None = None
    data_on_device: bool | None = None
    training_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    schedule: LrSchedule = CONSTANT
    availability: Availability = ALWAYS
    clock: Clock = NO_CLOCK
    buffered: Buffered | None = None
    sampler: Sampler = UNIFORM
    outputs: Outputs = CLASSES
    rows_interact: bool = False
    own_code: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"model": Parcel.of(self.model)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, model=state["model"].unpacked())

    @property
    def streams(self) -> Streams:
        """The random streams of the run."""
        return Streams(self.seed, everywhere=self.own_code)

    def context(self, population: Population, device: str | torch.device) -> Context:
        """Return the context of all hooks on `device`, with a copy of the model there."""
        inner: Any = self.algorithm
        personal: list[str] = []
        while isinstance(inner, Algorithm):  # a wrapper's base, too
            personal += inner.personal_weights
            inner = getattr(inner, "base", None)
        task = Task(
            self.model,
            self.training_loss or self.loss,
            num_clients=len(population.participants),
            num_classes=population.num_classes,
            batch_norm=self.batch_norm,
            device=device,
            inputs=self.inputs(population),
            scoring_loss=self.loss,
            outputs=self.outputs,
            rows_interact=self.rows_interact,
            personal=personal,
            channels_last=prefers_channels_last(torch.device(device), bf16=self.bf16),
        )
        keep_optimizer = self.keep_optimizer
        if keep_optimizer is None:
            keep_optimizer = self.algorithm.traits.keeps_optimizer
        ctx = Context(
            task=task,
            optimizer=self.optimizer,
            batch_size=self.batch_size,
            local=self.local,
            rounds=self.rounds,
            keep_optimizer=bool(keep_optimizer),
            schedule=self.schedule,
        )
        ctx = self.algorithm.adapt(ctx)
        return ctx.at(task=ctx.task.with_modules(self.algorithm.modules(ctx.task)))

    def inputs(self, population: Population) -> InputSpec:
        """Return what the network's inputs are."""
        dtype = population.clients[0].train.dtype
        return InputSpec(population.shape, population.mean, population.std, dtype == np.uint8 or dtype.kind == "f")

    def client_context(self, ctx: Context, population: Population, client: int) -> Context:
        """Return `ctx` for a hook of a client, with its data, without a host."""
        share = self.algorithm.held_out_share
        data = client_data(population, client, ctx.task, held_out_share=share, seed=self.seed)
        return ctx.at(client=client, examples=len(data.train), data=data)

    def training_examples(self, population: Population) -> np.ndarray:
        """Return how many examples each client trains on, int64 [clients]."""
        sizes = population.clients.sizes[:, 0]
        share = self.algorithm.held_out_share
        different, places = np.unique(sizes, return_inverse=True)
        return (different - [held_out_count(n, share) for n in different.tolist()])[places]

    def check(self, population: Population) -> None:
        """Raise UsageError if this simulation cannot work, before anything starts."""
        if self.augment is not None:
            self.augment.check(population.shape, population.clients[0].train.dtype)
        sizes = SizesById(population.clients, self.training_examples(population))
        if population.unseen_clients and self.algorithm.traits.refuses_unseen_clients:
            name = self.algorithm.name
            why = self.algorithm.traits.refuses_unseen_clients
            raise UsageError(
                f"unseen_clients={population.unseen_clients}: algorithm.name={name} {why}; use unseen_clients=0"
            )
        if sizes.array.min() < 1:
            smallest = population.clients.id(int(sizes.array.argmin()))
            few = f"fewer than two training examples, of which algorithm.name={self.algorithm.name} holds one out"
            lack = "no training examples"
            if self.algorithm.held_out_share:
                lack = few
            raise UsageError(f"client {smallest} has {lack}; partition.* must give it some")
        if (self.vmap_clients or 1) > 1:
            self._refuse_ragged_batches(sizes)
        ctx = self.context(population, "cpu")
        if not ctx.task.trainable:
            frozen = ""
            if self.batch_norm == "frozen":
                frozen = ", as batch_norm=frozen leaves its batch norm untrained"
            raise UsageError(f"model: no parameter is trained{frozen}; set requires_grad of some to True")
        problem = self.problem(population, ctx.task)
        self._check_clock(problem)
        self.algorithm.check(problem)
        self._refuse_other_labels(population)
        self._refuse_lost_clients(problem)
        self._check_sampling(ctx)
        self._refuse_single_examples(ctx, population, self._phases)

    def settled(self, population: Population) -> "Blueprint":
        """Return a checked blueprint with `vmap_clients` 1 in place of None where clients cannot train at once."""
        if self.vmap_clients is None:
            try:
                replace(self, vmap_clients=2).check(population)
            except UsageError:
                return replace(self, vmap_clients=1)
        return self

    def _refuse_ragged_batches(self, sizes: SizesById) -> None:
        """Raise UsageError if clients that train at once have batches of several sizes."""
        if self.drop_last:
            ragged = sizes.array < self.batch_size
        else:
            ragged = sizes.array % self.batch_size > 0
        clients = sizes.where(ragged)
        if clients:
            client = clients[0]
            smallest = int(sizes.array.min())
            problem = f"clients that train at once need batches of one size, and client {client} has {sizes[client]}"
            remedy = f"use placement.vmap_clients=1, or local.drop_last=true with local.batch_size={smallest} or less"
            raise UsageError(f"placement.vmap_clients={self.vmap_clients}: {problem} training examples; {remedy}")

    def check_adaptation(self, population: Population, epochs: int, *, of_participants: bool) -> None:
        """Raise UsageError if a client cannot train for `epochs` before its model is scored at the point `adapted`.

        Unseen clients are always scored there, participants if `of_participants`.
        """

        def phases(ctx: Context) -> Sequence[Phase]:
            local = self.local._replace(epochs=epochs, steps=None)
            at = ctx.at(Moment("final", self.rounds), local=local)
            if of_participants or ctx.unseen:
                return self.algorithm.adaptation.phases(at)
            return ()

        ctx = self.context(population, "cpu")
        self._refuse_single_examples(ctx, population, phases, " in evaluate.adapt_epochs")

    def _refuse_other_labels(self, population: Population) -> None:
        """Raise UsageError if the algorithm needs classes and the labels are none."""
        labels = population.clients[0].train.y
        algorithm = self.algorithm
        classes = labels.ndim == 1 and labels.dtype.kind in "iu"
        if not classes and (algorithm.traits.requires_classes or algorithm.traits.requires_hard_labels):
            sides = "".join(f", {side}" for side in labels.shape[1:])
            kind = f"{labels.dtype} [n{sides}]"
            raise UsageError(f"algorithm.name={algorithm.name}: needs data with classes; these labels are {kind}")
        if algorithm.traits.requires_classes and self.outputs != CLASSES:
            raise UsageError(
                f"algorithm.name={algorithm.name}: needs a model with one output per class, trained by cross-entropy "
                "or a loss like it"
            )

    def _refuse_lost_clients(self, problem: ProblemSpec) -> None:
        """Raise UsageError if sampled clients may be missing and the algorithm needs them."""
        if not self.availability.loses_clients:
            return
        key = "deadline"
        if self.availability.dropout:
            key = "dropout"
        value = getattr(self.availability, key)
        where = f"availability.{key}={value:g}: algorithm.name={self.algorithm.name}"
        if self.algorithm.traits.sample_without_replacement:
            raise UsageError(f"{where} divides its privacy budget over cohorts of a fixed size; leave the key out")
        if self._needs_all(problem):
            raise UsageError(f"{where} needs every client in every round; leave the key out")

    def _needs_all(self, problem: ProblemSpec) -> bool:
        """Return whether the algorithm refuses rounds in which clients are missing, and nothing else."""
        refused = []
        for everyone in (True, False):
            try:
                self.algorithm.check(replace(problem, full_participation=everyone))
            except UsageError:
                refused.append(everyone)
        return refused == [False]

    def _check_clock(self, problem: ProblemSpec) -> None:
        """Raise UsageError if the algorithm cannot work on the clock, or with asynchronous rounds."""
        named = f"algorithm.name={self.algorithm.name}"
        schedule = self.buffered
        clients = problem.task.num_clients
        stages: tuple[Stage, ...] = ("setup", "round", "final")
        several = sum(len(self.algorithm.exchanges(stage)) for stage in stages) > 1
        if self.clock.sends and several:
            raise UsageError(f"clock: bandwidths need a method with one exchange, and {named} has several")
        if schedule is None:
            return
        if schedule.concurrency > clients:
            raise UsageError(
                f"schedule.concurrency={schedule.concurrency}: there are {clients} clients; give at most that"
            )
        obstacle = self._buffering_obstacle(problem, several)
        if obstacle:
            raise UsageError(f"schedule.name=buffered: {obstacle}")

    def _buffering_obstacle(self, problem: ProblemSpec, several_exchanges: bool) -> str:
        """Return why rounds cannot be asynchronous, and what to change; "" if they can."""
        named = f"algorithm.name={self.algorithm.name}"
        remedy = "use schedule.name=synchronous"
        if not self.clock.runs:
            return "needs a clock; give clock.step_seconds, such as 1, or clock.profile"
        if several_exchanges:
            return f"{named} has several exchanges; {remedy}"
        if self._needs_all(problem):
            return f"{named} needs every client in every round; {remedy}"
        if self.algorithm.traits.sample_without_replacement:
            return f"{named} divides its privacy budget over rounds; {remedy}"
        if self.availability.loses_clients:
            return "takes all replies; leave out availability.dropout and deadline, or give schedule.max_staleness"
        if type(self.sampler) is not Uniform:
            return "draws idle clients uniformly; use sampling.name=uniform"
        if (self.vmap_clients or 1) > 1:
            return "clients start from different models, so they train one at a time; use placement.vmap_clients=1"
        return ""

    def _check_sampling(self, ctx: Context) -> None:
        """Raise UsageError if the algorithm cannot work with the sampler."""
        sampler = self.sampler
        if type(sampler) is Uniform:
            return
        where = f"sampling.name: {type(sampler).__name__}"
        clients = ctx.task.num_clients
        sampler.check(self.cohort, clients)
        obstacle = self._weighting_obstacle(ctx)
        if obstacle:
            raise UsageError(f"{where}: {obstacle}; use sampling.name=uniform")

    def _weighting_obstacle(self, ctx: Context) -> str:
        """Return why the algorithm cannot work with clients that are not sampled uniformly; "" if it can."""
        algorithm = self.algorithm
        named = f"algorithm.name={algorithm.name}"
        exchanges = algorithm.round_exchanges
        traits = algorithm.traits
        if traits.sample_without_replacement or (traits.assumes_uniform_sampling and not self.sampler.is_even):
            return f"{named} assumes that clients are sampled uniformly"
        if not self.sampler.reweights:
            return ""
        if self.availability.loses_clients:
            return "it weights the clients that it draws, and availability.* makes some of them drop out"
        if any(exchange.server_side_weighting for exchange in exchanges):
            return f"it weights clients, and so does {named}"
        with global_state_kept():
            cohort = tuple(range(self.cohort))
            sent = algorithm.broadcast(ctx.at(cohort=cohort), algorithm.init(ctx))
        missing = [field for field in algorithm.averaged if field not in sent]
        if missing:
            return f"{named} averages {missing[0]}, which clients do not receive"
        averaged = set()
        for exchange in exchanges:
            for field in exchange.averaged:
                averaged.add(field)
        # A model that stays with the clients as a whole is averaged as a field without tensors.
        sends_tensors = any(named_tensors(only(sent, averaged)))
        if averaged <= set(sent) and not sends_tensors:
            return f"it weights clients in the mean, and {named} averages nothing"
        return ""

    def _phases(self, ctx: Context) -> list[Phase]:
        """Return all local training of the client of `ctx` in the setup, a round and the final stage."""
        stages: tuple[tuple[Stage, int], ...] = (("setup", 0), ("round", 1), ("final", self.rounds + 1))
        found: list[Phase] = []
        for stage, number in stages:
            for place, exchange in enumerate(self.algorithm.exchanges(stage)):
                found += exchange.phases(ctx.at(Moment(stage, number, place)))
        return found

    def _refuse_single_examples(
        self, ctx: Context, population: Population, phases: Callable[[Context], Sequence[Phase]], where: str = ""
    ) -> None:
        """Raise UsageError if a client has a training batch of one example and the network cannot train on it.

        `phases` returns the training of the client of a context, and `where` says in the message which training it is.
        """
        size = self.batch_size
        drop_last = self.drop_last
        problem = self.problem(population, ctx.task)
        if drop_last and size > 1 and min(problem.examples.values()) > 1:
            return
        if trains_on_single_examples(ctx.task, problem.shape, tokens=problem.tokens):
            return
        clients = population.clients
        sizes = self.training_examples(population)
        is_unseen = np.arange(len(sizes)) >= ctx.task.num_clients
        kinds = np.stack([sizes, is_unseen])
        _, places = np.unique(kinds, axis=1, return_index=True)
        for place in sorted(places.tolist()):  # clients of one size train alike
            client = clients.id(place)
            n = int(sizes[place])
            of_client = phases(ctx.at(client=place, examples=n))
            if any(
                leaves_single_example(
                    n, phase.batch_size or size, epochs=phase.epochs, steps=phase.steps, drop_last=drop_last
                )
                for phase in of_client
            ):
                advice = batch_size_advice(size, enough=n > 1)
                raise UsageError(
                    f"local.batch_size={size}: client {client} has {n} training examples, which leave a batch of one "
                    f"example{where}, on which the model's batch norm cannot train; {advice}"
                )

    def global_model(self, population: Population) -> tuple[Any, bool]:
        """Return the server's model before the first round, or None, and whether it has all weights of the network."""
        with global_state_kept():
            ctx = self.context(population, "cpu")
            model = self.algorithm.global_model(ctx, self.algorithm.init(ctx))
        names = {*ctx.task.trainable, *ctx.task.buffers}
        return model, isinstance(model, dict) and names <= set(model)

    def problem(self, population: Population, task: Task) -> ProblemSpec:
        """Return what the algorithm is told in `check`; `task` is that of the blueprint's context."""
        kind = population.clients[0].train.dtype
        clients = population.clients
        return ProblemSpec(
            task=task,
            shape=tuple(population.shape),
            tokens=kind.kind in "iu" and kind.itemsize > 1,  # bytes are pixels
            full_participation=self.cohort == len(population.participants),
            cohort=self.cohort,
            rounds=self.rounds,
            examples=SizesById(clients, self.training_examples(population)),
            validation=SizesById(clients, clients.sizes[:, 1]),
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            optimizer=self.optimizer,
            vmap_clients=self.vmap_clients or 1,
        )
