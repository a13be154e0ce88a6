"""The schedulers of Ray Tune that a sweep may use, from `search.scheduler` or from Python."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ray.tune.schedulers import (
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from rayfed.core.errors import UsageError, error_line
from rayfed.core.options import arguments_for
from rayfed.core.registry import resolve
from rayfed.distributed.configuration_halving import ConfigurationHalving
from rayfed.distributed.given_searcher import domain
from rayfed.distributed.server_trials import LAST_GAIN
from rayfed.experiments.config import Config
from rayfed.experiments.space import Space
from rayfed.experiments.tuning import check_population

_TIME = "round"


class Chosen(NamedTuple):
    """A scheduler, None without one, and what it maximises, None if it says so itself."""

    scheduler: Any
    metric: str | None


def scheduler_of(space: Space, configs: Sequence[Config], given: Any) -> Chosen:
    """Return the scheduler of a sweep.

    Args:
        configs: The configurations of all trials.
        given: A scheduler that was given in Python; None: that of `search.scheduler`.

    Raises:
        UsageError: A scheduler of the user's cannot be made, or does not go with the sweep.
    """
    if given is not None:
        return _checked(given, space, configs)
    search = space.search
    rounds = max(config.rounds for config in configs)
    name = search.scheduler_name
    rungs: dict[str, Any] = {"max_t": rounds, "reduction_factor": search.reduction_factor}
    if name == "none":
        return Chosen(None, None)
    if name == "asha":
        return Chosen(ConfigurationHalving(search, rounds), None)
    if name == "hyperband":
        return Chosen(HyperBandScheduler(time_attr=_TIME, **rungs), LAST_GAIN)
    if name == "median":
        return Chosen(MedianStoppingRule(time_attr=_TIME, grace_period=search.grace_rounds), LAST_GAIN)
    if name == "pbt":
        return Chosen(_population(space, rounds), LAST_GAIN)
    return _checked(_own(name, search.scheduler_options), space, configs)


def _population(space: Space, rounds: int) -> PopulationBasedTraining:
    """Return Tune's population-based training. All trials are compared after the same round.

    Values stay within their space.
    """
    options = space.search.population
    (spaces,) = space.spaces
    mutations: dict[str, Any] = {}
    bounds: dict[str, tuple[float, float]] = {}
    for key, (kind, values) in spaces.items():
        if kind in ("grid", "choice"):
            mutations[key] = list(values)
        else:
            mutations[key] = domain(kind, values)
            bounds[key] = values[0], values[1]

    def within(config: dict[str, Any]) -> dict[str, Any]:
        for key, (low, high) in bounds.items():
            config[key] = min(max(config[key], low), high)
        return config

    return PopulationBasedTraining(
        time_attr=_TIME,
        perturbation_interval=options.interval or max(1, rounds // 10),
        hyperparam_mutations=mutations,
        quantile_fraction=options.share,
        resample_probability=options.resample,
        custom_explore_fn=within,
        require_attrs=False,
        synch=True,
    )


def _own(name: str, options: dict[str, Any]) -> Any:
    """Return a scheduler that the user names as module:Name."""
    kind = resolve(name, {}, where="search.scheduler")
    try:
        scheduler = kind(**arguments_for(kind, options))
    except Exception as error:  # of the user's code, or of Tune
        raise UsageError(f"search.scheduler={name}: cannot be made with these options ({error_line(error)})") from error
    if not isinstance(scheduler, TrialScheduler):
        raise UsageError(f"search.scheduler={name}: is no ray.tune.schedulers.TrialScheduler")
    return scheduler


def _checked(scheduler: Any, space: Space, configs: Sequence[Config]) -> Chosen:
    """Return a scheduler of the user's, after checking that it can exchange the states of trials if it does so."""
    if isinstance(scheduler, PopulationBasedTraining):
        check_population(space, configs, type(scheduler).__name__, scheduler._hyperparam_mutations)
    if getattr(scheduler, "_metric", None) is not None:
        return Chosen(scheduler, None)
    return Chosen(scheduler, LAST_GAIN)
