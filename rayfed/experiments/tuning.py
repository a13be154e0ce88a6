"""What Ray Tune may do with the trials of a sweep, checked before Ray starts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.experiments.config import Config
from rayfed.experiments.space import Space

CHANGEABLE = ("local.lr", "local.weight_decay", "local.momentum", "local.clip_norm", "local.label_smoothing")
"""The keys, beside the numbers of `algorithm.*`, that a trial may change when it goes on from a checkpoint."""


@dataclass(frozen=True)
class Tuning:
    """Parts of Ray Tune that were given in Python.

    Attributes:
        callbacks: Instances of `ray.tune.Callback`.
        scheduler: A `TrialScheduler`, in place of search.scheduler.
        search_alg: A `Searcher`, for search.kind=tune.
    """

    callbacks: Sequence[Any] = ()
    scheduler: Any = None
    search_alg: Any = None


def check_changes(keys: Iterable[str], where: str) -> None:
    """Raise UsageError if a trial cannot change one of `keys` while it runs.

    Args:
        where: What wants to change them, for the message.
    """
    for key in keys:
        group, _, name = key.partition(".")
        is_hyperparameter = group == "algorithm" and not f".{name}".endswith(".name")
        if not is_hyperparameter and key not in CHANGEABLE:
            raise UsageError(
                f"{key}: {where} cannot change it while a trial runs; it may change algorithm.* and "
                f"{', '.join(CHANGEABLE)}, so give {key} one value"
            )


def check_tuning(space: Space, configs: Sequence[Config], given: Tuning) -> None:
    """Raise UsageError if a scheduler, a search algorithm or a callback does not go with the sweep."""
    search = space.search
    if given.scheduler is not None and search.scheduler_name != "none":
        raise UsageError(f"search.scheduler={search.scheduler_name}: scheduler= is given as well; give one of them")
    if (search.kind == "tune") != (given.search_alg is not None):
        raise UsageError("search.kind=tune: the search algorithm is given as rayfed.sweep(space, search_alg=…)")
    if search.kind == "tune" and len(space.arms) > 1:
        raise UsageError(
            f"search_alg: a search algorithm of Ray Tune knows no arms, and there are {len(space.arms)}; give one arm, "
            "or search.kind=optuna, which searches each arm with the same budget"
        )
    if ":" in search.scheduler_name:
        resolve(search.scheduler_name, {}, where="search.scheduler")
    if search.scheduler_name == "pbt":
        _check_packaged_population(space, configs)
    if search.scheduler_name == "hyperband":
        _check_halving(configs)
    if search.kind == "tune" and configs[0].resume:
        raise UsageError(
            "resume=true: a search algorithm of Ray Tune does not know the trials of an earlier command; give "
            "search.kind=optuna, which does, or another experiment"
        )


def check_population(space: Space, configs: Sequence[Config], key: str, changed: Iterable[str]) -> None:
    """Raise UsageError if the trials of a sweep are no population: of one arm and one seed, from the start.

    Args:
        key: What exchanges the states of trials, for the message.
        changed: The dotted keys that it changes.
    """
    if space.adaptive:
        raise UsageError(f"{key}: changes hyperparameters itself; use search.kind=random, which draws the first ones")
    for what, number in (("arm", len(space.arms)), ("seed", len(space.seeds))):
        if number > 1:
            raise UsageError(
                f"{key}: trials take over the state of others, so they must have one {what}, and there are {number}; "
                "run one sweep for each"
            )
    check_changes(changed, key)
    if len(configs) < 2:
        raise UsageError(f"{key}: compares trials, and there is one; give search.kind=random and search.samples=8")
    if configs[0].resume:
        raise UsageError(
            f"resume=true: what {key} has exchanged is lost with its command; start anew with resume=false, or with "
            "another experiment"
        )


def _check_halving(configs: Sequence[Config]) -> None:
    for config in configs:
        if config.evaluate.every > 1:
            raise UsageError(
                f"search.scheduler=hyperband: compares trials after any round, and evaluate.every="
                f"{config.evaluate.every} leaves rounds without a score; give evaluate.every=1, or asha"
            )


def _check_packaged_population(space: Space, configs: Sequence[Config]) -> None:
    key = "search.scheduler=pbt"
    changed = set[str]().union(*space.spaces)
    if not changed:
        raise UsageError(f"{key}: has nothing to change; give a space, such as local.lr={{loguniform: [0.001, 1]}}")
    check_population(space, configs, key, changed)
