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


_FIXED_IN_A_SEARCH = ("data", "partition", "evaluate", "placement", "metrics", "leave_out", "unseen_clients")
"""The keys that change what a validation score means, or what a trial reserves."""

KindAndBounds = tuple[str, Sequence[Any]]
"""The kind of a space, such as "grid", with its bounds or values."""

Spaces = Mapping[str, KindAndBounds]
"""The spaces of an arm by dotted key."""


@dataclass(frozen=True, kw_only=True)
class PopulationTraining:
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
        name = self.scheduler_name
        options = self.scheduler_options
        if name not in SCHEDULERS and ":" not in name:
            raise UsageError(f"search.scheduler={shown(name)}: {suggestion(name, SCHEDULERS)}, or module:Name")
        if options and name in SCHEDULERS and name != "pbt":
            raise UsageError(
                f"search.scheduler.{next(iter(options))}: {name} has no options here; give search.grace_rounds and "
                "search.reduction_factor"
            )
        if name == "pbt":
            build(PopulationTraining, options, where="search.scheduler")

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
        options = dict(self.scheduler)
        del options["name"]
        return options

    @property
    def population(self) -> PopulationTraining:
        """The options of pbt."""
        return build(PopulationTraining, self.scheduler_options, where="search.scheduler")


@dataclass(frozen=True)
class AdaptiveArm:
    """An arm whose configurations are chosen one after the other.

    Attributes:
        tree: The configuration, with spaces in place of some values.
        spaces: By dotted key, the kind of each space with its bounds or values.
    """

    tree: dict[str, Any]
    spaces: Spaces

    def filled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration with `values` in place of the spaces."""
        return _filled(self.tree, values)

    def corners(self) -> Iterator[dict[str, Any]]:
        """Yield configurations that have every bound and every listed value, to be checked before the start."""
        longest = 1
        for _, bounds in self.spaces.values():
            longest = max(longest, len(bounds))
        for position in range(longest):
            corner = {}
            for key, (_, bounds) in self.spaces.items():
                last = len(bounds) - 1
                corner[key] = bounds[min(position, last)]
            yield self.filled(corner)


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
    spaces: tuple[Spaces, ...] = ()

    def trials(self) -> Iterator[dict[str, Any]]:
        """Yield every configuration with every seed, seed by seed. So early results compare all arms."""
        for seed in self.seeds:
            for arm in self.arms:
                for values in arm:
                    yield merged(values, {"seed": seed})

    @property
    def samples(self) -> list[int]:
        """The number of configurations that a search chooses for each adaptive arm."""
        return [self._samples_of(arm) for arm in self.adaptive]

    def _samples_of(self, arm: AdaptiveArm) -> int:
        if not arm.spaces:
            return 1
        return self.search.samples or 1

    @property
    def searched_trials(self) -> int:
        """The number of trials of a search."""
        return sum(self.samples) * len(self.seeds)


def read_space(*sources: Mapping[str, Any]) -> Space:
    """Return the space that `sources` give: the first is the file, and later ones override the keys of all arms.

    Raises:
        UsageError: The space cannot be drawn from; the message names the key.
    """
    sweep = merged(*map(_space_values, sources))
    search = _read_search(sweep)
    arms = checked(_listed(sweep.get("arms", [{}])), list[dict[str, Any]], {}, where="arms")
    published = published_rows(sweep.get("published"), arms, sources[1:])
    common, *overrides = map(_configuration_values, sources)
    trees = []
    for arm in arms:
        arm.pop("published", None)
        trees.append(merged(common, arm, *overrides))
    spaces = tuple(dict(_spaces(tree, "")) for tree in trees)
    for of_arm in spaces:
        _refuse_grid_of_splits(of_arm)
    adaptive: tuple[AdaptiveArm, ...] = ()
    if search.kind in ("optuna", "tune"):
        adaptive = tuple(map(AdaptiveArm, trees, spaces))
        _refuse_fixed(adaptive, search)
        drawn = tuple(tuple(arm.corners()) for arm in adaptive)
    else:
        drawn = tuple(tuple(_draw(arm, trees[arm], spaces[arm], search)) for arm in range(len(trees)))
    seeds = _read_seeds(sweep, trees)
    if published is not None:
        one_configuration(drawn, published)
    return Space(search, seeds, drawn, adaptive, published, spaces)


def _space_values(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a source that only a search space has."""
    return {key: value for key, value in source.items() if _is_of_space(key)}


def _configuration_values(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a source that a configuration has, with spaces in place of some."""
    return {key: value for key, value in source.items() if not _is_of_space(key)}


def _is_of_space(key: Any) -> bool:
    return str(key).split(".")[0] in SPACE_KEYS


def _read_search(sweep: Mapping[str, Any]) -> Search:
    """Return the options search.* of a sweep."""
    options = checked(sweep.get("search", {}), dict, {}, where="search")
    search = build(Search, options, where="search")
    if search.kind != "grid" and search.samples is None:
        raise UsageError(f"search.samples: required for search.kind={search.kind}; give the configurations per arm")
    return search


def _read_seeds(sweep: Mapping[str, Any], trees: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the seeds of a sweep: its key `seeds`, or else the `seed` that the configurations of all arms share."""
    for tree in trees:
        if "seeds" in sweep and "seed" in tree:
            seed = shown(tree["seed"])
            raise UsageError(f"seed={seed}: has no effect beside seeds={shown(sweep['seeds'])}; give one of them")
    of_arms = [tree.get("seed", 0) for tree in trees]
    for seed in of_arms:
        if isinstance(seed, Mapping) or seed != of_arms[0]:
            raise UsageError("seed: all arms share it; for several seeds, write seeds: [0, 1, 2] outside of the arms")
    seeds = checked(_listed(sweep.get("seeds", of_arms[:1])), list[int], {"low": 0}, where="seeds")
    if not seeds or not trees:
        raise UsageError("seeds and arms: expected lists with at least one entry, such as seeds=[0, 1, 2]")
    _refuse_twice("seeds", seeds)
    return tuple(seeds)


def _refuse_grid_of_splits(spaces: Spaces) -> None:
    """Raise UsageError if an arm varies the seed of the partition, by which validation would then choose."""
    if "partition.seed" in spaces:
        raise UsageError(
            "partition.seed: a grid of splits would look like a hyperparameter; give seeds: [0, 1, 2] with "
            "partition.redraw=true, which draws a split for each seed"
        )


def _refuse_fixed(arms: Sequence[AdaptiveArm], search: Search) -> None:
    """Raise UsageError if a search would choose what its trials must share."""
    for arm in arms:
        for key in arm.spaces:
            if key in ("seed", "results", "experiment", "resume") or key.split(".")[0] in _FIXED_IN_A_SEARCH:
                raise UsageError(f"{key}: search.kind={search.kind} cannot choose it; give one value, or separate arms")


def configurations(space: Space) -> tuple[Config, ...]:
    """Return the configuration of every trial of `space`, in the order of `space.trials()`; see `Config.read`.

    Raises:
        UsageError: One of them cannot work; the message names the key.
    """
    of_one_seed = [Config.read(values) for values in itertools.chain(*space.arms)]
    configs = []
    for seed in space.seeds:
        configs += [replace(config, seed=seed) for config in of_one_seed]
    return tuple(configs)


def _draw(arm: int, tree: dict[str, Any], spaces: Spaces, search: Search) -> Iterator[dict[str, Any]]:
    """Yield the configurations of arm number `arm`."""
    rng = generator(search.seed, "search", arm=arm)
    if search.kind == "random" and spaces:
        points = _random_points(spaces, search, rng)
    else:
        points = _grid_points(spaces, search, rng)
    for values in points:
        yield _filled(tree, values)


def _random_points(spaces: Spaces, search: Search, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield `search.samples` different points, or all if there are fewer."""
    assert search.samples is not None, "checked above"
    count = min(search.samples, _size(spaces))
    drawn: set[str] = set()
    while len(drawn) < count:
        values = {key: _sample(kind, bounds, rng) for key, (kind, bounds) in spaces.items()}
        if repr(values) not in drawn:  # lists of values may repeat a configuration
            drawn.add(repr(values))
            yield values


def _grid_points(spaces: Spaces, search: Search, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield all points of the grids, or a random subset with `search.samples` of them."""
    lists = []
    for key, (kind, values) in spaces.items():
        if kind not in ("grid", "choice"):
            raise UsageError(f"{key}: {kind} needs search.kind=random with search.samples; or give a grid")
        lists.append(values)
    points = list(itertools.product(*lists))
    if search.samples is not None and len(points) > search.samples:
        chosen = sorted(rng.choice(len(points), search.samples, replace=False))
        points = [points[i] for i in chosen]
    for point in points:
        yield dict(zip(spaces, point, strict=True))


def _size(spaces: Spaces) -> float:
    """Return how many configurations there are in `spaces`; infinity if a space is continuous."""
    size = 1.0
    for kind, bounds in spaces.values():
        if kind in ("uniform", "loguniform"):
            return math.inf
        if kind == "randint":
            low, high = bounds
            size *= high - low + 1
        else:
            size *= len(set(map(repr, bounds)))
    return size


def _filled(tree: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `tree` with each space replaced by the value drawn from it, which may be a mapping itself."""
    filled = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in values:
            filled[key] = values[path]
        elif isinstance(value, Mapping):
            filled[key] = _filled(value, values, f"{path}.")
        else:
            filled[key] = value
    return filled


def _spaces(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, KindAndBounds]]:
    """Yield the dotted key of every space in `tree`, with its kind and its bounds or values."""
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            continue
        path = f"{prefix}{key}"
        kind = next(iter(value), None)
        if len(value) == 1 and kind in KINDS:
            yield path, (kind, _bounds(path, kind, value[kind]))
        else:
            yield from _spaces(value, f"{path}.")


def _listed(values: Any) -> Any:
    """Return a range, tuple or array as a list of Python's own values, and anything else as it is."""
    if not isinstance(values, (list, tuple, range, np.ndarray)):
        return values
    return [_python_value(item) for item in values]


def _python_value(item: Any) -> Any:
    if isinstance(item, np.generic):
        return item.item()
    return item


def _bounds(key: str, kind: str, values: Any) -> Sequence[Any]:
    values = _listed(values)
    if not isinstance(values, list) or not values:
        raise UsageError(f"{key}: {kind} needs a list of values, got {shown(values)}")
    if kind == "grid":
        _refuse_twice(f"{key}: grid", values)
    if kind in ("grid", "choice"):
        return values
    number_type: type = float
    words = "two numbers"
    order = "low < high"
    if kind == "randint":
        number_type = int
        words = "two integers"
    if kind == "loguniform":
        order = "0 < low < high"
    try:
        low, high = (checked(value, number_type, {}, where=key) for value in values)
    except ValueError:  # a UsageError, or not two
        low = high = 0
    if not low < high or (kind == "loguniform" and low <= 0):
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
