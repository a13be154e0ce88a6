"""The hyperparameters that validation chooses.

A choice compares means over seeds, so only groups of trials with the same seeds take part in it: at another seed,
other validation examples may be harder.

Where each seed draws its split anew, a test example of one seed is a validation example of another, and a mean over
seeds would choose by test examples. Then each seed chooses for itself, as in nested cross-validation. The chosen trials
of all seeds are one more group, with the hyperparameters `BY_SEED`.
"""

from collections.abc import Iterator, Mapping

import pandas as pd

from rayfed.reports.groups import LEFT_OUT
from rayfed.reports.selection import TRIAL, criterion_rows, ranking_cost, selected_rounds
from rayfed.reports.splits import REDRAWN, Splits

BY_SEED = "each seed's choice"
_ALGORITHM = ["experiment", "algorithm"]


def chosen_groups(rows: pd.DataFrame, done: pd.DataFrame, keys: list[str], criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return, for each value of `keys`, the `order` of the group of trials that validation prefers.

    Args:
        rows: The rows of a summary.
        done: The trials that count.
        keys: Columns of `rows`, experiment and algorithm among them. A group without alternatives is always chosen.
        criteria: The metric of each experiment that chooses.
    """
    of_participants = ~rows["unseen"] & (rows["rule"] == "selected")
    is_selected = of_participants & (rows["quantity"] == "mean")
    scores = criterion_rows(rows[is_selected], criteria)
    scores = scores.merge(_choosable(done), on=["experiment", "order"])
    cost = ranking_cost(scores["mean"], scores["higher_is_better"])
    ordered = scores.assign(cost=cost).sort_values(["cost", "order"])
    best = ordered.drop_duplicates(keys)[[*keys, "order"]]
    groups = rows[[*keys, "order"]].drop_duplicates()
    only = groups.drop_duplicates(keys, keep=False)
    return pd.concat([best, only], ignore_index=True).drop_duplicates()


def _choosable(done: pd.DataFrame) -> pd.DataFrame:
    """Return the groups among which validation may choose: columns experiment and order."""
    rows = []
    for (experiment, _), of_algorithm in done.groupby(_ALGORITHM):
        by_seed = of_algorithm["hyperparameters"] == BY_SEED
        orders = set(of_algorithm.loc[by_seed, "order"]) or _with_same_seeds(of_algorithm)
        rows += [(experiment, order) for order in sorted(orders)]
    return pd.DataFrame(rows, columns=["experiment", "order"])


def _with_same_seeds(of_algorithm: pd.DataFrame) -> set[int]:
    """Return the groups of an algorithm that have the most seeds; none if these are not the same seeds."""
    seeds = _seeds_of_groups(of_algorithm)
    most = max(len(of_group) for of_group in seeds.values())
    largest = {}
    for order, of_group in seeds.items():
        if len(of_group) == most:
            largest[order] = of_group
    if len(set(largest.values())) > 1:
        return set()
    return set(largest)


def _seeds_of_groups(of_algorithm: pd.DataFrame) -> dict[int, frozenset[tuple[int, str]]]:
    """Return the seeds, with their left-out domains, of each group."""
    seeds = {}
    for order, group in of_algorithm.groupby("order"):
        pairs = zip(group["seed"], group[LEFT_OUT], strict=True)
        seeds[int(order)] = frozenset(pairs)
    return seeds


def seed_notes(done: pd.DataFrame) -> Iterator[str]:
    """Yield a note on each algorithm with groups of trials that lack seeds, and so take no part in the choice."""
    for (experiment, algorithm), of_algorithm in done.groupby(_ALGORITHM):
        seeds = _seeds_of_groups(of_algorithm)
        if len(set(seeds.values())) == 1:
            continue
        choosable = _with_same_seeds(of_algorithm)
        if not choosable:
            yield (
                f"{experiment}: no hyperparameters of {algorithm} are chosen, because the seeds that have finished "
                "differ; run all of them with the same seeds."
            )
            continue
        counted = of_algorithm[of_algorithm["order"].isin(choosable)]
        numbers = sorted(counted["seed"].unique())
        names = ", ".join(map(str, numbers))
        share = f"{len(choosable)} of {len(seeds)} hyperparameters"
        yield (
            f"{experiment}: of {algorithm}, {share} take part in the choice, those with the seeds {names}; the others "
            "have fewer seeds."
        )


def with_choices_by_seed(
    done: pd.DataFrame,
    curves: pd.DataFrame,
    splits: Mapping[str, Splits],
    criteria: Mapping[str, str],
    points: Mapping[tuple[str, int], str],
) -> pd.DataFrame:
    """Return `done` with the group `BY_SEED` of each algorithm that was tuned on splits that every seed draws anew.

    Args:
        done: The trials that count. The `order` of their groups is even.
        curves: The scores of all trials, aggregated over clients.
        splits, criteria: The splits and the metric that chooses, by experiment.
        points: The point at which each group is scored, by experiment and order.
    """
    parts = [done]
    for (experiment, _), of_algorithm in done.groupby(_ALGORITHM):
        if splits[experiment].kind != REDRAWN or of_algorithm["order"].nunique() < 2:
            continue
        orders = _with_same_seeds(of_algorithm)
        scored_at = {points.get((experiment, order)) for order in orders}
        if len(scored_at) != 1:  # another model is scored with some hyperparameters
            continue
        candidates = of_algorithm[of_algorithm["order"].isin(orders)]
        choices = _best_by_seed(candidates, curves, criteria, scored_at.pop())
        if set(choices["seed"]) == set(candidates["seed"]):
            chosen = candidates.merge(choices, on=["order", "seed"])
            order = int(of_algorithm["order"].max()) + 1
            parts.append(chosen.assign(order=order, hyperparameters=BY_SEED))
    return pd.concat(parts, ignore_index=True)


def _best_by_seed(
    candidates: pd.DataFrame, curves: pd.DataFrame, criteria: Mapping[str, str], point: str | None
) -> pd.DataFrame:
    """Return the order of the group with the best validation value at each seed: columns order and seed."""
    is_at_point = ~curves["unseen"] & (curves["point"] == point)
    shown = (curves["quantity"] == "mean") & is_at_point
    scores = criterion_rows(curves[shown], criteria)
    at_best = scores.merge(selected_rounds(scores, criteria))
    of_candidates = at_best.merge(candidates[[*TRIAL, "order", "seed"]], on=TRIAL)
    values = of_candidates.groupby(["order", "seed", "higher_is_better"])["value"].mean().reset_index()
    cost = ranking_cost(values["value"], values["higher_is_better"])
    ordered = values.assign(cost=cost).sort_values(["cost", "order"])
    return ordered.drop_duplicates("seed")[["order", "seed"]]


def by_seed_notes(done: pd.DataFrame) -> Iterator[str]:
    """Yield what the seeds of each group `BY_SEED` chose."""
    chosen = done[done["hyperparameters"] == BY_SEED]
    of_groups = done[done["hyperparameters"] != BY_SEED]
    names = of_groups[[*TRIAL, "hyperparameters"]].rename(columns={"hyperparameters": "name"})
    for (experiment, algorithm), rows in chosen.merge(names, on=TRIAL).groupby(_ALGORITHM):
        words = []
        for name, seeds in rows.groupby("name")["seed"]:
            numbers = ", ".join(map(str, sorted(seeds.unique())))
            words.append(f"{name} at seeds {numbers}")
        choices = "; ".join(words)
        yield f"{experiment}: {algorithm}, {BY_SEED}: {choices}."
