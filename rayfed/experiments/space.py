"""Search spaces: a configuration with spaces in place of some values, and the configurations drawn from it.

    experiment: adcol
    seeds: [0, 1, 2]                       every configuration runs once with each seed
    search: {kind: grid}                   see `Search`
    rounds: 20                             any configuration key, common to all arms
    arms:                                  the variants to compare; their keys override the common ones
      - algorithm.name: fedavg
      - algorithm.name: adcol
        algorithm.mu: {grid: [0.1, 1, 10]}

An arm may have values that somebody published; see `rayfed.experiments.published`.

A space is written as {grid: […]}, {choice: […]}, {uniform: [low, high]}, {loguniform: [low, high]} or
{randint: [low, high]} (high included) in place of a value.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError, shown
from rayfed.core.options import SPACE_KINDS as KINDS
from rayfed.core.options import build, checked, option, suggestion
from rayfed.core.rng import generator
from rayfed.experiments.config import Config
from rayfed.experiments.published import PublishedRows, one_configuration, published_rows
from rayfed.experiments.sources import SPACE_KEYS, merged

SCHEDULERS = ("none", "asha", "hyperband", "median", "pbt")
"""The names of schedulers; a class of Tune's, or one of the user's own, is written as module:Name."""


@dataclass(frozen=True, kw_only=True)
class Population:
    """search.scheduler with the name pbt: population-based training (Jaderberg et al. 2017)."""

    interval: int | None = option(None, low=1, help="rounds between two comparisons; null: a tenth of the rounds")
    share: float = option(
        0.25, above=0, high=0.5, help="share of the trials that go on from the state of one of as many of the best"
    )
    resample: float = option(
        0.25, low=0, high=1, help="probability that a value is drawn anew; else it is 0.8 or 1.2 times that of the best"
    )


@dataclass(frozen=True, kw_only=True)
class Search:
    """search.*: how configurations are drawn, and whether trials may be stopped early."""

    kind: str = option(
        "grid",
        choices=("grid", "random", "optuna", "tune"),
        help="grid: all combinations of the grids; random: random draws; optuna: draws that follow from the validation "
        "scores of earlier ones; tune: draws of a search algorithm of Ray Tune, from rayfed.sweep(search_alg=)",
    )
    samples: int | None = option(
        None,
        low=1,
        help="configurations per arm; required for random, optuna and tune; with grid, a random subset of that size",
    )
    seed: int = option(0, low=0, help="seed of the random draws")
    scheduler: str | dict[str, Any] = option(
        "none",
        help="asha, hyperband or median: stop trials early whose validation scores lag behind; pbt: let them go on "
        "from the state of better ones, with changed hyperparameters; {name: pbt, interval: 5, share: 0.25, resample: "
        "0.25}: with options; module:Name: a scheduler of Ray Tune or of your own, with its arguments as options",
    )
    grace_rounds: int = option(1, low=1, help="asha and median: rounds that every trial runs before it may be stopped")
    reduction_factor: float = option(
        3.0, above=1, help="asha and hyperband: at each rung, 1 in reduction_factor trials continues"
    )
    max_concurrent: int | None = option(None, low=1, help="trials that run at once; null: as many as fit")

    def __post_init__(self) -> None:
        name, options = self.scheduler_name, self.scheduler_options
        if name not in SCHEDULERS and ":" not in name:
            raise UsageError(f"search.scheduler={shown(name)}: {suggestion(name, SCHEDULERS)}, or module:Name")
        if options and name in SCHEDULERS and name != "pbt":
            raise UsageError(
                f"search.scheduler.{next(iter(options))}: {name} has no options here; give search.grace_rounds and "
                "search.reduction_factor"
            )
        if name == "pbt":
            build(Population, options, where="search.scheduler")

    @property
    def scheduler_name(self) -> str:
        if isinstance(self.scheduler, str):
            return self.scheduler
        if "name" not in self.scheduler:
            raise UsageError("search.scheduler.name: required beside the options of a scheduler, such as pbt")
        return str(self.scheduler["name"])

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """The options of the scheduler by name."""
        if isinstance(self.scheduler, str):
            return {}
        return {name: value for name, value in self.scheduler.items() if name != "name"}

    @property
    def population(self) -> Population:
        """The options of pbt."""
        return build(Population, self.scheduler_options, where="search.scheduler")


@dataclass(frozen=True)
class AdaptiveArm:
    """An arm whose configurations are chosen one after the other.

    Attributes:
        tree: The configuration, with spaces in place of some values.
        spaces: By dotted key, the kind of each space with its bounds or values.
    """

    tree: dict[str, Any]
    spaces: Mapping[str, tuple[str, Sequence[Any]]]

    def filled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration with `values` in place of the spaces."""
        return _filled(self.tree, values)

    def corners(self) -> Iterator[dict[str, Any]]:
        """Yield configurations that have every bound and every listed value, to be checked before the start."""
        lists = {key: list(bounds) for key, (_, bounds) in self.spaces.items()}
        longest = max((len(values) for values in lists.values()), default=1)
        for position in range(longest):
            yield self.filled({key: values[min(position, len(values) - 1)] for key, values in lists.items()})


@dataclass(frozen=True)
class Space:
    """The configurations of a sweep, drawn.

    Attributes:
        search: How they were drawn.
        seeds: The seeds with which each configuration runs.
        arms: For each arm, its configurations as nested values; for an adaptive arm, its corners.
        adaptive: The arms of a search with `search.kind` optuna or tune, whose configurations are not known in advance.
        published: Values that somebody published for some of the arms.
        spaces: For each arm, its spaces by dotted key: the kind of each with its bounds or values.
    """

    search: Search
    seeds: tuple[int, ...]
    arms: tuple[tuple[dict[str, Any], ...], ...]
    adaptive: tuple[AdaptiveArm, ...] = ()
    published: PublishedRows | None = None
    spaces: tuple[Mapping[str, tuple[str, Sequence[Any]]], ...] = ()

    def trials(self) -> Iterator[dict[str, Any]]:
        """Yield every configuration with every seed, seed by seed. So early results compare all arms."""
        for seed in self.seeds:
            for arm in self.arms:
                for values in arm:
                    yield merged(values, {"seed": seed})

    @property
    def samples(self) -> list[int]:
        """The number of configurations that a search chooses for each adaptive arm."""
        return [(self.search.samples or 1) if arm.spaces else 1 for arm in self.adaptive]

    @property
    def searched_trials(self) -> int:
        """The number of trials of a search."""
        return sum(self.samples) * len(self.seeds)


def read_space(*sources: Mapping[str, Any]) -> Space:
    """Return the space that `sources` give: the first is the file, and later ones override the keys of all arms.

    Raises:
        UsageError: The space cannot be drawn from; the message names the key.
    """
    sweep = merged(*({k: v for k, v in s.items() if str(k).split(".")[0] in SPACE_KEYS} for s in sources))
    common, *overrides = ({k: v for k, v in s.items() if str(k).split(".")[0] not in SPACE_KEYS} for s in sources)
    search = build(Search, checked(sweep.get("search", {}), dict, {}, where="search"), where="search")
    if search.kind != "grid" and search.samples is None:
        raise UsageError(f"search.samples: required for search.kind={search.kind}; give the configurations per arm")
    arms = checked(_listed(sweep.get("arms", [{}])), list[dict[str, Any]], {}, where="arms")
    published = published_rows(sweep.get("published"), arms, sources[1:])
    arms = [{key: value for key, value in arm.items() if key != "published"} for arm in arms]
    trees = [merged(common, arm, *overrides) for arm in arms]
    spaces = tuple(dict(_spaces(tree, "")) for tree in trees)
    adaptive: tuple[AdaptiveArm, ...] = ()
    if search.kind in ("optuna", "tune"):
        adaptive = tuple(map(AdaptiveArm, trees, spaces))
    for tree in trees:
        _refuse_grid_of_splits(tree)
    for key in (key for arm in adaptive for key in arm.spaces):
        if key in ("seed", "results", "experiment", "resume") or key.split(".")[0] in _FIXED_IN_A_STUDY:
            raise UsageError(f"{key}: search.kind={search.kind} cannot choose it; give one value, or separate arms")
    if adaptive:
        drawn = tuple(tuple(arm.corners()) for arm in adaptive)
    else:
        drawn = tuple(tuple(_draw(tree, search, number)) for number, tree in enumerate(trees))
    single = [tree.get("seed", 0) for tree in trees]
    if "seeds" in sweep and (ignored := [tree["seed"] for tree in trees if "seed" in tree]):
        raise UsageError(
            f"seed={shown(ignored[0])}: has no effect beside seeds={shown(sweep['seeds'])}; give one of them"
        )
    if any(isinstance(seed, Mapping) or seed != single[0] for seed in single):
        raise UsageError("seed: all arms share it; for several seeds, write seeds: [0, 1, 2] outside of the arms")
    seeds = checked(_listed(sweep.get("seeds", single[:1])), list[int], {"low": 0}, where="seeds")
    if not seeds or not arms:
        raise UsageError("seeds and arms: expected lists with at least one entry, such as seeds=[0, 1, 2]")
    _refuse_twice("seeds", seeds)
    if published is not None:
        one_configuration(drawn, published)
    return Space(search, tuple(seeds), drawn, adaptive, published, spaces)


def _refuse_grid_of_splits(tree: Mapping[str, Any]) -> None:
    """Raise UsageError if an arm varies the seed of the partition, by which validation would then choose."""
    if "partition.seed" in dict(_spaces(tree, "")):
        raise UsageError(
            "partition.seed: a grid of splits would look like a hyperparameter; give seeds: [0, 1, 2] with "
            "partition.redraw=true, which draws a split for each seed"
        )


def configurations(space: Space) -> tuple[Config, ...]:
    """Return the configuration of every trial of `space`, in the order of `space.trials()`; see `Config.read`.

    Raises:
        UsageError: One of them cannot work; the message names the key.
    """
    configs = [Config.read(values) for arm in space.arms for values in arm]
    return tuple(replace(config, seed=seed) for seed in space.seeds for config in configs)


_FIXED_IN_A_STUDY = ("data", "partition", "evaluate", "placement", "metrics", "leave_out", "unseen_clients")
"""Groups that change what a validation score means, or what a trial reserves."""


def _draw(tree: dict[str, Any], search: Search, arm: int) -> Iterator[dict[str, Any]]:
    """Yield the configurations of arm number `arm`."""
    spaces = dict(_spaces(tree, ""))
    if search.kind == "random" and spaces:
        assert search.samples is not None, "checked above"
        rng = generator(search.seed, "search", arm=arm)
        drawn: set[str] = set()
        while len(drawn) < min(search.samples, _size(spaces)):
            values = {key: _sample(kind, bounds, rng) for key, (kind, bounds) in spaces.items()}
            if repr(values) not in drawn:  # lists of values may repeat a configuration
                drawn.add(repr(values))
                yield _filled(tree, values)
        return
    for key, (kind, _) in spaces.items():
        if kind not in ("grid", "choice"):
            raise UsageError(f"{key}: {kind} needs search.kind=random with search.samples; or give a grid")
    points = list(itertools.product(*(values for _, values in spaces.values())))
    if search.samples is not None and len(points) > search.samples:
        rng = generator(search.seed, "search", arm=arm)
        points = [points[i] for i in sorted(rng.choice(len(points), search.samples, replace=False))]
    for point in points:
        yield _filled(tree, dict(zip(spaces, point, strict=True)))


def _size(spaces: Mapping[str, tuple[str, Sequence[Any]]]) -> float:
    """Return how many configurations there are in `spaces`; infinity if a space is continuous."""
    size = 1.0
    for kind, bounds in spaces.values():
        if kind in ("uniform", "loguniform"):
            return math.inf
        size *= bounds[1] - bounds[0] + 1 if kind == "randint" else len(set(map(repr, bounds)))
    return size


def _filled(tree: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `tree` with each space replaced by the value drawn from it, which may be a mapping itself."""
    filled = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        inner = _filled(value, values, f"{path}.") if isinstance(value, Mapping) and path not in values else value
        filled[key] = values.get(path, inner)
    return filled


def _spaces(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, tuple[str, Sequence[Any]]]]:
    """Yield (dotted key, (kind, bounds or values)) of every space in `tree`."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            kind = next(iter(value), None)
            if len(value) == 1 and kind in KINDS:
                yield f"{prefix}{key}", (kind, _bounds(f"{prefix}{key}", kind, value[kind]))
            else:
                yield from _spaces(value, f"{prefix}{key}.")


def _listed(values: Any) -> Any:
    """Return a range, tuple or array as a list of Python's own values, and anything else as it is."""
    if not isinstance(values, (list, tuple, range, np.ndarray)):
        return values
    return [item.item() if isinstance(item, np.generic) else item for item in values]


def _bounds(key: str, kind: str, values: Any) -> Sequence[Any]:
    values = _listed(values)
    if not isinstance(values, list) or not values:
        raise UsageError(f"{key}: {kind} needs a list of values, got {shown(values)}")
    if kind == "grid":
        _refuse_twice(f"{key}: grid", values)
    if kind in ("grid", "choice"):
        return values
    number_type = int if kind == "randint" else float
    try:
        low, high = (checked(value, number_type, {}, where=key) for value in values)
    except ValueError:  # a UsageError, or not two
        low = high = 0
    if not low < high or (kind == "loguniform" and low <= 0):
        words = "two integers" if kind == "randint" else "two numbers"
        order = "0 < low < high" if kind == "loguniform" else "low < high"
        raise UsageError(f"{key}: {kind} needs {words} [low, high] with {order}, got {shown(values)}")
    return [low, high]


def _refuse_twice(where: str, values: Sequence[Any]) -> None:
    """Raise UsageError if a value is there twice, as two trials would be the same."""
    written = list(map(repr, values))
    for value in values:
        times = written.count(repr(value))
        if times > 1:
            raise UsageError(f"{where}: {shown(value)} is there {times} times; give each value once")


def _sample(kind: str, bounds: Sequence[Any], rng: np.random.Generator) -> Any:
    if kind in ("grid", "choice"):
        return bounds[int(rng.integers(len(bounds)))]
    low, high = bounds
    if kind == "randint":
        return int(rng.integers(low, high, endpoint=True))
    if kind == "loguniform":
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))
    return float(rng.uniform(low, high))
