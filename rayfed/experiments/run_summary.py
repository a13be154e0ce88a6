"""What a simulation says of itself before it starts: the things that papers' codes leave silent."""

from collections.abc import Sequence

from rayfed.core.batch_norm import batch_norm_names
from rayfed.core.trees import nbytes
from rayfed.engine.device_data import client_data
from rayfed.engine.serialization import bytes_by_field
from rayfed.experiments.config import Local
from rayfed.experiments.plan import Plan

_POLICIES = {
    "aggregate": "averaged by the server, running statistics included",
    "local": "left with the client, running statistics included",
    "local_statistics": "affine weights averaged, running statistics left with the client",
    "frozen": "neither trained nor updated",
}


def introduce(plan: Plan) -> str:
    """A few lines: data, model, batch norm, algorithm with what it sends, training, placement, where results go."""
    config, blueprint, population = plan.config, plan.blueprint, plan.population
    ctx = blueprint.context(population, "cpu")
    task, algorithm = ctx.task, blueprint.algorithm
    sizes = [len(client.train) for client in population.participants]
    domains = sorted({client.domain for client in population.participants})
    shown = _named(domains)
    hashed = f"; partition {plan.data_hash}" if plan.data_hash else ""
    layers = {name.rpartition(".")[0] for name in batch_norm_names(blueprint.model)}
    norm = f"{counted(len(layers), 'layer')}, {_POLICIES[blueprint.batch_norm]}" if layers else "none in this model"
    some = ctx.at(cohort=tuple(range(blueprint.cohort)))
    down = bytes_by_field(algorithm.broadcast(some, algorithm.init(ctx)))
    sent = ", ".join(f"{field} {_bytes(size)}" for field, size in down.items()) or "nothing"
    kept = _bytes(nbytes(algorithm.join(ctx.at(client=0, examples=sizes[0], data=client_data(population, 0, task)))))
    epochs, steps = blueprint.local.epochs, blueprint.local.steps
    local = counted(epochs, "epoch") if epochs else counted(steps or 0, "step")
    place = config.placement
    where = counted(place.hosts, "Ray host") if place.hosts else "this process"
    late = f"; {counted(population.unseen_clients, 'unseen')} after training" if population.unseen_clients else ""
    shape = " x ".join(map(str, population.shape)) or "a number"
    augmented = f"; augmented by {config.augment.name}" if blueprint.augment is not None else ""
    lines = {
        "data": f"{population.name}: {counted(len(sizes), 'client')}, {min(sizes)} to {max(sizes)} training examples; "
        f"{shown}{late}{hashed}; {counted(population.num_classes, 'class', 'classes')}, an input {shape}{augmented}",
        "model": f"{plan.model_name()}, {plan.cost.parameters:,} parameters, {plan.cost.macs:,} multiply-accumulates "
        f"an example, split at {task.feature_shape}",
        "batch norm": norm,
        "algorithm": f"{config.algorithm_name}; down to each client: {sent}; kept by each at the start: {kept}; "
        f"scored: {', '.join(plan.evaluation.points)}",
        "training": f"{counted(blueprint.rounds, 'round')}, {counted(blueprint.cohort, 'client')} each, "
        f"{local} of batches of "
        f"{blueprint.batch_size}, {_optimizer(config.local)}{f', loss {plan.own_loss}' if plan.own_loss else ''}",
        "placement": f"{where}, width {place.vmap_clients}",
        "results": f"{config.results}/{config.experiment}, trial {plan.trial}",
    }
    said = [*lines.items(), *(("note", remark) for remark in remarks(plan))]
    return "\n".join(f"{name:>10}  {text}" for name, text in said)


def remarks(plan: Plan) -> Sequence[str]:
    """What will not be scored, and what the algorithm has to say of this configuration, a line each."""
    ctx = plan.blueprint.context(plan.population, "cpu").at(cohort=tuple(range(plan.blueprint.cohort)))
    own = plan.blueprint.algorithm.notes(ctx, plan.blueprint.problem(plan.population, ctx.task))
    return (*_unscored(plan), *own)


def _unscored(plan: Plan) -> Sequence[str]:
    """Test sets that nobody holds, where there is no model of the server to score on them."""
    tests = plan.population.tests
    if not tests or plan.blueprint.global_model(plan.population)[0] is not None:
        return ()
    splits = ", ".join(dict.fromkeys(test.split for test in tests))
    domains = _named(list(dict.fromkeys(test.domain for test in tests)))
    name = plan.config.algorithm_name
    return (
        f"not scored: the test sets that nobody holds ({domains}; split {splits}), because {name} has no global model "
        "here; an algorithm with one, such as fedavg with batch_norm=aggregate, scores them",
    )


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """ "1 client", "2 clients"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _optimizer(local: Local) -> str:
    parts = {"momentum": local.momentum, "weight decay": local.weight_decay}
    extra = "".join(f", {name} {value:g}" for name, value in parts.items() if value)
    return f"{local.optimizer} at {local.lr:g}{extra}{', Nesterov' if local.nesterov else ''}"


def _bytes(size: int) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} GB"
