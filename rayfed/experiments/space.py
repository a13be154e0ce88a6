"""Search spaces: the configuration tree with spaces in place of values, and the configurations drawn from it.

    experiment: adcol
    seeds: [0, 1, 2]                       every configuration runs once with each
    search: {kind: grid}                   see `Search`
    rounds: 20                             any key of the configuration, for all arms
    arms:                                  one for each thing compared; keys here win over those above
      - algorithm.name: fedavg
      - algorithm.name: adcol
        algorithm.mu: {grid: [0.1, 1, 10]}

A space is written {grid: […]}, {choice: […]}, {uniform: [low, high]}, {loguniform: [low, high]} or
{randint: [low, high]} (high included), wherever a value may stand.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import SPACE_KINDS as KINDS
from rayfed.core.options import build, checked, option
from rayfed.core.rng import generator
from rayfed.experiments.sources import merged


@dataclass(frozen=True, kw_only=True)
class Search:
    """search.*: how configurations are drawn, and which trials may be stopped early."""

    kind: str = option("grid", choices=("grid", "random"), help="every point of the grids, or random draws")
    samples: int | None = option(
        None, low=1, help="configurations per arm, the same for all: needed for random; caps a grid by a random choice"
    )
    seed: int = option(0, low=0, help="seed of the draws")
    scheduler: str = option("none", choices=("none", "asha"), help="stop trials whose validation accuracy lags behind")
    grace_rounds: int = option(1, low=1, help="asha: rounds before a trial may be stopped")
    reduction_factor: float = option(3.0, above=1, help="asha: one in so many goes on at each rung")
    max_concurrent: int | None = option(None, low=1, help="trials at once; null: as many as fit")


@dataclass(frozen=True)
class Space:
    """A sweep as drawn: `arms` holds for each arm its configurations (dotted values), `seeds` what each runs with."""

    search: Search
    seeds: tuple[int, ...]
    arms: tuple[tuple[dict[str, Any], ...], ...]

    def trials(self) -> Iterator[dict[str, Any]]:
        """Every configuration with every seed, seeds outermost, so that early results compare all arms."""
        for seed in self.seeds:
            for arm in self.arms:
                for values in arm:
                    yield merged(values, {"seed": seed})


def read_space(*sources: Mapping[str, Any]) -> Space:
    """The space that `sources` say, later ones winning over the keys of all arms.

    Raises:
        UsageError: what cannot be, in one line.
    """
    sweep_keys = ("seeds", "search", "arms")
    own = merged(*({k: v for k, v in s.items() if str(k).split(".")[0] in sweep_keys} for s in sources))
    file, *over = ({k: v for k, v in s.items() if str(k).split(".")[0] not in sweep_keys} for s in sources)
    if not isinstance(own.get("search", {}), Mapping):
        raise UsageError(f"search={own['search']!r}: a group of keys; did you mean search.kind={own['search']}?")
    search = build(Search, own.get("search", {}), where="search")
    arms = own.get("arms", [{}])
    if not isinstance(arms, list) or not arms or not all(isinstance(arm, Mapping) for arm in arms):
        raise UsageError("arms: expected a list with the keys of each arm, such as - algorithm.name: fedavg")
    trees = [merged(file, arm, *over) for arm in arms]
    drawn = tuple(tuple(_draw(tree, search, number)) for number, tree in enumerate(trees))
    seeds = own.get("seeds", [trees[0].get("seed", 0)])
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise UsageError(f"seeds={seeds!r}: expected a list of whole numbers from 0, such as [0, 1, 2]")
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds={seeds!r}: each seed once")
    return Space(search, tuple(seeds), drawn)


def _draw(tree: dict[str, Any], search: Search, arm: int) -> Iterator[dict[str, Any]]:
    spaces = dict(_spaces(tree, ""))
    if search.kind == "random" and spaces:
        if search.samples is None:
            raise UsageError("search.samples: needed for search.kind=random: how many configurations of each arm")
        rng = generator(search.seed, "search", arm)
        for _ in range(search.samples):
            yield _filled(tree, {key: _sample(kind, bounds, rng) for key, (kind, bounds) in spaces.items()})
        return
    for key, (kind, _) in spaces.items():
        if kind not in ("grid", "choice"):
            raise UsageError(f"{key}: {kind} has no grid; use search.kind=random with search.samples, or a grid")
    points = list(itertools.product(*(values for _, values in spaces.values())))
    if search.samples is not None and len(points) > search.samples:
        rng = generator(search.seed, "search", arm)
        points = [points[i] for i in sorted(rng.choice(len(points), search.samples, replace=False))]
    for point in points:
        yield _filled(tree, dict(zip(spaces, point, strict=True)))


def _filled(tree: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`tree` with the value drawn in place of each space (not merged with it: a value may be a group itself)."""
    filled = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        inner = _filled(value, values, f"{path}.") if isinstance(value, Mapping) and path not in values else value
        filled[key] = values.get(path, inner)
    return filled


def _spaces(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, tuple[str, Sequence[Any]]]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            kind = next(iter(value), None)
            if len(value) > 1 and set(value) <= set(KINDS):
                raise UsageError(f"{prefix}{key}: is searched by {' and '.join(value)}; one of them, in all places")
            if len(value) == 1 and kind in KINDS:
                yield f"{prefix}{key}", (kind, _bounds(f"{prefix}{key}", kind, value[kind]))
            else:
                yield from _spaces(value, f"{prefix}{key}.")


def _bounds(key: str, kind: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, list) or not values:
        raise UsageError(f"{key}: {kind} needs a list of values, got {values!r}")
    if kind in ("grid", "choice"):
        return values
    number = int if kind == "randint" else float
    try:
        low, high = (checked(value, number, {}, where=key) for value in values)
    except ValueError:  # a UsageError, or not two
        low = high = 0
    if not low < high or (kind == "loguniform" and low <= 0):
        words = "two whole numbers" if kind == "randint" else "two numbers"
        least = "0 < low" if kind == "loguniform" else "low"
        raise UsageError(f"{key}: {kind} needs {words} [low, high] with {least} < high, got {values!r}")
    return [low, high]


def _sample(kind: str, bounds: Sequence[Any], rng: np.random.Generator) -> Any:
    if kind in ("grid", "choice"):
        return bounds[int(rng.integers(len(bounds)))]
    low, high = bounds
    if kind == "randint":
        return int(rng.integers(low, high + 1))
    if kind == "loguniform":
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))
    return float(rng.uniform(low, high))
