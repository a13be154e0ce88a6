"""The plan of a simulation: all that it needs, made from a configuration and checked before anything starts."""

import copy
import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rayfed.algorithm import Phase
from rayfed.augment.base import Augment, build_augment
from rayfed.core.best_round import Selection
from rayfed.core.errors import UsageError
from rayfed.core.lr_schedule import build_schedule
from rayfed.core.network import weights_of
from rayfed.core.optim import SGD, Adam
from rayfed.core.outputs import meaning_of_outputs
from rayfed.core.registry import in_one_line
from rayfed.core.rng import global_generators_seeded, torch_state_kept
from rayfed.data.draws import floor_share
from rayfed.data.loading import build_data, load, population_without_domain
from rayfed.data.population import Client, Population, class_counts, population_hash
from rayfed.data.user_clients import user_population
from rayfed.engine.availability import Availability
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.checkpoint import configuration_hash
from rayfed.engine.early_stopping import StopRule
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.metric_checks import check_metrics, chosen_metric
from rayfed.engine.serialization import state_hash
from rayfed.experiments.config import Config
from rayfed.experiments.naming import outcome_values, trial_name
from rayfed.experiments.unseen_clients import with_unseen_clients
from rayfed.experiments.user_code import (
    ModuleSource,
    checked_code_hash,
    display_name,
    given_objects,
    model_hash,
    module_sources,
    named_objects,
    object_hash,
)
from rayfed.losses.base import Loss, build_loss, needed_outputs
from rayfed.losses.torch_losses import CrossEntropy
from rayfed.metrics.cost import Cost, cost
from rayfed.models.build import build_model, check_model
from rayfed.models.split_model import ensure_split, initialise_lazy_layers
from rayfed.records.holdings import Holding
from rayfed.records.storage import one_line, open_storage
from rayfed.sampling.base import build_sampler

ModelFactory = Callable[[], nn.Module]


MOST_CLIENTS_SHOWN = 1000
"""The most clients of a partition that is recorded for plots."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What was given in Python in place of parts of the configuration; see `make_plan`."""

    clients: Sequence[Client | Mapping[str, Any]] | None = None
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
        partition_seed: The seed with which the partition draws; None if it has none. It is found here, since the server
            may run on a machine that cannot import a user's own partition.
        given_hash: What was given in Python, as far as the name of the trial depends on it.
        clients_hash: A hash of the contents of clients given in Python.
        model_label, loss_label: The names of a model and a loss given in Python, such as "own:Net-1a2b3c".
        code_hash: A hash of the user's own code in this trial, None without any; see `rayfed.experiments.user_code`.
        sources: The user's modules in which that code is, for machines without their files.
        keep_state: Whether a checkpoint of the final state is written also with checkpoint.every=0.
        profile: Whether some rounds are traced; see `rayfed.experiments.profile`.
    """

    config: Config
    population: Population
    blueprint: Blueprint
    evaluation: Evaluation
    trial: str
    partition_seed: int | None = None
    given_hash: str = ""
    clients_hash: str | None = None
    model_label: str | None = None
    loss_label: str | None = None
    code_hash: str | None = None
    sources: tuple[ModuleSource, ...] = ()
    keep_state: bool = False
    profile: bool = False

    @property
    def keep_best(self) -> bool:
        """Whether the state of the round with the best validation score is kept beside the last one."""
        best = self.config.checkpoint.best
        return self.is_validated and (self.keep_state if best is None else best)

    @property
    def is_validated(self) -> bool:
        """Whether there are validation scores."""
        return "val" in self.evaluation.splits and any(len(client.val) for client in self.population.participants)

    @property
    def data_hash(self) -> str | None:
        """A hash of who holds which examples: of the partition, or of clients given in Python."""
        return self.population.partition_hash or self.clients_hash

    @cached_property
    def cost(self) -> Cost:
        """The cost of the model, without what a wrapping algorithm adds to it."""
        with torch_state_kept():
            return cost(self.blueprint.model, self.population.shape, self.input_type)

    @property
    def input_type(self) -> torch.dtype:
        """The type in which inputs reach the model."""
        return _input_type(self.population)

    @property
    def configuration_hash(self) -> str:
        """A hash of what determines the outcome, except code; checkpoints share it with the trial that resumes."""
        hashes = self.data_hash, self.model_label, self.loss_label
        return configuration_hash(self.trial, outcome_values(self.config), *(value or "" for value in hashes))

    def values(self) -> dict[str, Any]:
        """Return the row of the trials table, as far as it is known before the start."""
        data = self.clients_hash and f"clients:{self.clients_hash}"
        labels = {"data": data, "model": self.model_label, "loss": self.loss_label}
        return {
            **self.config.tree(),
            **{group: {"name": label} for group, label in labels.items() if label},
            "seed": self.config.seed,
            **self.evaluation.selection.values(),
            **self.cost._asdict(),
            "partition_hash": self.data_hash,
            "partition_seed": self.partition_seed,
            "code_hash": self.code_hash,
        }

    def holdings(self) -> list[Holding]:
        """Return who holds how many examples of which class; nothing if there are too many clients to look at."""
        return class_counts(self.population) if len(self.population.clients) <= MOST_CLIENTS_SHOWN else []

    def model_name(self) -> str:
        return self.model_label or str(self.config.model.name)

    def loss_name(self) -> str:
        return self.loss_label or str(self.config.loss.name)


def partition_seed(config: Config) -> int | None:
    """Return the seed with which the partition of `config` draws; None if a user's own partition has none."""
    data, partition = config.data, config.partition
    built = build_data(data.name or "", data.options, partition.name, partition.options, config.seed)[1]
    seed = getattr(built, "seed", None)
    return None if seed is None else int(seed)


def data_key(config: Config) -> str:
    """Return a string that two configurations share if their clients hold the same examples."""
    return repr((config.data, config.partition, config.leave_out, partition_seed(config)))


def load_data(config: Config) -> Population:
    """Return the data of a configuration, before unseen clients are drawn."""
    data, partition = config.data, config.partition
    return load(data.name or "", data.options, partition.name, partition.options, config.leave_out, config.seed)


def make_plan(
    config: Config,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | None = None,
    model: ModelFactory | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
    population: Population | None = None,
) -> Plan:
    """Load the data, build the model, and check that everything fits together.

    Args:
        config: The configuration.
        clients: The user's own clients, in place of data and partition; see `user_population`.
        model: A factory of a module (or a module), in place of model.name.
        loss: (logits, y) -> scalar mean over the batch, in place of loss.name.
        num_classes: The number of classes of `clients`; by default one more than the largest label.
        population: The data of `config`, if the caller has loaded them already.

    Raises:
        UsageError: The simulation cannot work; the message names the key at fault.
    """
    augment = build_augment(config.augment.name or "none", config.augment.options)
    results = open_storage(config.results)
    if results.local is not None:
        for path in (results.local, results.local / config.experiment):
            try:
                is_file = path.exists() and not path.is_dir()
            except OSError as error:  # such as a name that is too long
                raise UsageError(f"results={config.results[:200]}: {error.strerror}; give another folder") from error
            if is_file:
                raise UsageError(f"results={config.results}: {path} is a file, not a folder")
    if model is None:
        check_model(config.model.name or "", config.model.options)
    chosen_loss = _chosen_loss(config, loss)
    contents = ""
    if clients is not None:
        _check_no_other_data(config)
        population = user_population(clients, num_classes, classes=isinstance(chosen_loss, CrossEntropy))
        contents = population_hash(population)  # before unseen clients are drawn, so that the seed does not change it
        population = population_without_domain(population, config.leave_out)
    elif population is None:
        population = load_data(config)
    population = with_unseen_clients(population, config.unseen_clients, config.seed)
    blueprint = _blueprint(config, population, augment, model, chosen_loss)
    name = config.model.name or ""
    own_model = "model" if model is not None else f"model.name={name}" if ":" in name else None
    if own_model:
        _check_token_ids(blueprint, population, own_model)
    if augment is not None and ":" in (config.augment.name or ""):
        _check_augment(augment, population, f"augment.name={config.augment.name}")
    _check_input_type(blueprint, population)
    if chosen_loss != CrossEntropy():
        blueprint = _checked_loss(blueprint, population)
    blueprint.check(population)
    server_model, is_whole = blueprint.global_model(population)
    points = _points(config, has_global=server_model is not None)
    if "adapted" in points or population.unseen_clients:
        blueprint.check_adaptation(population, config.evaluate.adapt_epochs, of_participants="adapted" in points)
    evaluation = Evaluation(
        every=config.evaluate.every,
        initial=config.evaluate.initial,
        points=points,
        splits=tuple(config.evaluate.splits),
        clients=config.evaluate.clients,
        adapt_epochs=config.evaluate.adapt_epochs,
        metrics=config.metrics,
    )
    check_metrics(blueprint, population, evaluation, whole=is_whole)
    if isinstance(chosen_loss, CrossEntropy) and own_model:
        _check_logits(blueprint, population, own_model)
    selection = _selection(config, blueprint, population, points[0])
    evaluation = replace(evaluation, selection=selection, stop_rule=_stop_rule(config, selection))
    model_label = None if model is None else display_name(model, model_hash(model, blueprint.model))
    loss_label = None if loss is None else display_name(loss, object_hash(loss))
    weights_hash = "" if model is None else state_hash(weights_of(blueprint.model))
    given_hash = f"{contents}{weights_hash}{model_label or ''}{loss_label or ''}"
    trial = trial_name(config, given_hash)
    objects = named_objects(config) | given_objects(model, loss, clients)
    code_hash = checked_code_hash(config, trial, objects)
    return Plan(
        config=config,
        population=population,
        blueprint=blueprint,
        evaluation=evaluation,
        trial=trial,
        partition_seed=partition_seed(config) if clients is None else None,
        given_hash=given_hash,
        clients_hash=contents[:12] or None,
        model_label=model_label,
        loss_label=loss_label,
        code_hash=code_hash,
        sources=() if code_hash is None else tuple(module_sources(objects)),
    )


def _selection(config: Config, blueprint: Blueprint, population: Population, point: str) -> Selection:
    """Return what chooses rounds, after checking that it is going to be there where it was asked for."""
    metric, mode = config.select.metric, config.select.mode
    keys = ("select.metric", metric), ("early_stopping.patience", config.early_stopping.patience)
    for key, value in (*keys, ("checkpoint.best", config.checkpoint.best or None)):
        if value is not None and not any(len(client.val) for client in population.participants):
            raise UsageError(
                f"{key}={value}: needs validation scores, but no client has validation data; give partition.validation"
            )
    shape = () if metric in (None, "accuracy", "loss") else _first_outputs(blueprint, population, 1)[0].shape[1:]
    name, higher_is_better = chosen_metric(metric, mode, config.metrics, population, blueprint.outputs, shape)
    return Selection(metric=name, higher_is_better=higher_is_better, point=point)


def _chosen_loss(config: Config, given: Loss | None) -> Loss:
    """Return the loss given in Python, else the one that `config` names.

    Raises:
        UsageError: Both are given, or there is no such loss.
    """
    name, options = config.loss.name or "", config.loss.options
    if given is None:
        return build_loss(name, options)
    if options or name != "cross_entropy":
        key = next(iter(options), f"name={name}")
        raise UsageError(f"loss.{key}: loss= is given in place of loss.*; leave out one of them")
    return given


def _stop_rule(config: Config, selection: Selection) -> StopRule | None:
    options = config.early_stopping
    if options.patience is None:
        return None
    return StopRule(patience=options.patience, min_delta=options.min_delta, selection=selection)


def _check_no_other_data(config: Config) -> None:
    """Raise UsageError if `config` names data or a partition beside the user's own clients."""
    for key, named, default in (("partition", config.partition, None), ("data", config.data, "mini_digits")):
        given = [*([f"name={named.name}"] if named.name != default else []), *named.options]
        if given:
            raise UsageError(f"{key}.{given[0]}: clients= are given in place of data and partition; leave out {key}.*")


def _blueprint(
    config: Config,
    population: Population,
    augment: Augment | None,
    model: ModelFactory | nn.Module | None,
    loss: Loss,
) -> Blueprint:
    cohort = _cohort_size(config.cohort, len(population.participants))
    return Blueprint(
        algorithm=config.algorithm,
        model=_model(config, population, model, loss),
        loss=F.cross_entropy if loss == CrossEntropy() else loss,
        batch_norm=config.batch_norm,
        optimizer=_optimizer(config),
        local=Phase("train", config.local.epochs or (None if config.local.steps else 1), config.local.steps),
        batch_size=config.local.batch_size,
        drop_last=config.local.drop_last,
        rounds=config.rounds,
        cohort=cohort,
        seed=config.seed,
        keep_optimizer=config.local.keep_optimizer,
        vmap_clients=config.placement.vmap_clients,
        threads=config.placement.threads,
        data_on_device=config.placement.data_on_device,
        augment=augment,
        training_loss=_training_loss(config, loss),
        schedule=build_schedule(config.lr_schedule.name or "", config.lr_schedule.options),
        availability=Availability(**dataclasses.asdict(config.availability)),
        sampler=build_sampler(config.sampling.name or "uniform", config.sampling.options),
    )


def _model(config: Config, population: Population, model: ModelFactory | nn.Module | None, loss: Loss) -> nn.Module:
    """Build the model with the weights that follow from the seed, split into features and head."""
    dtype = _input_type(population)
    outputs = needed_outputs(loss, population.clients[0].train.y.shape[1:], population.num_classes)
    with global_generators_seeded(config.seed, "model"):
        if model is None:
            name, options = config.model.name or "", config.model.options
            built = build_model(name, options, population.shape, outputs, dtype)
            if not dtype.is_floating_point and ":" not in name:
                _check_vocabulary(built, population)
            return built
        given = fresh_module(model, population.shape, dtype)
        return given if hasattr(given, "feature_shape") else ensure_split(given, population.shape, dtype)


def fresh_module(
    model: ModelFactory | nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return the user's module, newly made or as a copy, because a model that is split is changed.

    Args:
        model: The module, or a function that makes it.
        shape: Shape of one input, by which lazy layers of a new module get their weights.
        dtype: Type of the inputs.

    Raises:
        UsageError: There is no module, or it cannot be copied.
    """
    module = model if isinstance(model, nn.Module) else _made(model)
    if module is not model:
        initialise_lazy_layers(module, shape, dtype)
    elif any(is_lazy(value) for value in (*module.parameters(), *module.buffers())):
        raise UsageError(
            f"model: a {type(module).__name__} with lazy layers that have no weights yet; give a function that makes "
            "it, so that they are drawn by the seed"
        )
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"model: {type(module).__name__} cannot be copied ({one_line(error)})") from error


def _made(model: ModelFactory) -> nn.Module:
    expected = "model: expected a torch.nn.Module, or a function without arguments that makes one"
    if not callable(model):
        named = f"; to choose one by name, write model.name={model}" if isinstance(model, str) else ""
        raise UsageError(f"{expected}; got {type(model).__name__}{named}")
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise UsageError(f"{expected}; calling {name}() fails ({error})") from error
    except ValueError:  # some callables have no signature
        pass
    module = model()
    if not isinstance(module, nn.Module):
        raise UsageError(f"{expected}; got a function that returns {type(module).__name__}")
    return module


def _input_type(population: Population) -> torch.dtype:
    """Return the type in which inputs reach the model: images arrive as normalised floats."""
    dtype = torch.from_numpy(population.clients[0].train.x[:0]).dtype
    return torch.float32 if dtype == torch.uint8 else dtype


def _check_vocabulary(model: nn.Module, population: Population) -> None:
    """Raise UsageError if the embedding has no vector for some token of the data, that of the test sets included."""
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if not sizes:
        return
    bounds = [(int(block.min()), int(block.max())) for block in _blocks(population)]
    lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if lowest < 0:
        raise UsageError(f"{population.name}: has the token id {lowest}; token ids are integers from 0")
    if highest >= sizes[0]:
        raise UsageError(
            f"model.vocabulary={sizes[0]}: {population.name} has token ids up to {highest}; give at least "
            f"{highest + 1}, or a smaller data.vocabulary"
        )


def _check_augment(augment: Augment, population: Population, where: str) -> None:
    """Raise UsageError if an augmentation of the user's own returns something else than a batch like the one given."""
    augment.check(population.shape, population.clients[0].train.x.dtype)
    x, _ = _first_examples(population, 8)
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    with torch_state_kept():
        augmented = augment(x.clone())
    if not isinstance(augmented, Tensor) or (augmented.shape, augmented.dtype) != (x.shape, x.dtype):
        got = type(augmented).__name__
        if isinstance(augmented, Tensor):
            got = f"a tensor of {augmented.dtype} {tuple(augmented.shape)}"
        raise UsageError(f"{where}: returned {got}; expected one like the batch, of {x.dtype} {tuple(x.shape)}")


def _check_token_ids(blueprint: Blueprint, population: Population, where: str) -> None:
    """Raise UsageError if a model of the user's own has no embedding for some integers of the data.

    Which embedding gets which integers is known to the model alone, so it runs on the examples with the smallest and
    the largest integer at each position.
    """
    if population.clients[0].train.x.dtype.kind not in "iu" or _input_type(population).is_floating_point:
        return
    extremes = np.zeros((0, *population.shape), population.clients[0].train.x.dtype)
    for block in _blocks(population):
        candidates = np.concatenate([extremes, block])
        flat = candidates.reshape(len(candidates), -1)
        extremes = candidates[np.unique([flat.argmin(0), flat.argmax(0)])]
    with torch_state_kept():
        task = blueprint.context(population, "cpu").task
        for start in range(0, len(extremes), 64):
            try:
                task.predict(task.initial_weights(), torch.from_numpy(extremes[start : start + 64]))
            except IndexError as error:
                raise UsageError(
                    f"{where}: fails on inputs of {population.name}, which are integers from {extremes.min()} to "
                    f"{extremes.max()} ({one_line(error)}); nn.Embedding(n, …) takes 0 to n - 1"
                ) from error


def _check_input_type(blueprint: Blueprint, population: Population) -> None:
    """Raise UsageError if inputs reach the model in a type on which it cannot compute, such as float64."""
    kind = population.clients[0].train.x.dtype
    if kind in (np.uint8, np.float32):
        return
    try:
        _first_outputs(blueprint, population, 1)
    except RuntimeError as error:
        raise UsageError(
            f"{population.name}: inputs are {kind}, which the model does not take ({one_line(error)}); give them as "
            "float32, or choose another model"
        ) from error


def _check_logits(blueprint: Blueprint, population: Population, where: str) -> None:
    """Raise UsageError if the model has fewer logits than there are classes, which cross-entropy needs."""
    logits, _ = _first_outputs(blueprint, population, 1)
    if logits.shape[1] < population.num_classes:
        raise UsageError(f"{where}: gives {logits.shape[1]} logits, but there are {population.num_classes} classes")


def _checked_loss(blueprint: Blueprint, population: Population) -> Blueprint:
    """Return `blueprint` with what its outputs stand for by the user's loss.

    Raises:
        UsageError: The loss does not return one scalar for a batch that its outputs determine.
    """
    loss = blueprint.loss
    if isinstance(loss, type) or not callable(loss):
        name = loss.__name__ if isinstance(loss, type) else repr(loss)
        hint = f"; give an instance, {name}()" if isinstance(loss, type) else ""
        raise UsageError(f"loss: expected a function (outputs, labels) -> scalar, got {name}{hint}")
    outputs, labels = _first_outputs(blueprint, population, 2)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.filterwarnings("error", message="Using a target size")
        try:
            value = loss(outputs.requires_grad_(), labels)
        except UserWarning as error:
            raise _mismatch(outputs, labels) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            forms = [f"{values.dtype} {list(values.shape)}" for values in (outputs, labels)]
            raise UsageError(
                f"loss: fails on outputs {forms[0]} and labels {forms[1]}: {in_one_line(error)}"
            ) from error
    if not isinstance(value, Tensor) or value.ndim:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f'loss: must return the mean over the batch, a scalar tensor, not {got}; use reduction="mean"')
    if not value.requires_grad:
        raise UsageError("loss: its value has no gradient; compute it from the outputs by operations of torch")
    if labels.ndim == 1 and outputs.shape[1:] == (1,):
        _check_pairs(loss, population)
    every_label = [part.y for part in population.examples()]
    with torch_state_kept():
        return replace(blueprint, outputs=meaning_of_outputs(loss, outputs.shape[1:], every_label))


def _check_pairs(loss: Loss, population: Population) -> None:
    """Raise UsageError if a loss of outputs [n, 1] and labels [n] does not compare each output with its own label.

    Torch broadcasts their difference to [n, n], whose mean depends on the labels, but not on their order.
    """
    labels = np.concatenate([client.train.y for client in population.clients])
    if not (others := np.flatnonzero(labels != labels[0])).size:
        return
    y = torch.from_numpy(labels[[0, others[0]]])
    outputs, first, second = y.float()[:, None], y[[0, 0]], y[[1, 1]]
    with torch.no_grad():
        in_order, turned = float(loss(outputs, y)), float(loss(outputs, y.flip(0)))
        of_first, of_second = (float(loss(outputs[[0, 0]], given)) for given in (first, second))
    if math.isclose(in_order, turned, rel_tol=1e-5) and not math.isclose(of_first, of_second, rel_tol=1e-5):
        raise _mismatch(outputs, y)


def _mismatch(outputs: Tensor, labels: Tensor) -> UsageError:
    shapes = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}"
    return UsageError(
        f"loss: got {shapes}, which it compares all with all; give labels of the same shape as the outputs, such as "
        "y[:, None]"
    )


def _first_outputs(blueprint: Blueprint, population: Population, count: int) -> tuple[Tensor, Tensor]:
    """Return the logits of the initial model for the first `count` examples, and their labels."""
    x, y = _first_examples(population, count)
    with torch_state_kept(), torch.no_grad():
        task = blueprint.context(population, "cpu").task
        return task.predict(task.initial_weights(), x.float() if x.dtype == torch.uint8 else x), y


def _first_examples(population: Population, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` inputs and labels of the first client that has training examples."""
    part = next((client.train for client in population.clients if len(client.train)), population.clients[0].train)
    x, y = (torch.from_numpy(values[:count].copy()) for values in (part.x, part.y))
    return x, y


def _blocks(population: Population) -> Iterator[np.ndarray]:
    """Yield all inputs in blocks, since they may lie in a file; those of the test sets are included."""
    for part in population.examples():
        for start in range(0, len(part.x), 4096):
            yield part.x[start : start + 4096]


def _optimizer(config: Config) -> SGD | Adam:
    local = config.local
    common: dict[str, Any] = {"lr": local.lr, "weight_decay": local.weight_decay, "clip_norm": local.clip_norm}
    if local.optimizer == "adam":
        return Adam(**common)
    if local.optimizer == "adamw":
        return Adam(decoupled=True, **common)
    return SGD(momentum=local.momentum, nesterov=local.nesterov, **common)


def _training_loss(config: Config, loss: Loss) -> Loss | None:
    """Return the loss that trains models, where it is not the one that scores them."""
    smoothing = config.local.label_smoothing
    if not smoothing:
        return None
    if not isinstance(loss, CrossEntropy):
        raise UsageError(
            f"local.label_smoothing={smoothing}: smooths the labels of cross-entropy, and another loss is given; "
            "smooth them there, or leave it out"
        )
    return partial(loss, label_smoothing=smoothing)


def _cohort_size(cohort: int | float, clients: int) -> int:
    """Return the number of clients in a round, from a number or a share of all participants."""
    if isinstance(cohort, float):
        return max(1, floor_share(clients, cohort))
    if cohort > clients:
        raise UsageError(f"cohort={cohort}: there are {clients} clients; give at most that, or a share such as 0.5")
    return cohort


def _points(config: Config, *, has_global: bool) -> tuple[str, ...]:
    """Return the points to score, the one at which the algorithm's paper scores first."""
    algorithm, requested = config.algorithm, config.evaluate.points
    default = algorithm.default_eval_point if has_global or algorithm.default_eval_point != "global" else "downloaded"
    if requested and "global" in requested and not has_global:
        raise UsageError(
            f"evaluate.points: algorithm {config.algorithm_name} has no global model here, since parts of the model "
            f"stay with the clients; use evaluate.points=[{default}]"
        )
    return tuple(sorted(requested or (default,), key=lambda point: point != default))
