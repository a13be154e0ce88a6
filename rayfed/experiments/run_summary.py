"""The summary that is printed before a simulation starts, with details that papers often leave out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rayfed.algorithm import State
from rayfed.core.modules import batch_norm_names
from rayfed.core.trees import bytes_by_field, nbytes
from rayfed.core.words import counted, first_few, size_text
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.channel_notes import channel_notes
from rayfed.experiments.checks.loss import events_of_clients
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import Config, Placement
from rayfed.experiments.data_notes import data_notes
from rayfed.experiments.plan import Plan
from rayfed.experiments.plan_record_privacy import record_privacy_notes

_POLICIES = {
    "aggregate": "averaged by the server, running statistics included",
    "local": "left with the client, running statistics included",
    "local_statistics": "affine weights averaged, running statistics left with the client",
    "frozen": "neither trained nor updated",
}


def run_summary(plan: Plan) -> str:
    """Return a few lines on data, model, batch norm, algorithm, training, placement and results, and the notes."""
    config = plan.config
    trial = Trial(plan.blueprint, plan.population)
    download = _download(trial)
    rows = [
        ("data", _data(plan)),
        ("model", _model(plan, trial)),
        ("batch norm", _batch_norm(plan.blueprint, download)),
        ("algorithm", _algorithm(plan, trial, download)),
        ("training", _training(plan)),
        ("placement", _placement(plan)),
        ("results", f"{config.results}/{config.experiment}, trial {plan.trial}"),
    ]
    for note in (*_simulated(config), *unused_gpu([config.placement]), *notes(plan, trial)):
        rows.append(("note", note))
    return "\n".join(f"{name:>10}  {text}" for name, text in rows)


def _download(trial: Trial) -> State:
    """Return what every client receives in the first round."""
    algorithm = trial.blueprint.algorithm
    return algorithm.broadcast(trial.cohort_ctx, algorithm.init(trial.ctx))


def _data(plan: Plan) -> str:
    population = plan.population
    sizes = plan.blueprint.training_examples(population)[: len(population.participants)]
    words = f"{population.name}: {counted(len(sizes), 'client')}, {min(sizes)} to {max(sizes)} training examples"
    if population.test_source:
        words += f", {population.test_source}"
    words += f"; {first_few(population.participants.domain_names())}"
    if population.left_out:
        words += f"; left out: {population.left_out}"
    if population.unseen_clients:
        words += f"; {counted(population.unseen_clients, 'unseen')} after training"
    if plan.data_hash:
        words += f"; partition {plan.data_hash}"
    shape = population.layout or " x ".join(map(str, population.shape)) or "scalar"
    words += f"; {_classes(population)}, input shape {shape}{_standardised(population)}"
    if plan.blueprint.augment is not None:
        words += f"; augmented by {plan.config.augment.name}"
    return words


def _model(plan: Plan, trial: Trial) -> str:
    task = trial.ctx.task
    words = f"{plan.model_label or plan.config.model.name}, {plan.cost.parameters:,} parameters"
    if task.model.constants:
        weights = task.initial_weights()
        trained = sum(weights[name].numel() for name in task.model.parameters)
        words += f", {trained:,} trained"
    words += f", {plan.cost.macs:,} multiply-accumulates per example"
    if task.feature_shape:
        words += f", split at {task.feature_shape}"
    return words


def _batch_norm(blueprint: Blueprint, download: State) -> str:
    layers = {name.rpartition(".")[0] for name in batch_norm_names(blueprint.model)}
    if not layers:
        return "none in this model"
    return f"{counted(len(layers), 'layer')}, {_batch_norm_policy(blueprint, download)}"


def _algorithm(plan: Plan, trial: Trial, download: State) -> str:
    fields = [f"{field} {size_text(size)}" for field, size in bytes_by_field(download).items()]
    sent = ", ".join(fields) or "nothing"
    own = trial.blueprint.algorithm.join(trial.blueprint.client_context(trial.ctx, plan.population, 0))
    state = size_text(nbytes(own))
    scored = ", ".join(plan.evaluation.points)
    name = plan.config.algorithm_name
    return f"{name}; download per client: {sent}; initial state per client: {state}; scored: {scored}"


def _training(plan: Plan) -> str:
    blueprint = plan.blueprint
    local = counted(blueprint.local.steps or 0, "step")
    if blueprint.local.epochs:
        local = counted(blueprint.local.epochs, "epoch")
    rounds = f"{counted(blueprint.rounds, 'round')}, {counted(blueprint.cohort, 'client')} per round"
    batches = f"{local} with batches of {blueprint.batch_size}"
    return f"{rounds}, {batches}, {_optimizer(plan.config)}{_loss(plan)}"


def _loss(plan: Plan) -> str:
    """Return ", loss NAME, KEY VALUE"; nothing for plain cross-entropy."""
    name = plan.loss_label or plan.config.loss.name
    options = plan.config.loss.options
    if options:
        return f", loss {name}, {_listed(options)}"
    if name == "cross_entropy":
        return ""
    return f", loss {name}"


def _placement(plan: Plan) -> str:
    placement = plan.config.placement
    words = f"{placement.description}, vmap_clients {placement.vmap_clients}"
    if placement.vmap_clients != "auto":
        return words
    if plan.blueprint.vmap_clients is None:
        return f"{words} (measured before the first training)"
    return f"{words} (1: clients cannot train at once)"


def _classes(population: Population) -> str:
    """Return "2 classes", followed by their names and numbers if labels are words."""
    words = counted(population.num_classes, "class", "classes")
    if population.class_names is None:
        return words
    numbered = [f"{number} {name}" for number, name in enumerate(population.class_names)]
    return f"{words} ({first_few(numbered)})"


def _standardised(population: Population) -> str:
    if population.standardisation is None:
        return ""
    rows = {"global": "of all clients", "client": "of the client"}[population.standardisation.kind]
    return f", standardised by the training rows {rows}"


def _batch_norm_policy(blueprint: Blueprint, download: Mapping[str, Any]) -> str:
    """Return what becomes of batch norm, by what clients are sent: an algorithm may keep it on them."""
    names = batch_norm_names(blueprint.model)
    sent: set[str] = set()
    for tree in download.values():
        if isinstance(tree, Mapping):
            sent.update(map(str, tree))
    weights = {name for name, _ in blueprint.model.named_parameters()}
    if blueprint.batch_norm != "frozen" and sent & weights and not sent & names:
        return _POLICIES["local"]
    return _POLICIES[blueprint.batch_norm]


def notes(plan: Plan, trial: Trial | None = None) -> list[str]:
    """Return the notes on the data and on the method, one line each; `trial` is that of the plan, if it exists."""
    of_data = data_notes(plan.population, plan.evaluation, column_names(plan.config))
    return [*of_data, *method_notes(plan, trial)]


def method_notes(plan: Plan, trial: Trial | None = None) -> list[str]:
    """Return the notes on what is not scored and on small clients, and the algorithm's own, one line each."""
    if trial is None:
        trial = Trial(plan.blueprint, plan.population)
    return list(_method_notes(plan, trial))


def _method_notes(plan: Plan, trial: Trial) -> Iterator[str]:
    blueprint = plan.blueprint
    population = plan.population
    yield from _tests_without_model(plan, trial)
    if plan.unproven is not None:
        yield plan.unproven
    if plan.incomparable:
        yield (
            f"your code reads globals that cannot be compared with those of an earlier run: "
            f"{', '.join(plan.incomparable)}; if one changes, give resume=false and another experiment"
        )
    if blueprint.outputs.kind == "unknown" and population.clients[0].train.y.dtype.kind in "iu":
        yield "no accuracy, only the loss: outputs do not stand for classes by this loss and these labels"
    if blueprint.outputs.kind == "survival":
        yield from _without_events(population)
    yield from _small_clients(blueprint, population)
    yield from blueprint.algorithm.notes(trial.cohort_ctx, trial.problem)
    yield from record_privacy_notes(blueprint, population)
    yield from channel_notes(trial)


def _tests_without_model(plan: Plan, trial: Trial) -> Iterator[str]:
    """Yield a note on the server's test sets if there is no global model to score on them."""
    domains: dict[str, None] = {}
    splits: dict[str, None] = {}
    for test in plan.population.tests:
        if test.split != "ood":  # on which the clients' models are scored
            domains[test.domain] = None
            splits[test.split] = None
    if splits and trial.global_model[0] is None:
        yield (
            f"not scored: the server's test sets ({first_few(domains)}; split {', '.join(splits)}), because "
            f"{plan.config.algorithm_name} has no global model here; use an algorithm that has one, such as fedavg "
            "with batch_norm=aggregate"
        )


def _without_events(population: Population) -> Iterator[str]:
    """Yield a note on the clients whose training data have no event, if there are any."""
    events = events_of_clients(population)
    without = events.count(0)
    if without:
        of_all = counted(len(events), "client")
        yield f"{without} of {of_all} have no event in their training data, so that their loss is 0"


def _small_clients(blueprint: Blueprint, population: Population) -> Iterator[str]:
    """Yield a note on clients with less than a batch, which may be a typing error in the batch size."""
    batch = blueprint.batch_size
    sizes = blueprint.training_examples(population)
    small = int((sizes < batch).sum())
    if small:
        of_all = counted(len(sizes), "client")
        yield f"{small} of {of_all} train on less than one batch, of local.batch_size={batch}"


def column_names(config: Config) -> list[str]:
    """Return the names of the inputs' columns, if the configuration lists them."""
    features = config.data.options.get("features")
    if not isinstance(features, list):
        return []
    return list(map(str, features))


def unused_gpu(placements: Iterable[Placement]) -> Sequence[str]:
    """Return a note if this machine has a GPU and no process of a run or a sweep is going to use one."""
    if any(placement.gpus or placement.server_gpus for placement in placements) or not torch.cuda.is_available():
        return ()
    return ("clients train on the CPU, although there is a GPU; placement.gpus=1 uses it",)


def _optimizer(config: Config) -> str:
    local = config.local
    parts = {
        "momentum": local.momentum,
        "weight decay": local.weight_decay,
        "clipped to": local.clip_norm,
        "label smoothing": local.label_smoothing,
    }
    words = f"{local.optimizer} with lr {local.lr:g}"
    schedule = config.lr_schedule
    if schedule.name != "constant" or schedule.options:
        words += f" and the schedule {schedule.name}"
    if schedule.options:
        words += f" ({_listed(schedule.options)})"
    for name, value in parts.items():
        if value:
            words += f", {name} {value:g}"
    if local.nesterov:
        words += ", Nesterov"
    return words


def _simulated(config: Config) -> Iterator[str]:
    """Yield notes on clients that drop out, are late or do less work, on the clock and on asynchronous rounds."""
    groups = {
        "schedule": config.schedule.options,
        "availability": _changed(config.availability),
        "clock": _changed(config.clock),
    }
    for name, given in groups.items():
        if given:
            yield f"{name}: {_listed(given)}"


def _changed(options: Any) -> dict[str, Any]:
    """Return the values of a group that are not its defaults."""
    return {key: value for key, value in vars(options).items() if value != getattr(type(options), key)}


def _listed(values: Mapping[str, Any]) -> str:
    """Return "KEY VALUE, KEY VALUE"."""
    return ", ".join(f"{key} {value}" for key, value in values.items())
