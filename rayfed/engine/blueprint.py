"""A blueprint: what server and hosts need to know about a simulation, as a value that is sent to other processes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.algorithm import Algorithm, Context, Phase
from rayfed.augment.base import Augment
from rayfed.core.lr_schedule import CONSTANT, LrSchedule
from rayfed.core.modules import Parcel
from rayfed.core.optim import Optimizer
from rayfed.core.outputs import CLASSES, Outputs
from rayfed.core.rng import Streams, global_state_kept
from rayfed.core.round_schedule import Buffered
from rayfed.core.task import InputSpec, Task
from rayfed.data.population import Population
from rayfed.engine.clock import ALWAYS, NO_CLOCK, Availability, Clock
from rayfed.engine.device import prefers_channels_last
from rayfed.engine.device_data import client_data, held_out_count
from rayfed.sampling.base import UNIFORM, Sampler


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

    def undisturbed(self, **changes: Any) -> "Blueprint":
        """Return this blueprint with `changes`, clients that are always there, and one of them at a time."""
        undisturbed = replace(self, vmap_clients=1, availability=ALWAYS, clock=NO_CLOCK, buffered=None, sampler=UNIFORM)
        return replace(undisturbed, **changes)

    def global_model(self, population: Population) -> tuple[Any, bool]:
        """Return the server's model before the first round, or None, and whether it has all weights of the network."""
        with global_state_kept():
            ctx = self.context(population, "cpu")
        return self.global_model_in(ctx)

    def global_model_in(self, ctx: Context) -> tuple[Any, bool]:
        """Return what `global_model` does, in a context of this blueprint."""
        with global_state_kept():
            model = self.algorithm.global_model(ctx, self.algorithm.init(ctx))
        names = {*ctx.task.trainable, *ctx.task.buffers}
        return model, isinstance(model, dict) and names <= set(model)
