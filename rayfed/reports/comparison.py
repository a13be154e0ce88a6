"""Paired comparison of methods over common seeds, with tests of significance."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.reports.groups import LOCATION_KEYS
from rayfed.reports.read import Tables
from rayfed.reports.selection import TRIAL, pick_rounds, scores_of
from rayfed.reports.significance import NOISE, cohens_dz, holm, paired_t, wilcoxon
from rayfed.reports.summary import RULE_CAPTIONS, Summary, View, average_words, filter_rows, seed_values, summarise

_GROUP = ["algorithm", "hyperparameters", "order"]
# The columns that decide which client holds which examples: the hash names rows of the dataset that data.* describe.
_PAIRED = ("data.", "partition.", "partition_hash", "unseen_clients", "unseen_share", "leave_out")
# The hash covers the contents of the partition file, and what the seed of the partition draws.
_NOT_PAIRED = (*LOCATION_KEYS, "partition.file", "partition.seed")
_CONFIDENCE = 0.95


class Comparison(NamedTuple):
    """The second method minus the first, by seed.

    Attributes:
        first, second: The names of the methods.
        orders: The `order` of both.
        differences: The differences, with the seeds as index.
        low, high: The 95 % confidence interval of the mean difference by Student's t.
        effect: The effect size, Cohen's d_z.
        p_t, p_wilcoxon: The p-values of the paired t test and of Wilcoxon's signed-rank test, after Holm's correction.
    """

    first: str
    second: str
    orders: tuple[int, int]
    differences: pd.Series
    low: float
    high: float
    effect: float
    p_t: float
    p_wilcoxon: float

    @property
    def wins(self) -> int:
        """The number of seeds at which the second has the greater value."""
        return int((self.differences > NOISE).sum())


class Pairs(NamedTuple):
    """The comparisons of the methods of one experiment.

    Attributes:
        experiment, split, metric: What is compared.
        caption: What the values are means over, and by which rule rounds are picked.
        comparisons: One for each pair. If all pairs are compared, the better method of a pair is second.
        notes: Sentences on pairs that are missing and seeds that are left out.
        best: The `order` of the best method; None if only one pair was compared.
    """

    experiment: str
    split: str
    metric: str
    caption: str
    comparisons: list[Comparison]
    notes: list[str]
    best: int | None


def compare(tables: Tables, view: View, names: Sequence[str] = (), summary: Summary | None = None) -> Pairs:
    """Compare all pairs of methods, or the second of two `names` with the first.

    A method with several hyperparameters takes part with those that validation chose, or with all if it chose none.

    Args:
        tables: The tables of one experiment.
        names: Two methods; see `find_group`.
        summary: The summary of `tables`, if the caller has it.

    Raises:
        UsageError: Several experiments, no values, a name that is not in the results, or no methods that can be paired.
    """
    experiment = _only_experiment(tables)
    rows = (summary or summarise(tables)).rows
    shown = filter_rows(rows, tables, view)
    scores = _scores(tables, shown, view)
    groups = _groups(rows, shown)
    if names:
        first, second = (find_group(name, groups) for name in names)
        labels = {first: names[0], second: names[1]}
        best = None
        pairs = [(first, second)]
    else:
        labels = _chosen_methods(groups[groups["order"].isin(scores.values.columns)])
        ranked = _ranked(scores.values[list(labels)], shown)
        best = ranked[-1]
        pairs = list(itertools.combinations(ranked, 2))
    comparisons, notes = _compared_pairs(scores, pairs, labels, strict=bool(names))
    average = average_words(tables.counts, tables.trials, scores.split, scores.metric)
    picked = RULE_CAPTIONS[scores.rule].format(criterion=tables.criteria[experiment])
    return Pairs(
        experiment=experiment,
        split=scores.split,
        metric=scores.metric,
        caption=f"{average}, {picked}",
        comparisons=_corrected(comparisons),
        notes=notes,
        best=best,
    )


def _only_experiment(tables: Tables) -> str:
    experiments = sorted(set(tables.trials["experiment"]))
    if len(experiments) > 1:
        raise UsageError(f"compare: takes one experiment; choose with --experiment: {', '.join(experiments)}")
    return str(experiments[0])


@dataclass(frozen=True)
class _Scores:
    """The scores to compare.

    Attributes:
        values: The means over clients at the picked rounds: a row per seed, a column per `order`.
        data: What decides which client holds which examples, as text by order and seed.
        split, metric, rule: What the values are.
    """

    values: pd.DataFrame
    data: pd.DataFrame
    split: str
    metric: str
    rule: str


def _scores(tables: Tables, shown: pd.DataFrame, view: View) -> _Scores:
    split = str(shown["split"].iloc[0])
    metric = str(shown["metric"].iloc[0])
    values, rule = _values(tables, replace(view, metric=metric, split=split))
    return _Scores(values, _data(tables), split, metric, rule)


def _groups(rows: pd.DataFrame, shown: pd.DataFrame) -> pd.DataFrame:
    """Return a row per group of trials, with `chosen` at the point that is shown, which may differ between points."""
    everything = pd.concat([shown, rows.assign(chosen=False)])
    groups = everything[[*_GROUP, "chosen"]].drop_duplicates("order")
    return groups.sort_values("order", ignore_index=True)


def _ranked(values: pd.DataFrame, shown: pd.DataFrame) -> list[int]:
    """Return the columns of `values`, the best one last."""
    ascending = bool(shown["higher_is_better"].iloc[0])
    means = values.mean().sort_values(ascending=ascending, kind="stable")
    return [int(order) for order in means.index]


def _chosen_methods(groups: pd.DataFrame) -> dict[int, str]:
    """Return the names of the methods to compare by `order`: those that validation chose, or all if it chose none.

    Raises:
        UsageError: There are fewer than two.
    """
    has_choice = groups.groupby("algorithm")["chosen"].transform("any")
    groups = groups[groups["chosen"] | ~has_choice]
    if len(groups) < 2:
        raise UsageError("compare: needs two methods or more with finished trials")
    alone = ~groups["algorithm"].duplicated(keep=False)
    names = groups["algorithm"].where(alone, _labels(groups))
    return dict(zip(groups["order"].tolist(), names, strict=True))


def _labels(groups: pd.DataFrame) -> pd.Series:
    """Return the algorithms with their hyperparameters, as the table shows them."""
    return (groups["algorithm"] + " " + groups["hyperparameters"]).str.strip()


def _values(tables: Tables, view: View) -> tuple[pd.DataFrame, str]:
    """Return the means over clients at the picked rounds: a row per seed, a column per `order`; and the rule."""
    assert view.metric is not None and view.split is not None  # noqa: PT018
    done = tables.done
    criteria = tables.criteria
    curves = tables.curves[~tables.curves["unseen"]].merge(done[TRIAL], on=TRIAL)
    picked = pick_rounds(scores_of(curves, view.metric, view.split, criteria), criteria)
    rows = filter_rows(picked.merge(done[[*TRIAL, *_GROUP]], on=TRIAL), tables, view)
    rows = rows[rows["quantity"] == "mean"]
    rule = view.rule or _default_rule(rows)
    keys = ["metric", "higher_is_better", "quantity"]
    of_rule = rows.loc[rows["rule"] == rule, [*TRIAL, *keys, "value"]]
    values = seed_values(of_rule, done, keys)
    return values.pivot_table(index="seed", columns="order", values="value"), rule


def _default_rule(rows: pd.DataFrame) -> str:
    trials = rows.groupby("rule")["trial"].agg(set)
    if trials.get("selected") == trials.get("final"):
        return "selected"
    return "final"


def _data(tables: Tables) -> pd.DataFrame:
    """Return the columns that decide which client holds which examples, as text by order and seed."""
    trials = tables.trials.merge(tables.done[[*TRIAL, "order"]], on=TRIAL)
    columns = [name for name in trials if name.startswith(_PAIRED) and name not in _NOT_PAIRED]
    values = trials[columns].astype(object)
    texts = values.where(values.notna(), None).map(str)
    return texts.groupby([trials["order"], trials["seed"]]).agg(_joined)


def _joined(texts: pd.Series) -> str:
    return ", ".join(sorted(set(texts)))


def _compared_pairs(
    scores: _Scores, pairs: Sequence[tuple[int, int]], labels: dict[int, str], *, strict: bool
) -> tuple[list[Comparison], list[str]]:
    """Return the comparison of each pair before the correction, and notes on pairs and seeds that are left out.

    Raises:
        UsageError: No pair can be compared, or with `strict` the only one.
    """
    comparisons = []
    notes = []
    for first, second in pairs:
        title = f"{labels[second]} − {labels[first]}"
        try:
            comparison = _compared(scores, (first, second), labels)
        except UsageError as error:
            if strict:
                raise
            notes.append(f"{title} is missing: {str(error).removeprefix('compare: ')}.")
            continue
        comparisons.append(comparison)
        has_one = scores.values[first].notna() != scores.values[second].notna()
        left_out = scores.values.index[has_one]
        if len(left_out):
            seeds = ", ".join(map(str, left_out))
            notes.append(f"{title}: only the seeds that both have count; left out: {seeds}.")
    if not comparisons:
        raise UsageError(f"compare: no two methods can be paired; {notes[0]}")
    return comparisons, notes


def _compared(scores: _Scores, orders: tuple[int, int], labels: dict[int, str]) -> Comparison:
    """Return the comparison of two methods, with p-values before the correction.

    Raises:
        UsageError: A method has no values, or the methods have fewer than two seeds in common, or trials with the same
            seed had different clients.
    """
    for order in orders:
        if order not in scores.values:
            raise UsageError(
                f"compare: {labels[order]} has no {scores.split} {scores.metric} under rule={scores.rule}; use final"
            )
    first, second = orders
    both = scores.values[[first, second]].dropna()
    if len(both) < 2:
        raise _too_few_seeds(scores.values, orders, labels)
    for seed in both.index:
        _check_same_data(scores.data, orders, labels, int(seed))
    return _tested(both[second] - both[first], orders, labels)


def _too_few_seeds(values: pd.DataFrame, orders: tuple[int, int], labels: dict[int, str]) -> UsageError:
    words = []
    for order in orders:
        seeds = ", ".join(map(str, values[order].dropna().index))
        words.append(f"{labels[order]} has seeds {seeds}")
    return UsageError(f"compare: {' and '.join(words)}; a paired comparison needs two seeds or more that both have")


def _check_same_data(data: pd.DataFrame, orders: tuple[int, int], labels: dict[int, str], seed: int) -> None:
    """Raise UsageError if the clients of two methods held different examples at `seed`."""
    first, second = (data.loc[(order, seed)] for order in orders)
    for column in first.index[first != second]:
        values = [f"{of[column]} for {labels[order]}" for of, order in zip((first, second), orders, strict=True)]
        raise UsageError(
            f"compare: {column} is {' and '.join(values)} at seed {seed}; pairs need the same clients and examples"
        )


def _tested(differences: pd.Series, orders: tuple[int, int], labels: dict[int, str]) -> Comparison:
    """Return the comparison that `differences`, with the seeds as index, give."""
    from scipy import stats

    count = len(differences)
    mean = float(differences.mean())
    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1))
    margin = quantile * float(differences.std()) / count**0.5
    first, second = orders
    return Comparison(
        first=labels[first],
        second=labels[second],
        orders=orders,
        differences=differences,
        low=mean - margin,
        high=mean + margin,
        effect=cohens_dz(differences),
        p_t=paired_t(differences),
        p_wilcoxon=wilcoxon(differences),
    )


def _corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return `comparisons` with p-values after Holm's correction for their number."""
    p_t = holm([comparison.p_t for comparison in comparisons])
    p_wilcoxon = holm([comparison.p_wilcoxon for comparison in comparisons])
    corrected = []
    for place, comparison in enumerate(comparisons):
        corrected.append(comparison._replace(p_t=p_t[place], p_wilcoxon=p_wilcoxon[place]))
    return corrected


def find_group(name: str, rows: pd.DataFrame) -> int:
    """Return the `order` of the group of trials called `name`.

    Args:
        name: An algorithm, for its only hyperparameters or those that validation chose; or an algorithm and
            hyperparameters, as the table shows them.
        rows: Columns algorithm, hyperparameters, order, chosen.

    Raises:
        UsageError: There is no such group, or there are several.
    """
    groups = rows.drop_duplicates("order")
    labels = _labels(groups)
    of_algorithm = groups[groups["algorithm"] == name]
    chosen = of_algorithm[of_algorithm["chosen"]]
    for found in (groups[labels == name], of_algorithm, chosen):
        if len(found) == 1:
            return int(found["order"].iloc[0])
    if of_algorithm.empty:
        known = suggestion(name, [*labels, *groups["algorithm"]])
        raise UsageError(f"compare: no trials of {name} are done; {known}")
    names = [f'"{label}"' for label in labels[of_algorithm.index]]
    raise UsageError(
        f"compare: {name} ran with several hyperparameters and validation chose none; give one of {'; '.join(names)}"
    )
