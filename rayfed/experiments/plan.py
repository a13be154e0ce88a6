"""The plan of a simulation: all that it needs, made from a configuration and checked before anything starts."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rayfed.core.errors import UsageError
from rayfed.core.registry import ModuleSource
from rayfed.core.rng import global_generators_seeded, global_state_kept
from rayfed.data.population import MadeClients, Population, class_counts
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.checkpoint import configuration_hash
from rayfed.engine.evaluation import Evaluation
from rayfed.experiments.checks import CHECKS, CHECKS_OF_MODEL, go_through, settled
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.components import Component
from rayfed.experiments.config import Config
from rayfed.experiments.first_examples import input_type
from rayfed.experiments.given import Given
from rayfed.experiments.plan_blueprint import chosen_loss, planned_blueprint
from rayfed.experiments.plan_data import planned_population
from rayfed.experiments.plan_evaluation import planned_evaluation
from rayfed.experiments.plan_identity import identity_of, outcome_values
from rayfed.experiments.plan_loss import measured
from rayfed.experiments.plan_model import model_of
from rayfed.experiments.plan_record_privacy import check_record_privacy, with_solved_noise
from rayfed.experiments.proof import prove_training, why_not_at_once
from rayfed.experiments.user_code import own_names
from rayfed.metrics.cost import Cost, cost
from rayfed.models.base import check_model
from rayfed.records.files import Holding

MOST_CLIENTS_SHOWN = 1000
"""The most clients of a partition that is recorded for plots."""


@dataclass(frozen=True)
class Plan:
    """One trial, ready to run.

    Attributes:
        trial: The name of the trial: equal configurations have equal names, wherever they are placed.
        partition_seed: The seed with which the partition draws; None if it has none. The plan holds it, because the
            server may run on a machine that cannot import a user's own partition.
        clients_hash: A hash of the contents of clients given in Python.
        model_label, loss_label: The names of a model and a loss given in Python, such as "own:Net-1a2b3c".
        code_hash: A hash of the user's own code in this trial, None without any; see `rayfed.experiments.user_code`.
        base_hash: A hash of the model's constants, such as frozen weights, None without any.
        sources: The user's modules in which that code is, for machines without their files.
        keep_state: Whether a checkpoint of the final state is written also with checkpoint.every=0.
        unproven: Why the training of the user's model could not be compared with plain PyTorch.
        incomparable: The globals that the user's code reads and that neither name nor hash covers.
    """

    config: Config
    population: Population
    blueprint: Blueprint
    evaluation: Evaluation
    trial: str
    partition_seed: int | None = None
    clients_hash: str | None = None
    model_label: str | None = None
    loss_label: str | None = None
    code_hash: str | None = None
    base_hash: str | None = None
    sources: tuple[ModuleSource, ...] = ()
    keep_state: bool = False
    unproven: str | None = None
    incomparable: tuple[str, ...] = ()

    @property
    def keep_best(self) -> bool:
        """Whether the state of the round with the best validation score is kept beside the last one."""
        if not self.is_validated:
            return False
        best = self.config.checkpoint.best
        if best is None:
            return self.keep_state
        return best

    @property
    def is_validated(self) -> bool:
        """Whether there are validation scores."""
        return "val" in self.evaluation.splits and self.population.participants.have_validation

    @property
    def data_hash(self) -> str | None:
        """A hash of who holds which examples: of the partition, or of clients given in Python."""
        return self.population.partition_hash or self.clients_hash

    @cached_property
    def cost(self) -> Cost:
        """The cost of the model, without what a wrapping algorithm adds to it."""
        with global_state_kept():
            return cost(self.blueprint.model, self.population.shape, self.input_type)

    @property
    def input_type(self) -> torch.dtype:
        """The type in which inputs reach the model."""
        return input_type(self.population)

    @property
    def configuration_hash(self) -> str:
        """A hash of what determines the outcome, except code; checkpoints share it with the trial that resumes."""
        parts = [self.trial, outcome_values(self.config)]
        for value in (self.data_hash, self.model_label, self.loss_label):
            parts.append(value or "")
        if self.base_hash:
            parts.append(self.base_hash)
        return configuration_hash(*parts)

    def values(self) -> dict[str, Any]:
        """Return the row of the trials table, as far as it is known before the start."""
        values = self.config.tree()
        if self.clients_hash:
            values["data"] |= {"name": f"clients:{self.clients_hash}"}
        if self.model_label:
            values["model"] = {"name": self.model_label}
        if self.loss_label:
            values["loss"] = {"name": self.loss_label}
        values["seed"] = self.config.seed
        values |= self.evaluation.selection.values()
        values |= self.cost._asdict()
        values["partition_hash"] = self.data_hash
        values["partition_seed"] = self.partition_seed
        values["test_drawn"] = self.population.test_drawn
        values |= self.examples()
        values["clients_scored"] = None
        if isinstance(self.evaluation.clients, int):
            values["clients_scored"] = self.evaluation.clients
        values["code_hash"] = self.code_hash
        values["base_hash"] = self.base_hash
        return values

    def examples(self) -> dict[str, int]:
        """Return the numbers of examples of the participants, as columns of the table `trials`."""
        train, val, test = self.population.participants.sizes.sum(axis=0)
        return {"examples_train": int(train), "examples_val": int(val), "examples_test": int(test)}

    def holdings(self) -> list[Holding]:
        """Return how many examples of which class each client holds; nothing if there are too many clients to plot."""
        clients = self.population.clients
        if len(clients) > MOST_CLIENTS_SHOWN or isinstance(clients.source, MadeClients):
            return []
        return class_counts(self.population)


def make_plan(
    config: Config,
    given: Given | None = None,
    *,
    population: Population | None = None,
    tried: bool = False,
) -> Plan:
    """Load the data, build the model, and check that everything fits together.

    Args:
        config: The configuration.
        given: What the user gives in Python in place of parts of the configuration.
        population: The data of `config`, if the caller has loaded them already.
        tried: Whether another process has compared the training of the user's model with plain PyTorch.

    Raises:
        UsageError: The simulation cannot work; the message names the key at fault.
    """
    with global_generators_seeded(config.seed, "plan"):  # the user's code is tried, and may draw
        return _plan_of(config, given or Given(), population, tried=tried)


def _plan_of(config: Config, given: Given, population: Population | None, *, tried: bool) -> Plan:
    """Return the plan of a configuration with what was given in Python; see `make_plan`.

    The order counts. The meaning of outputs is measured with a model that takes the inputs. Most checks need it. Only
    training that has passed the checks is compared with plain PyTorch.
    """
    if given.model is None:
        check_model(config.model.name or "", config.model.options)
    loss = chosen_loss(config, given.loss)
    population, contents = planned_population(config, given, loss, population)
    model_key = "model"
    if given.model is None:
        model_key = f"model.name={config.model.name}"
    own_model = given.model is not None or _is_own(config.model)
    own_training = own_model or given.loss is not None or _is_own(config.loss)
    module, users = model_of(config, population, given.model, loss)
    has_own_code = own_training or given.clients is not None or bool(own_names(config))
    blueprint = replace(planned_blueprint(config, population, module, loss), own_code=has_own_code)
    trial = Trial(blueprint, population, model_key, own_model, loss)
    go_through(CHECKS_OF_MODEL, trial)
    trial = measured(trial)
    trial = trial.of(with_solved_noise(trial.blueprint, population))
    go_through(CHECKS, trial)
    unproven = None
    if own_training and not tried:
        unproven = prove_training(trial, users)
    trial = _vectorised_or_alone(settled(trial), own=own_training)
    evaluation = planned_evaluation(config, trial)
    check_record_privacy(config, trial.blueprint, population, evaluation)
    identity = identity_of(config, given, trial.blueprint, contents)
    return Plan(
        config=config,
        population=population,
        blueprint=trial.blueprint,
        evaluation=evaluation,
        unproven=unproven,
        **identity,
    )


def _vectorised_or_alone(trial: Trial, *, own: bool) -> Trial:
    """Return `trial` with `vmap_clients` 1 in place of None where clients that train at once get other weights.

    Args:
        own: Whether the model or the loss is the user's own. Those of rayfed get the same weights.

    Raises:
        UsageError: They get other weights, and the configuration asks for several clients at once.
    """
    width = trial.blueprint.vmap_clients
    if width == 1 or (width is None and not own):
        return trial
    obstacle = why_not_at_once(trial)
    if obstacle is None:
        return trial
    if width is None:
        return trial.at_once(1)
    raise UsageError(f"placement.vmap_clients={width}: {obstacle}; use placement.vmap_clients=1, or auto")


def _is_own(chosen: Component) -> bool:
    """Return whether a component is the user's own."""
    return ":" in (chosen.name or "")
