"""From a configuration to everything that a simulation needs, checked as a whole, with nothing started yet."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import Phase
from rayfed.augment.base import build_augment
from rayfed.core.errors import UsageError
from rayfed.core.network import weights_of
from rayfed.core.optim import SGD, Adam
from rayfed.core.rng import seed_torch, torch_state_kept
from rayfed.data.draws import floor_share
from rayfed.data.leave_out import population_without_domain
from rayfed.data.loading import load
from rayfed.data.population import Client, Population, population_hash
from rayfed.data.user_clients import user_population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.metric_checks import check_metrics
from rayfed.engine.serialization import state_hash
from rayfed.engine.server import Evaluation
from rayfed.experiments.config import Config
from rayfed.experiments.unseen_clients import set_apart
from rayfed.experiments.user_code import checked_code, code_hash, model_hash, own_name
from rayfed.metrics.cost import Cost, cost
from rayfed.models.build import build_model, check_model
from rayfed.models.split_model import ensure_split

Loss = Callable[[Tensor, Tensor], Tensor]
MakeModel = Callable[[], nn.Module]


@dataclass(frozen=True)
class Plan:
    """One trial, ready to run. `trial` names it: the same configuration has the same name wherever it is placed."""

    config: Config
    population: Population
    blueprint: Blueprint
    evaluation: Evaluation
    trial: str
    clients_hash: str | None = None  # of a user's own clients, their contents; who holds what has no other name
    own_model: str | None = None  # a user's own in place of model.name and the loss: "own:Net-1a2b3c"
    own_loss: str | None = None
    code_hash: str | None = None  # of the user's own classes that the configuration names as module:Name

    @property
    def data_hash(self) -> str | None:
        """Of who holds which examples: of a partition, or of a user's own clients."""
        return self.population.partition_hash or self.clients_hash

    @cached_property
    def cost(self) -> Cost:
        """Of the model, without what a wrapper adds to it."""
        with torch_state_kept():
            return cost(self.blueprint.model, self.population.shape, _input_type(self.population))

    def values(self) -> dict[str, Any]:
        """The row of the trials table, as far as it is known before the start."""
        own = {"data": self.clients_hash and f"clients:{self.clients_hash}", "model": self.own_model}
        return {
            **self.config.tree(),
            **{group: {"name": name} for group, name in own.items() if name},
            "loss": self.own_loss,
            "seed": self.config.seed,
            "default_eval_point": self.evaluation.points[0],
            **self.cost._asdict(),
            "partition_hash": self.data_hash,
            "code_hash": self.code_hash,
        }

    def model_name(self) -> str:
        return self.own_model or str(self.config.model.name)


def make_plan(
    config: Config,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | None = None,
    model: MakeModel | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
    population: Population | None = None,
) -> Plan:
    """Loads the data, builds the model, and refuses what cannot work.

    Args:
        clients: the user's own clients in place of data and partition; see `user_population`.
        model: a factory (or a module) in place of model.name.
        loss: (logits, y) -> scalar mean, in place of cross-entropy.
        population: the same data, where a caller has loaded it already.

    Raises:
        UsageError: with the key at fault.
    """
    augment = build_augment(config.augment.name or "none", config.augment.options)
    for path in (Path(config.results), Path(config.results) / config.experiment):
        if path.exists() and not path.is_dir():
            raise UsageError(f"results={config.results}: {path} is a file, not a folder")
    if model is None:
        check_model(config.model.name or "", config.model.options)
    contents = ""
    if clients is not None:
        _check_no_other_data(config)
        population = user_population(clients, num_classes, classes=loss is None)
        contents = population_hash(population)  # of all clients, so that it does not depend on which are unseen
        population = population_without_domain(population, config.leave_out)
    elif population is None:
        partition = config.partition.name, config.partition.options
        population = load(config.data.name or "", config.data.options, *partition, config.leave_out)
    population = set_apart(population, config.unseen_clients, config.seed)
    cohort = _cohort(config.cohort, len(population.participants))
    blueprint = Blueprint(
        algorithm=config.algorithm,
        model=_model(config, population, model),
        loss=loss or F.cross_entropy,
        batch_norm=config.batch_norm,
        optimizer=_optimizer(config),
        local=Phase("train", config.local.epochs or (None if config.local.steps else 1), config.local.steps),
        batch_size=config.local.batch_size,
        drop_last=config.local.drop_last,
        rounds=config.rounds,
        cohort=cohort,
        seed=config.seed,
        vmap_clients=config.placement.vmap_clients,
        threads=config.placement.threads,
        data_on_device=config.placement.data_on_device,
        augment=augment,
    )
    blueprint.check(population)
    model_of_server, whole = blueprint.global_model(population)
    evaluation = Evaluation(
        every=config.evaluate.every,
        initial=config.evaluate.initial,
        points=_points(config, has_global=model_of_server is not None),
        splits=tuple(config.evaluate.splits),
        clients=config.evaluate.clients,
        adapt_epochs=config.evaluate.adapt_epochs,
        metrics=config.metrics,
    )
    check_metrics(blueprint, population, evaluation, whole=whole)
    named = config.model.name or ""
    if loss is None and (model is not None or ":" in named):
        _check_logits(blueprint, population, "model" if model is not None else f"model.name={named}")
    if loss is not None:
        _check_loss(blueprint, population)
    extra = contents
    own_model = None if model is None else own_name(model, model_hash(model, blueprint.model))
    own_loss = None if loss is None else own_name(loss, code_hash(loss))
    if own_model is not None:
        extra += state_hash(weights_of(blueprint.model)) + own_model
    trial = trial_name(config, extra + (own_loss or ""))
    code = checked_code(config, trial)
    return Plan(config, population, blueprint, evaluation, trial, contents[:12] or None, own_model, own_loss, code)


def trial_name(config: Config, extra: str = "") -> str:
    """The trial's name: its algorithm, its seed, and a hash of every value that can change its outcome."""
    tree = config.tree()
    for key in ("results", "experiment", "resume", "checkpoint"):
        tree.pop(key)
    tree["placement"] = {key: tree["placement"][key] for key in ("vmap_clients", "threads", "gpus")}
    digest = hashlib.blake2b((json.dumps(tree, sort_keys=True, default=str) + extra).encode(), digest_size=4)
    name = config.algorithm_name.rpartition(":")[2]
    return f"{name}-seed{config.seed}-{digest.hexdigest()}"


def _check_no_other_data(config: Config) -> None:
    """A user's own clients are the data, already divided."""
    for key, named, default in (("partition", config.partition, None), ("data", config.data, "mini_digits")):
        given = [*([f"name={named.name}"] if named.name != default else []), *named.options]
        if given:
            raise UsageError(f"{key}.{given[0]}: clients= are given in place of data and partition; leave out {key}.*")


def _model(config: Config, population: Population, model: MakeModel | nn.Module | None) -> nn.Module:
    dtype = _input_type(population)
    with torch_state_kept():
        seed_torch(config.seed, "model")
        if model is None:
            name, options = config.model.name or "", config.model.options
            built = build_model(name, options, population.shape, population.num_classes, dtype)
            if not dtype.is_floating_point:
                _check_tokens(built, population)
            return built
        made = model if isinstance(model, nn.Module) else model()
        if not isinstance(made, nn.Module):
            raise UsageError(f"model: expected a function that makes a torch.nn.Module, got {type(made).__name__}")
        return made if hasattr(made, "feature_shape") else ensure_split(made, population.shape, dtype)


def _input_type(population: Population) -> torch.dtype:
    """The type in which inputs reach the model: images as normalised floats."""
    dtype = torch.from_numpy(population.clients[0].train.x[:0]).dtype
    return torch.float32 if dtype == torch.uint8 else dtype


def _check_tokens(model: nn.Module, population: Population) -> None:
    """An embedding needs a vector for every word number."""
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    parts = [part.x for client in population.clients for part in (client.train, client.val, client.test)]
    # Block by block: the texts may lie in a file.
    blocks = (part[start : start + 4096] for part in parts for start in range(0, len(part), 4096))
    highest = max(int(block.max()) for block in blocks) if sizes else -1
    if sizes and highest >= sizes[0]:
        raise UsageError(
            f"model.vocabulary={sizes[0]}: {population.name} has word numbers up to {highest}; give at least "
            f"{highest + 1}, or a smaller data.vocabulary"
        )


def _check_logits(blueprint: Blueprint, population: Population, where: str) -> None:
    """Cross-entropy needs a logit for every class."""
    logits, _ = _outputs(blueprint, population, 1)
    if logits.shape[1] < population.num_classes:
        raise UsageError(f"{where}: gives {logits.shape[1]} logits, but there are {population.num_classes} classes")


def _check_loss(blueprint: Blueprint, population: Population) -> None:
    """A loss of the user's own must give one number for a batch."""
    value = blueprint.loss(*_outputs(blueprint, population, 2))
    if not isinstance(value, Tensor) or value.ndim:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f'loss: must give the mean over a batch, a scalar tensor, not {got}; as with reduction="mean"')


def _outputs(blueprint: Blueprint, population: Population, count: int) -> tuple[Tensor, Tensor]:
    """What the initial model makes of the first examples, and their labels."""
    part = next((client.train for client in population.clients if len(client.train)), population.clients[0].train)
    x, y = (torch.from_numpy(values[:count].copy()) for values in (part.x, part.y))
    with torch_state_kept(), torch.no_grad():
        task = blueprint.context(population, "cpu").task
        return task.predict(task.initial_weights(), x.float() if x.dtype == torch.uint8 else x), y


def _optimizer(config: Config) -> SGD | Adam:
    local = config.local
    if local.optimizer == "adam":
        return Adam(lr=local.lr, weight_decay=local.weight_decay)
    return SGD(lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay, nesterov=local.nesterov)


def _cohort(asked: int | float, clients: int) -> int:
    if isinstance(asked, float):
        return max(1, floor_share(clients, asked))
    if asked > clients:
        raise UsageError(f"cohort={asked}: there are {clients} clients; give at most that, or a share such as 0.5")
    return asked


def _points(config: Config, *, has_global: bool) -> tuple[str, ...]:
    """The points to score, the one that the algorithm is judged by first."""
    algorithm, asked = config.algorithm, config.evaluate.points
    scored = algorithm.default_eval_point if has_global or algorithm.default_eval_point != "global" else "downloaded"
    if config.leave_out is not None and not has_global:
        raise UsageError(
            f"leave_out={config.leave_out}: algorithm {config.algorithm_name} has no global model here, and no "
            "other can be scored on a domain that nobody holds"
        )
    if asked and "global" in asked and not has_global:
        raise UsageError(
            f"evaluate.points: algorithm {config.algorithm_name} has no global model here, since parts of the model "
            f"stay with the clients; use evaluate.points=[{scored}]"
        )
    return tuple(sorted(asked or (scored,), key=lambda point: point != scored))
