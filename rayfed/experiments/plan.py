"""The plan of a simulation: all that it needs, made from a configuration and checked before anything starts."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rayfed.algorithm import Phase
from rayfed.augment.base import Augment, NoAugment
from rayfed.core.errors import BadHook, UsageError
from rayfed.core.modules import constant_names
from rayfed.core.optim import SGD, Adam
from rayfed.core.outputs import scored_values
from rayfed.core.registry import ModuleSource, resolve
from rayfed.core.rng import floor_share, generator, global_generators_seeded, global_state_kept
from rayfed.core.round_record import Selection
from rayfed.core.round_schedule import Buffered
from rayfed.core.task import loss_on
from rayfed.core.trees import only, state_hash
from rayfed.data.loading import build_data, load, population_without_clients, population_without_domain
from rayfed.data.population import SPLITS, Client, MadeClients, Population, class_counts, population_hash
from rayfed.data.sets import TABLES
from rayfed.data.standardise import Kind, standardised
from rayfed.data.user_clients import Clients, user_population
from rayfed.data.without import names_in, other_options
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.checkpoint import configuration_hash
from rayfed.engine.clock import Availability, Clock
from rayfed.engine.evaluation import Evaluation, StopRule, check_metrics, chosen_metric, refuse_void_validation
from rayfed.experiments.checks import CHECKS, CHECKS_OF_MODEL, go_through, settled
from rayfed.experiments.checks.model import check_adaptation
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.components import Component
from rayfed.experiments.config import CHANNEL_PARTS, COMPONENTS, Config
from rayfed.experiments.device_profile import read_profile
from rayfed.experiments.first_examples import input_type
from rayfed.experiments.plan_channel import metrics_of, unscored, with_channel
from rayfed.experiments.plan_loss import measured
from rayfed.experiments.plan_model import ModelFactory, model_of
from rayfed.experiments.plan_record_privacy import check_record_privacy, with_solved_noise
from rayfed.experiments.proof import prove_training, why_not_at_once
from rayfed.experiments.user_code import display_name, own_code, own_names
from rayfed.losses.base import CrossEntropy, Loss, build_loss
from rayfed.metrics import DEFAULTS, METRICS, default_metrics
from rayfed.metrics.base import Metric, OfPredictions
from rayfed.metrics.cost import Cost, cost
from rayfed.metrics.from_torchmetrics import TorchMetric
from rayfed.models.base import check_model
from rayfed.records.files import Holding
from rayfed.records.trials import recorded_value

MOST_CLIENTS_SHOWN = 1000
"""The most clients of a partition that is recorded for plots."""

MOST_CLIENTS_SCORED = 10_000
"""The most participants that are all scored by default."""

CLIENTS_SCORED = 1000
"""The size of the sample of participants that is scored where there are more."""


def trial_name(config: Config, extra: str = "") -> str:
    """Return the name of a trial: its algorithm, its seed, and a hash of every value that can change its outcome.

    Places of hosts and results do not count. The number of rounds counts only if the first rounds depend on it, because
    a trial continues with more rounds. `extra` has the hashes of clients, model and loss given in Python.
    """
    digest = hashlib.blake2b((outcome_values(config) + extra).encode(), digest_size=4)
    name = config.algorithm_name.rpartition(":")[2]
    return f"{name}-seed{config.seed}-{digest.hexdigest()}"


def outcome_values(config: Config) -> str:
    """Return as JSON the values of a configuration that distinguish trials; see `trial_name`."""
    tree = config.tree()
    for key in ("results", "experiment", "resume", "checkpoint", "faults", "state", "tracking"):
        tree.pop(key)
    tree["evaluate"].pop("predictions")
    if not depends_on_rounds(config):
        tree.pop("rounds")
    if tree["partition"].get("seed") is None:
        tree["partition"]["seed"] = config.seed
    tree["placement"] = _placement_values(tree["placement"])
    for key in CHANNEL_PARTS:
        if tree[key] == {"name": COMPONENTS[key]}:
            tree.pop(key)
    return json.dumps(tree, sort_keys=True, default=str)


def _placement_values(placement: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a placement that can change bits; those of kernels only where they are on."""
    values = {key: placement[key] for key in ("vmap_clients", "threads", "gpus")}
    for key in ("deterministic", "tf32"):
        if placement[key]:
            values[key] = True
    return values


def depends_on_rounds(config: Config) -> bool:
    """Return whether the first rounds depend on the number of rounds."""
    private = config.privacy.name != "none" and config.privacy.build().depends_on_rounds
    scheduled = config.lr_schedule.build().depends_on_rounds
    of_records = config.local.privacy
    solved = of_records is not None and of_records.target_epsilon is not None
    return bool(scheduled or config.algorithm.traits.depends_on_rounds or private or solved)


FEW_PREDICTIONS = 20_000
"""The most outputs for test examples, in numbers per evaluated round, that are recorded by default."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What was given in Python in place of parts of the configuration; see `make_plan`."""

    clients: Sequence[Client | Mapping[str, Any]] | Clients | None = None
    model: ModelFactory | nn.Module | None = None
    loss: Loss | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.clients, Iterable) and not isinstance(self.clients, (Mapping, str)):
            object.__setattr__(self, "clients", tuple(self.clients))  # they are read several times

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())


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
    """Return the plan of a configuration with what was given in Python; see `make_plan`."""
    if given.model is None:
        check_model(config.model.name or "", config.model.options)
    loss = _chosen_loss(config, given.loss)
    population, contents = _population(config, given, loss, population)
    where = "model"
    if given.model is None:
        where = f"model.name={config.model.name}"
    own_model = given.model is not None or _own(config.model)
    is_own = own_model or given.loss is not None or _own(config.loss)
    module, users = model_of(config, population, given.model, loss)
    blueprint = _blueprint(config, population, module, loss)
    has_own_code = is_own or given.clients is not None or bool(own_names(config))
    blueprint = replace(blueprint, own_code=has_own_code)
    trial = Trial(blueprint, population, where, own_model, loss)
    go_through(CHECKS_OF_MODEL, trial)
    trial = measured(trial)
    trial = trial.of(with_solved_noise(trial.blueprint, population))
    go_through(CHECKS, trial)
    unproven = None
    if is_own and not tried:
        unproven = prove_training(trial, users)
    trial = _vectorised_or_alone(settled(trial), own=is_own)
    evaluation = _evaluation(config, trial)
    check_record_privacy(config, trial.blueprint, population, evaluation)
    identity = _identity(config, given, trial.blueprint, contents)
    return Plan(
        config=config,
        population=population,
        blueprint=trial.blueprint,
        evaluation=evaluation,
        unproven=unproven,
        **identity,
    )


def _population(config: Config, given: Given, loss: Loss, population: Population | None) -> tuple[Population, str]:
    """Return the clients, and a hash of the contents of those given in Python ("" without any).

    Args:
        population: The data of `config`, if they are loaded already.
    """
    contents = ""
    if given.clients is not None:
        _refuse_named_data(config)
        population = user_population(given.clients, given.num_classes, classes=isinstance(loss, CrossEntropy))
        contents = population_hash(population)  # before unseen clients are drawn, so that the seed does not change it
        population = population_without_clients(population, names_in(config.data.options))
        population = population_without_domain(population, config.leave_out)
    elif population is None:
        population = load_data(config)
    population = with_unseen_clients(population, config.unseen_clients or config.unseen_share, config.seed)
    kind = standardised_by(config)
    if kind:
        population = standardised(population, kind)
    _refuse_empty_clients(population)
    _refuse_parts(config, population)
    return population, contents


def _refuse_named_data(config: Config) -> None:
    """Refuse keys of data and partition beside clients given in Python."""
    key = None
    if config.partition.options or config.partition.name is not None:
        key = "partition"
    elif other_options(config.data.options) or config.data.name != "mini_digits":
        key = "data"
    if key is not None:
        kept = " except data.without" * (key == "data")
        raise UsageError(f"{key}.*: clients= are given in place of data and partition; leave out {key}.*{kept}")


def _refuse_empty_clients(population: Population) -> None:
    """Refuse clients without an example to train on."""
    empty = (population.clients.train_sizes() == 0).nonzero()[0]
    if len(empty):
        raise UsageError(
            f"{population.name}: client {population.clients.id(int(empty[0]))} has no training examples, as "
            f"{len(empty)} of {len(population.clients)} clients; leave them out, or give each at least one"
        )


def _refuse_parts(config: Config, population: Population) -> None:
    """Refuse inputs of several parts where something computes with inputs of one array."""
    if population.layout is None:
        return
    key = None
    if config.algorithm.traits.computes_with_inputs:
        key = f"algorithm.name={config.algorithm_name}"
    elif config.augment.name not in (None, "none"):
        key = f"augment.name={config.augment.name}"
    if key is not None:
        raise UsageError(f"{key}: computes with inputs of one array, and these have {population.layout}")


def _identity(config: Config, given: Given, blueprint: Blueprint, contents: str) -> dict[str, Any]:
    """Return the fields of a plan that tell its trial from others, after checking that `resume` finds no other.

    Args:
        contents: The hash of the clients given in Python.
    """
    model_label = None
    weights_hash = ""
    weights = dict(blueprint.model.named_parameters()) | dict(blueprint.model.named_buffers())
    if given.model is not None:
        model_label = display_name(given.model, blueprint.model)
        weights_hash = state_hash(weights)
    loss_label = None
    if given.loss is not None:
        loss_label = display_name(given.loss, given.loss)
    trial = trial_name(config, f"{contents}{weights_hash}{model_label or ''}{loss_label or ''}")
    code = own_code(own_names(config), given.model, given.loss, given.clients)
    fixed = constant_names(blueprint.model, frozen_batch_norm=config.batch_norm == "frozen")
    base_hash = None
    if fixed:
        base_hash = state_hash(only(weights, fixed))
    _check_resumed(config, trial, code.digest, base_hash)
    seed = None
    if given.clients is None:
        seed = partition_seed(config)
    return {
        "trial": trial,
        "partition_seed": seed,
        "clients_hash": contents[:12] or None,
        "model_label": model_label,
        "loss_label": loss_label,
        "code_hash": code.digest,
        "base_hash": base_hash,
        "sources": code.sources,
        "incomparable": code.incomparable,
    }


def _vectorised_or_alone(trial: Trial, *, own: bool) -> Trial:
    """Return `trial` with `vmap_clients` 1 in place of None where clients that train at once get other weights.

    Raises:
        UsageError: They do, and the configuration asks for several at once.
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


def _check_resumed(config: Config, trial: str, code: str | None, base: str | None) -> None:
    """Raise UsageError if `config` resumes `trial`, which had other code or a model of other frozen weights."""
    if not config.resume:
        return

    def has_changed(column: str, now: str | None) -> bool:
        before = recorded_value(config.results, config.experiment, trial, column)
        return before not in (None, now)

    if config.resume is True and has_changed("code_hash", code):
        raise _changed(config, trial, "your own code", "resume=anyway if only comments did")
    if has_changed("base_hash", base):
        raise _changed(config, trial, "the frozen weights of the model", "the same weights")


def _changed(config: Config, trial: str, what: str, remedy: str) -> UsageError:
    return UsageError(
        f"resume={str(config.resume).lower()}: {what} changed since {trial} ran; give {remedy}, another experiment, or "
        "resume=false"
    )


def load_data(config: Config) -> Population:
    """Return the data of a configuration, before unseen clients are drawn."""
    data = config.data
    partition = config.partition
    return load(data.name or "", data.options, partition.name, partition.options, config.leave_out, config.seed)


def standardised_by(config: Config) -> Kind | None:
    """Return by which rows the columns of a table are standardised (`data.standardize`), None: they are not."""
    if config.data.name not in TABLES:
        return None
    kind: Kind | None = config.data.options.get("standardize")
    return kind


def data_key(config: Config) -> str:
    """Return a string that two configurations share if their clients hold the same examples."""
    return repr((config.data, config.partition, config.leave_out, partition_seed(config)))


def partition_seed(config: Config) -> int | None:
    """Return the seed with which the partition of `config` draws; None if a user's own partition has none."""
    data = config.data
    partition = config.partition
    _, built = build_data(data.name or "", data.options, partition.name, partition.options, config.seed)
    seed = getattr(built, "seed", None)
    if seed is None:
        return None
    return int(seed)


def with_unseen_clients(population: Population, count: int | float, seed: int) -> Population:
    """Draw unseen clients: they take no part in training and join after it, as DBE's "new participants".

    Participants come first and unseen clients last, both in the order of their ids.

    Args:
        population: The clients. Unseen clients of an earlier draw are participants again.
        count: The number of unseen clients, or (a float) a share of all clients, rounded down.
        seed: The seed of the draw.

    Raises:
        UsageError: No client would be left to train.
    """
    clients = population.clients.select(np.argsort(population.clients.ids, kind="stable"))
    if isinstance(count, float):
        number = floor_share(len(clients), count)
    else:
        number = count
    if number >= len(clients):
        raise UsageError(f"unseen_clients={count}: there are {len(clients)} clients, and at least one must train")
    is_unseen = np.zeros(len(clients), bool)
    is_unseen[generator(seed, "unseen clients").choice(len(clients), number, replace=False)] = True
    ordered = clients.select(np.argsort(is_unseen, kind="stable"))
    return replace(population, clients=ordered, unseen_clients=number)


def _own(chosen: Component) -> bool:
    """Return whether a component is the user's own."""
    return ":" in (chosen.name or "")


def _evaluation(config: Config, trial: Trial) -> Evaluation:
    """Return when and what to score, after checking that it can be scored."""
    population = trial.population
    server_model, is_whole = trial.global_model
    points = _points(config, has_global=server_model is not None)
    if "adapted" in points or population.unseen_clients:
        of_participants = "adapted" in points
        check_adaptation(trial, config.evaluate.adapt_epochs, of_participants=of_participants)
    left_out = unscored(trial.blueprint.algorithm)
    evaluation = Evaluation(
        every=config.evaluate.every,
        initial=config.evaluate.initial,
        points=points,
        splits=tuple(config.evaluate.splits),
        clients=_clients_scored(config, len(population.participants) - len(left_out)),
        adapt_epochs=config.evaluate.adapt_epochs,
        metrics=_metrics(config, trial),
        left_out=left_out,
    )
    evaluation = replace(evaluation, keep_predictions=_keeps_predictions(config, trial))
    check_metrics(trial.blueprint, population, evaluation, whole=is_whole)
    _check_torchmetrics(trial, evaluation)
    _try_own_metrics(trial, evaluation.metrics)
    selection = _selection(config, trial, points[0], evaluation.metrics)
    stopping = config.early_stopping
    rule = None
    if stopping.patience is not None:
        rule = StopRule(patience=stopping.patience, min_delta=stopping.min_delta, selection=selection)
    return replace(evaluation, selection=selection, stop_rule=rule)


def _clients_scored(config: Config, participants: int) -> str | int:
    """Return which or how many of the participants are scored."""
    clients = config.evaluate.clients
    if clients is None:
        if participants <= MOST_CLIENTS_SCORED:
            return "all"
        clients = CLIENTS_SCORED
    if isinstance(clients, int) and clients > participants:
        raise UsageError(f"evaluate.clients={clients}: there are {participants} participants; give fewer, or all")
    return clients


def _metrics(config: Config, trial: Trial) -> dict[str, Metric]:
    """Return the metrics by name: the default ones of the outputs, those of the method, and those of `config`."""
    metrics: dict[str, Metric] = {}
    for name in default_metrics(trial.blueprint.outputs.kind, trial.population.clients[0].train.y.ndim):
        kind = resolve(METRICS[name], {}, where="metrics")
        metrics[name] = kind()
    metrics |= metrics_of(trial.blueprint.algorithm)
    metrics |= config.metrics
    return metrics


def _check_torchmetrics(trial: Trial, evaluation: Evaluation) -> None:
    """Raise UsageError if a metric of TorchMetrics cannot score the outputs of the model."""
    metrics = [metric for metric in evaluation.metrics.values() if isinstance(metric, TorchMetric)]
    if not metrics:
        return
    outputs, labels = trial.first_outputs(8)
    for metric in metrics:
        metric.check(trial.blueprint.outputs, outputs, labels)


def _try_own_metrics(trial: Trial, metrics: Mapping[str, Metric]) -> None:
    """Raise UsageError if a metric of the user's own returns something else than values for a few examples.

    What it raises itself is told by the trial, which fails, and the others go on.
    """
    own = {name: metric for name, metric in metrics.items() if ":" in name and isinstance(metric, OfPredictions)}
    if not own:
        return
    raw = trial.first_outputs(8)
    scored = scored_values(trial.blueprint.outputs, *raw)
    for name, metric in own.items():
        arguments = scored if metric.requires_classes and scored is not None else raw
        try:
            metric.values(*(values.clone() for values in arguments))  # it may change them in place
        except BadHook as error:
            raise UsageError(f"metrics.{name}: {error}") from error
        except Exception:
            continue


def _keeps_predictions(config: Config, trial: Trial) -> bool:
    """Return whether the outputs for test examples are recorded: if asked for, or by default if they are few."""
    if config.evaluate.predictions is not None:
        return config.evaluate.predictions
    kind = trial.blueprint.outputs.kind
    if kind in ("positions", "unknown"):
        return False
    population = trial.population
    examples = sum(len(test.examples) for test in population.tests)
    if "test" in config.evaluate.splits:
        examples += int(population.participants.sizes[:, SPLITS.index("test")].sum())
    outputs = population.num_classes
    if kind in ("labels", "numbers"):
        outputs = math.prod(population.clients[0].train.y.shape[1:])
    return examples * outputs <= FEW_PREDICTIONS


def _selection(config: Config, trial: Trial, point: str, metrics: Mapping[str, Metric]) -> Selection:
    """Return what chooses rounds, after checking that the metric is measured and that there are validation scores."""
    population = trial.population
    meaning = trial.blueprint.outputs
    metric = config.select.metric
    needing: dict[str, Any] = {
        "select.metric": metric,
        "early_stopping.patience": config.early_stopping.patience,
        "checkpoint.best": config.checkpoint.best or None,
    }
    for key, value in needing.items():
        if value is not None:
            check_validated(key, value, population, config.evaluate.splits)
            refuse_void_validation(key, value, population, meaning)
    shape: tuple[int, ...] = ()
    has_no_default = metric is None and meaning.kind not in DEFAULTS
    if metric not in ("accuracy", "loss") and not has_no_default:
        outputs, _ = trial.first_outputs(2)
        shape = outputs.shape[1:]
    name, higher_is_better = chosen_metric(metric, config.select.mode, metrics, population, meaning, shape)
    return Selection(metric=name, higher_is_better=higher_is_better, point=point)


def check_validated(key: str, value: Any, population: Population, splits: Sequence[str]) -> None:
    """Raise UsageError if there are no validation scores, which the key needs."""
    if "val" not in splits or not population.participants.have_validation:
        raise UsageError(
            f"{key}={value}: needs validation scores; give partition.validation above 0, and evaluate.splits with val"
        )


def _chosen_loss(config: Config, given: Loss | None) -> Loss:
    """Return the loss given in Python, else the one that `config` names.

    Raises:
        UsageError: Both are given, or there is no such loss.
    """
    name = config.loss.name or ""
    options = config.loss.options
    if given is None:
        with global_generators_seeded(config.seed, "loss"):
            return build_loss(name, options)
    if options or name != "cross_entropy":
        key = next(iter(options), f"name={name}")
        raise UsageError(f"loss.{key}: loss= is given in place of loss.*; leave out one of them")
    return loss_on("cpu", given)


def _blueprint(config: Config, population: Population, model: nn.Module, loss: Loss) -> Blueprint:
    augment = _augment(config)
    schedule: Buffered | None = None
    if config.schedule.name == "buffered":
        schedule = config.schedule.build()
    cohort = _cohort(config, len(population.participants), schedule)
    scoring_loss = loss
    if loss == CrossEntropy():
        scoring_loss = F.cross_entropy
    width: Any = config.placement.vmap_clients
    if isinstance(width, str):
        width = None
    return Blueprint(
        algorithm=with_channel(config, population, cohort),
        model=model,
        loss=scoring_loss,
        batch_norm=config.batch_norm,
        optimizer=_optimizer(config),
        local=_local_phase(config),
        batch_size=config.local.batch_size,
        drop_last=config.local.drop_last,
        rounds=config.rounds,
        cohort=cohort,
        seed=config.seed,
        keep_optimizer=config.local.keep_optimizer,
        vmap_clients=width,
        threads=config.placement.threads,
        deterministic=config.placement.deterministic,
        tf32=config.placement.tf32,
        cuda_graphs=config.placement.cuda_graphs,
        bf16=config.local.precision == "bf16",
        data_on_device=config.placement.data_on_device,
        augment=augment,
        training_loss=_training_loss(config, loss),
        schedule=config.lr_schedule.build(),
        availability=Availability(**dataclasses.asdict(config.availability)),
        clock=_clock(config, population),
        buffered=schedule,
        sampler=config.sampling.build(),
    )


def _cohort(config: Config, participants: int, schedule: Buffered | None) -> int:
    """Return how many clients a round has."""
    if schedule is not None:
        return schedule.buffer
    cohort = config.cohort
    if cohort is None:
        cohort = max(1, floor_share(participants, config.cohort_share))
    if cohort > participants:
        raise UsageError(f"cohort={cohort}: there are {participants} clients; give at most that, or a cohort_share")
    return cohort


def _local_phase(config: Config) -> Phase:
    """Return how long clients train: one epoch, unless epochs or steps are given."""
    epochs = config.local.epochs or None
    if epochs is None and not config.local.steps:
        epochs = 1
    return Phase("train", epochs, config.local.steps)


def _augment(config: Config) -> Augment | None:
    augment: Augment = config.augment.build()
    if isinstance(augment, NoAugment):
        return None
    return augment


def _clock(config: Config, population: Population) -> Clock:
    options = dataclasses.asdict(config.clock)
    path = options.pop("profile")
    if not path:
        return Clock(**options, profile=())
    ids = [population.clients.id(place) for place in range(len(population.participants))]
    return Clock(**options, profile=read_profile(path, ids))


def _optimizer(config: Config) -> SGD | Adam:
    local = config.local
    common: dict[str, Any] = {"lr": local.lr, "weight_decay": local.weight_decay, "clip_norm": local.clip_norm}
    if local.optimizer == "sgd":
        return SGD(momentum=local.momentum, nesterov=local.nesterov, **common)
    return Adam(decoupled=local.optimizer == "adamw", **common)


def _training_loss(config: Config, loss: Loss) -> Loss | None:
    """Return the loss that trains models; None if it is the loss that scores them."""
    smoothing = config.local.label_smoothing
    if not smoothing:
        return None
    if not isinstance(loss, CrossEntropy):
        raise UsageError(
            f"local.label_smoothing={smoothing}: smooths the labels of cross-entropy, and another loss is given; "
            "smooth them there, or leave it out"
        )
    return partial(loss, label_smoothing=smoothing)


def _points(config: Config, *, has_global: bool) -> tuple[str, ...]:
    """Return the points to score. The point at which the algorithm's paper scores comes first."""
    requested = config.evaluate.points
    default = config.algorithm.traits.default_eval_point
    if default == "global" and not has_global:
        default = "downloaded"
    if requested and "global" in requested and not has_global:
        raise UsageError(
            f"evaluate.points: algorithm {config.algorithm_name} has no global model here, since parts of the model "
            f"stay with the clients; use evaluate.points=[{default}]"
        )
    return tuple(sorted(requested or (default,), key=lambda point: point != default))
