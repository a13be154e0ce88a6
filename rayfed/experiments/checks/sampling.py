"""Checks of how cohorts are drawn."""

from rayfed.core.errors import UsageError
from rayfed.core.rng import global_state_kept
from rayfed.core.trees import named_tensors, only
from rayfed.experiments.checks.trial import Trial
from rayfed.sampling.base import Uniform


def check_sampling(trial: Trial) -> None:
    """Refuse a sampler that the method or the number of clients cannot work with."""
    sampler = trial.blueprint.sampler
    if type(sampler) is Uniform:
        return
    sampler.check(trial.blueprint.cohort, len(trial.population.participants))
    obstacle = _obstacle(trial)
    if obstacle is not None:
        raise UsageError(f"sampling.name: {type(sampler).__name__}: {obstacle}; use sampling.name=uniform")


def _obstacle(trial: Trial) -> str | None:
    """Return why the method cannot work with clients that are not sampled uniformly; None if it can."""
    blueprint = trial.blueprint
    traits = blueprint.algorithm.traits
    is_biased = traits.assumes_uniform_sampling and not blueprint.sampler.is_even
    if traits.sample_without_replacement or is_biased:
        return f"{trial.named} assumes that clients are sampled uniformly"
    if not blueprint.sampler.reweights:
        return None
    if blueprint.availability.loses_clients:
        return "it weights the clients that it draws, and availability.* makes some of them drop out"
    if any(exchange.server_side_weighting for exchange in blueprint.algorithm.round_exchanges):
        return f"it weights clients, and so does {trial.named}"
    return _obstacle_in_mean(trial)


def _obstacle_in_mean(trial: Trial) -> str | None:
    """Return why a sampler cannot weight the clients in the method's mean; None if it can."""
    algorithm = trial.blueprint.algorithm
    ctx = trial.ctx.at(cohort=tuple(range(trial.blueprint.cohort)))
    with global_state_kept():
        sent = algorithm.broadcast(ctx, algorithm.init(trial.ctx))
    missing = [field for field in algorithm.averaged if field not in sent]
    if missing:
        return f"{trial.named} averages {missing[0]}, which clients do not receive"
    averaged: set[str] = set()
    for exchange in algorithm.round_exchanges:
        averaged |= set(exchange.averaged)
    # A model that stays with the clients as a whole is averaged as a field without tensors.
    if averaged <= set(sent) and not any(named_tensors(only(sent, averaged))):
        return f"it weights clients in the mean, and {trial.named} averages nothing"
    return None
