"""A trial before it starts, as checks see it."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec
from rayfed.core.rng import global_state_kept
from rayfed.data.population import Population, SizesById
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.first_examples import first_batch
from rayfed.losses.base import Loss


@dataclass(frozen=True)
class Trial:
    """A blueprint with its data. What several checks need is computed once.

    Attributes:
        blueprint: The simulation.
        population: Its data.
        model_key: The key of the model, for messages.
        own_model: Whether the model is the user's own.
        chosen_loss: The loss that scores models, as it was given or named: `blueprint.loss` is torch's cross-entropy
            for rayfed's, too. None where nobody asks which of them it is.
        same_context: Another trial with this one's context, which then is not made again.
    """

    blueprint: Blueprint
    population: Population
    model_key: str = "model"
    own_model: bool = False
    chosen_loss: Loss | None = None
    same_context: "Trial | None" = field(default=None, repr=False, compare=False)

    def at_once(self, clients: int) -> "Trial":
        """Return the trial with so many clients at once, on which no context depends."""
        return replace(self, blueprint=replace(self.blueprint, vmap_clients=clients), same_context=self)

    def with_(self, **changes: Any) -> "Trial":
        """Return the trial with `changes` of the blueprint."""
        return self.of(replace(self.blueprint, **changes))

    def of(self, blueprint: Blueprint) -> "Trial":
        """Return the trial with another blueprint."""
        if blueprint is self.blueprint:
            return self
        return replace(self, blueprint=blueprint, same_context=None)

    @property
    def named(self) -> str:
        """The method, as a user names it."""
        return f"algorithm.name={self.blueprint.algorithm.name}"

    @property
    def loss(self) -> Loss:
        """The loss that scores models."""
        if self.chosen_loss is None:
            return self.blueprint.loss
        return self.chosen_loss

    @cached_property
    def ctx(self) -> Context:
        """The context of all hooks, on the CPU."""
        if self.same_context is not None:
            return self.same_context.ctx
        with global_state_kept():
            return self.blueprint.context(self.population, "cpu")

    @cached_property
    def cohort_ctx(self) -> Context:
        """The context of a round in which the first clients train."""
        return self.ctx.at(cohort=tuple(range(self.blueprint.cohort)))

    @cached_property
    def global_model(self) -> tuple[Any, bool]:
        """The server's model before the first round, or None, and whether it has all weights of the network."""
        return self.blueprint.global_model_in(self.ctx)

    def first_outputs(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the logits of the initial model for the first `count` examples, and their labels."""
        x, y = first_batch(self.population.clients[0].train, count)
        with global_state_kept(), torch.no_grad():
            task = self.ctx.task
            return task.predict(task.initial_weights(), x), y

    @cached_property
    def sizes(self) -> SizesById:
        """How many examples each client trains on."""
        return SizesById(self.population.clients, self.blueprint.training_examples(self.population))

    @cached_property
    def problem(self) -> ProblemSpec:
        """What the algorithm is told in `check`."""
        blueprint = self.blueprint
        clients = self.population.clients
        kind = clients[0].train.dtype
        return ProblemSpec(
            task=self.ctx.task,
            shape=tuple(self.population.shape),
            tokens=kind.kind in "iu" and kind.itemsize > 1,  # bytes are pixels
            full_participation=blueprint.cohort == len(self.population.participants),
            cohort=blueprint.cohort,
            rounds=blueprint.rounds,
            examples=self.sizes,
            validation=SizesById(clients, clients.sizes[:, 1]),
            batch_size=blueprint.batch_size,
            drop_last=blueprint.drop_last,
            optimizer=blueprint.optimizer,
            vmap_clients=blueprint.vmap_clients or 1,
        )
