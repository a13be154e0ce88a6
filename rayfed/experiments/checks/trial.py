"""A trial before it starts, as checks see it."""

from dataclasses import dataclass, replace
from functools import cached_property

from rayfed.algorithm import Context, ProblemSpec
from rayfed.data.population import Population, SizesById
from rayfed.engine.blueprint import Blueprint


@dataclass(frozen=True)
class Trial:
    """A blueprint with its data. What several checks need is computed once.

    Attributes:
        blueprint: The simulation.
        population: Its data.
    """

    blueprint: Blueprint
    population: Population

    def at_once(self, clients: int) -> "Trial":
        """Return the trial with so many clients at once."""
        return Trial(replace(self.blueprint, vmap_clients=clients), self.population)

    @property
    def named(self) -> str:
        """The method, as a user names it."""
        return f"algorithm.name={self.blueprint.algorithm.name}"

    @cached_property
    def ctx(self) -> Context:
        """The context of all hooks, on the CPU."""
        return self.blueprint.context(self.population, "cpu")

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
