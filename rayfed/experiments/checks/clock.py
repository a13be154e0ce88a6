"""Checks of the simulated clock and of asynchronous rounds."""

from rayfed.core.errors import UsageError
from rayfed.experiments.checks.method import needs_all_clients
from rayfed.experiments.checks.trial import Trial
from rayfed.sampling.base import Uniform


def check_bandwidths(trial: Trial) -> None:
    """Refuse bandwidths for a method that sends several times in a round."""
    if trial.blueprint.clock.sends and _has_several_exchanges(trial):
        raise UsageError(f"clock: bandwidths need a method with one exchange, and {trial.named} has several")


def check_buffered_rounds(trial: Trial) -> None:
    """Refuse asynchronous rounds for a method or with keys that cannot work in them."""
    blueprint = trial.blueprint
    if blueprint.buffered is None:
        return
    clients = len(trial.population.participants)
    concurrency = blueprint.buffered.concurrency
    if concurrency > clients:
        raise UsageError(f"schedule.concurrency={concurrency}: there are {clients} clients; give at most that")
    obstacle = _obstacle_to_buffered_rounds(trial)
    if obstacle is not None:
        raise UsageError(f"schedule.name=buffered: {obstacle}")


def _obstacle_to_buffered_rounds(trial: Trial) -> str | None:
    blueprint = trial.blueprint
    if not blueprint.clock.runs:
        return "needs a clock; give clock.step_seconds, such as 1, or clock.profile"
    if _has_several_exchanges(trial):
        return f"{trial.named} has several exchanges; use schedule.name=synchronous"
    if needs_all_clients(trial):
        return f"{trial.named} needs every client in every round; use schedule.name=synchronous"
    if blueprint.algorithm.traits.sample_without_replacement:
        return f"{trial.named} divides its privacy budget over rounds; use schedule.name=synchronous"
    if blueprint.availability.loses_clients:
        return "takes all replies; leave out availability.dropout and deadline, or give schedule.max_staleness"
    if type(blueprint.sampler) is not Uniform:
        return "draws idle clients uniformly; use sampling.name=uniform"
    if (blueprint.vmap_clients or 1) > 1:
        return "clients start from different models, so they train one at a time; use placement.vmap_clients=1"
    return None


def _has_several_exchanges(trial: Trial) -> bool:
    algorithm = trial.blueprint.algorithm
    exchanges = [*algorithm.exchanges("setup"), *algorithm.exchanges("round"), *algorithm.exchanges("final")]
    return len(exchanges) > 1
