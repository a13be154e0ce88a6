"""What a simulation says of itself before it starts: the things that papers' codes leave silent."""

from collections.abc import Sequence

from rayfed.config import Local
from rayfed.engine.payload import bytes_by_field
from rayfed.engine.resident import client_data
from rayfed.models.norm import batch_norm_names
from rayfed.plan import Plan
from rayfed.tree import nbytes

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
    shown = ", ".join(domains[:6]) + (", …" if len(domains) > 6 else "")
    hashed = f"; partition {population.partition_hash}" if population.partition_hash else ""
    layers = {name.rpartition(".")[0] for name in batch_norm_names(blueprint.model)}
    norm = f"{len(layers)} layers, {_POLICIES[blueprint.batch_norm]}" if layers else "none in this model"
    some = ctx.at(cohort=tuple(range(blueprint.cohort)))
    down = bytes_by_field(algorithm.broadcast(some, algorithm.init(ctx)))
    sent = ", ".join(f"{field} {_bytes(size)}" for field, size in down.items()) or "nothing"
    kept = _bytes(nbytes(algorithm.join(ctx.at(client=0, examples=sizes[0], data=client_data(population, 0, task)))))
    epochs, steps = blueprint.local.epochs, blueprint.local.steps
    local = f"{epochs} epoch{'s' * (epochs > 1)}" if epochs else f"{steps} steps"
    place = config.placement
    where = f"{place.hosts} Ray hosts" if place.hosts else "this process"
    late = f"; {population.newcomers} newcomers after training" if population.newcomers else ""
    lines = {
        "data": f"{population.name}: {len(sizes)} clients, {min(sizes)} to {max(sizes)} training examples; {shown}"
        f"{late}{hashed}",
        "model": f"{config.model.name}, {plan.cost.parameters:,} parameters, {plan.cost.macs:,} multiply-accumulates "
        f"an example, split at {task.feature_shape}",
        "batch norm": norm,
        "algorithm": f"{config.algorithm_name}; down to each client: {sent}; kept by each: {kept}; "
        f"scored: {', '.join(plan.evaluation.points)}",
        "training": f"{blueprint.rounds} round{'s' * (blueprint.rounds > 1)}, {blueprint.cohort} clients each, "
        f"{local} of batches of "
        f"{blueprint.batch_size}, {_optimizer(config.local)}",
        "placement": f"{where}, width {place.width}",
        "results": f"{config.results}/{config.experiment}, trial {plan.trial}",
    }
    said = [*lines.items(), *(("note", remark) for remark in remarks(plan))]
    return "\n".join(f"{name:>10}  {text}" for name, text in said)


def remarks(plan: Plan) -> Sequence[str]:
    """What the algorithm has to say of this configuration, a line each."""
    ctx = plan.blueprint.context(plan.population, "cpu").at(cohort=tuple(range(plan.blueprint.cohort)))
    return plan.blueprint.algorithm.remarks(ctx, plan.blueprint.setting(plan.population, ctx.task))


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
