"""Paired comparison of methods over common seeds, for all clients together or site by site, with tests."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.reports.bootstrap import agrees, of_site, paired
from rayfed.reports.groups import LOCATION_KEYS
from rayfed.reports.predictions import NOT_RECORDED, Replicates
from rayfed.reports.read import Tables
from rayfed.reports.selection import DOMAIN, TRIAL, pick_rounds, scores_of
from rayfed.reports.significance import (
    NOISE,
    Tested,
    bootstrap_covariance,
    cohens_dz,
    corrected_resampled_t,
    holm,
    over_seeds_and_rows,
    paired_t,
    wilcoxon,
)
from rayfed.reports.splits import KEPT, REASSIGNED, REDRAWN, splits_of
from rayfed.reports.summary import RULE_CAPTIONS, Summary, View, average_words, filter_rows, seed_values, summarise

_GROUP = ["algorithm", "hyperparameters", "order"]
# The columns that decide which client holds which examples: the hash names rows of the dataset that data.* describe.
_PAIRED = ("data.", "partition.", "partition_hash", "unseen_clients", "unseen_share", "leave_out")
# The hash covers the contents of the partition file, and what the seed of the partition draws.
_NOT_PAIRED = (*LOCATION_KEYS, "data.standardize", "partition.file", "partition.seed")
SITES = ("domain", "client")
"""What `compare` can compare one by one."""
Site = str | int | None
"""A domain, the number of a client, or None for the mean over clients."""


class Comparison(NamedTuple):
    """The second method minus the first, by seed.

    Attributes:
        first, second: The names of the methods.
        orders: The `order` of both.
        site: The domain or the number of the client; None: the mean over clients.
        differences: The differences, with the seeds as index.
        tested: The test that fits the splits of the seeds: its name, the interval, and p before the correction.
        effect: The effect size, Cohen's d_z.
        p_value, p_wilcoxon: The p-values of this test and of Wilcoxon's signed-rank test, after Holm's correction.
    """

    first: str
    second: str
    orders: tuple[int, int]
    site: Site
    differences: pd.Series
    tested: Tested
    effect: float
    p_value: float
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
        comparisons: One for each pair, or for each pair and site. If all pairs are compared, the better method of a
            pair is second; with a baseline, that is first.
        notes: Sentences on pairs that are missing, seeds that are left out, and tests that had to be replaced.
        best: The `order` of the best method; None unless all pairs were compared.
        baseline: The name of the method with which all others were compared, if there is one.
        by: "domain" or "client" if sites were compared one by one.
    """

    experiment: str
    split: str
    metric: str
    caption: str
    comparisons: list[Comparison]
    notes: list[str]
    best: int | None
    baseline: str | None = None
    by: str | None = None


def compare(
    tables: Tables,
    view: View,
    names: Sequence[str] = (),
    summary: Summary | None = None,
    *,
    baseline: str | None = None,
    by: str | None = None,
) -> Pairs:
    """Compare all pairs of methods, all methods with a baseline, or the second of two `names` with the first.

    A method with several hyperparameters takes part with those that validation chose, or with all if it chose none.

    Args:
        tables: The tables of one experiment.
        names: Two methods; see `find_group`.
        summary: The summary of `tables`, if the caller has it.
        baseline: The method with which all others are compared, in place of all pairs.
        by: One of `SITES`, to compare methods at each domain or client; None: by the mean over clients.

    Raises:
        UsageError: Several experiments, no values, a name that is not in the results, no methods that can be paired, or
            a single site.
    """
    experiment = _only_experiment(tables)
    rows = (summary or summarise(tables)).rows
    shown = filter_rows(rows, tables, view)
    scores = _scores(tables, shown, view, by)
    groups = _groups(rows, shown)
    best = None
    if names:
        first, second = (find_group(name, groups) for name in names)
        labels = {first: names[0], second: names[1]}
        pairs = [(first, second)]
    elif baseline is not None:
        reference = find_group(baseline, groups, where="baseline")
        labels = _with_values(groups, scores) | {reference: baseline}
        pairs = []
        for order in _ranked(scores, labels, shown):
            if order != reference:
                pairs.append((reference, order))
    else:
        labels = _with_values(groups, scores)
        ranked = _ranked(scores, labels, shown)
        best = ranked[-1]
        pairs = list(itertools.combinations(ranked, 2))
    comparisons, notes = _compared_pairs(scores, pairs, labels, strict=bool(names))
    average = average_words(tables.counts, tables.trials, scores.split, scores.metric)
    if by is not None:
        average = f"by {by}"
    picked = RULE_CAPTIONS[scores.rule].format(criterion=tables.criteria[experiment])
    return Pairs(
        experiment=experiment,
        split=scores.split,
        metric=scores.metric,
        caption=f"{average}, {picked}",
        comparisons=_corrected(comparisons),
        notes=notes,
        best=best,
        baseline=baseline,
        by=by,
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
        values: The values at the picked rounds by site: a row per seed, a column per `order`.
        means: The means over clients, in the same form.
        data: What decides which client holds which examples, as text by order and seed.
        trials: The rows of the table `trials` that count, with `order`.
        replicates: What scores would be on other test examples.
        split, metric, rule: What the values are.
    """

    values: Mapping[Site, pd.DataFrame]
    means: pd.DataFrame
    data: pd.DataFrame
    trials: pd.DataFrame
    replicates: Replicates
    split: str
    metric: str
    rule: str


def _scores(tables: Tables, shown: pd.DataFrame, view: View, by: str | None) -> _Scores:
    split = str(shown["split"].iloc[0])
    metric = str(shown["metric"].iloc[0])
    picked, rule = _picked_rows(tables, replace(view, metric=metric, split=split))
    means = _by_seed(picked[picked["quantity"] == "mean"], tables)
    values: dict[Site, pd.DataFrame] = {None: means}
    if by is not None:
        values = {}
        for site, rows in _rows_of_sites(tables, picked, by):
            values[site] = _by_seed(rows, tables)
        if len(values) < 2:
            only = ", ".join(map(str, values)) or "none"
            found = f"the results have one {by} with {split} {metric} ({only})"
            raise UsageError(f"by={by}: {found}; leave --by out")
    trials = tables.trials.merge(tables.done[[*TRIAL, "order"]], on=TRIAL)
    replicates = Replicates(tables, picked, split, metric, rule)
    return _Scores(
        values=values,
        means=means,
        data=_data(trials),
        trials=trials,
        replicates=replicates,
        split=split,
        metric=metric,
        rule=rule,
    )


def _picked_rows(tables: Tables, view: View) -> tuple[pd.DataFrame, str]:
    """Return the values of each trial at the picked round, with seed and order; and the rule."""
    assert view.metric is not None and view.split is not None  # noqa: PT018
    done = tables.done
    criteria = tables.criteria
    trials = done[TRIAL].drop_duplicates()
    curves = tables.curves[~tables.curves["unseen"]].merge(trials, on=TRIAL)
    picked = pick_rounds(scores_of(curves, view.metric, view.split, criteria), criteria)
    groups = done[[*TRIAL, *_GROUP, "seed"]]
    rows = filter_rows(picked.merge(groups, on=TRIAL), tables, view)
    rule = view.rule or _default_rule(rows)
    return rows[rows["rule"] == rule], rule


def _default_rule(rows: pd.DataFrame) -> str:
    trials = rows.groupby("rule")["trial"].agg(set)
    if trials.get("selected") == trials.get("final"):
        return "selected"
    return "final"


def _by_seed(rows: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """Return the values of `rows`: a row per seed, a column per `order`."""
    keys = ["metric", "higher_is_better", "quantity"]
    columns = [*TRIAL, *keys]
    distinct = rows[[*columns, "value"]].drop_duplicates(columns)
    values = seed_values(distinct, tables.done, keys)
    return values.pivot_table(index="seed", columns="order", values="value")


def _rows_of_sites(tables: Tables, picked: pd.DataFrame, by: str) -> Iterator[tuple[Site, pd.DataFrame]]:
    """Yield each domain, or the number of each client, and its rows in the form of `picked`."""
    if by == "domain":
        of_domains = picked[picked["quantity"].str.startswith(DOMAIN)]
        for quantity, rows in of_domains.groupby("quantity"):
            yield str(quantity).removeprefix(DOMAIN), rows
        return
    means = picked[picked["quantity"] == "mean"]
    keys = [*TRIAL, "point", "split", "metric", "round"]
    places = means.drop(columns="value").drop_duplicates(keys)
    parts = []
    for scores in tables.scores:
        frame = scores.frame()
        frame = frame[~frame["unseen"] & (frame["client"] >= 0)]
        texts = frame.astype(dict.fromkeys([*TRIAL, "point", "split", "metric"], str))
        of_clients = texts[[*keys, "client", "value"]]
        parts.append(of_clients.merge(places, on=keys))
    for client, rows in pd.concat(parts).groupby("client"):
        yield int(client), rows.dropna(subset="value")


def _data(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that decide which client holds which examples, as text by order and seed."""
    columns = []
    for name in trials:
        if name.startswith(_PAIRED) and name not in _NOT_PAIRED:
            columns.append(name)
    values = trials[columns].astype(object)
    texts = values.where(values.notna(), None).map(str)
    return texts.groupby([trials["order"], trials["seed"]]).agg(_joined)


def _joined(texts: pd.Series) -> str:
    return ", ".join(sorted(set(texts)))


def _groups(rows: pd.DataFrame, shown: pd.DataFrame) -> pd.DataFrame:
    """Return a row per group of trials, with `chosen` at the point that is shown, which may differ between points."""
    everything = pd.concat([shown, rows.assign(chosen=False)])
    groups = everything[[*_GROUP, "chosen"]].drop_duplicates("order")
    return groups.sort_values("order", ignore_index=True)


def _with_values(groups: pd.DataFrame, scores: _Scores) -> dict[int, str]:
    """Return the names of the methods to compare by `order`: those that validation chose, or all if it chose none.

    Raises:
        UsageError: There are fewer than two.
    """
    groups = groups[groups["order"].isin(scores.means.columns)]
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


def _ranked(scores: _Scores, labels: Mapping[int, str], shown: pd.DataFrame) -> list[int]:
    """Return the methods with values, the best one last."""
    ascending = bool(shown["higher_is_better"].iloc[0])
    present = [order for order in labels if order in scores.means]
    means = scores.means[present].mean().sort_values(ascending=ascending, kind="stable")
    return [int(order) for order in means.index]


def _compared_pairs(
    scores: _Scores, pairs: Sequence[tuple[int, int]], labels: Mapping[int, str], *, strict: bool
) -> tuple[list[Comparison], list[str]]:
    """Return the comparison of each pair and site before the correction, and notes on what is left out or replaced.

    Raises:
        UsageError: No pair can be compared, or with `strict` the only one.
    """
    comparisons = []
    notes: list[str] = []
    for orders, site in itertools.product(pairs, scores.values):
        first, second = orders
        title = f"{labels[second]} − {labels[first]}"
        if site is not None:
            title = f"{site}: {title}"
        try:
            comparison, more = _compared(scores, orders, labels, site)
        except UsageError as error:
            if strict and site is None:
                raise
            reason = str(error).removeprefix("compare: ")
            notes.append(f"{title} is missing: {reason}.")
            continue
        comparisons.append(comparison)
        notes += [note for note in more if note not in notes]
        left_out = _seeds_of_one(scores.values[site], orders)
        if left_out:
            seeds = ", ".join(map(str, left_out))
            notes.append(f"{title}: only the seeds that both have count; left out: {seeds}.")
    if not comparisons:
        raise UsageError(f"compare: no two methods can be paired; {notes[0]}")
    return comparisons, notes


def _seeds_of_one(values: pd.DataFrame, orders: tuple[int, int]) -> list[int]:
    """Return the seeds at which only one of two methods has a value."""
    first, second = orders
    has_one = values[first].notna() != values[second].notna()
    return list(values.index[has_one])


def _compared(
    scores: _Scores, orders: tuple[int, int], labels: Mapping[int, str], site: Site
) -> tuple[Comparison, list[str]]:
    """Return the comparison of two methods at a site, with p-values before the correction, and notes on the test.

    Raises:
        UsageError: A method has no values, or the methods have fewer than two seeds in common, or trials with the same
            seed had different clients.
    """
    values = scores.values[site]
    for order in orders:
        if order not in values:
            lacks = f"{labels[order]} has no {scores.split} {scores.metric}"
            raise UsageError(f"compare: {lacks} under rule={scores.rule}; use final")
    first, second = orders
    both = values[[first, second]].dropna()
    if len(both) < 2:
        raise _too_few_seeds(values, orders, labels)
    for seed in both.index:
        _check_same_data(scores.data, orders, labels, int(seed))
    differences = both[second] - both[first]
    tested, notes = _tested(scores, orders, differences, site)
    comparison = Comparison(
        first=labels[first],
        second=labels[second],
        orders=orders,
        site=site,
        differences=differences,
        tested=tested,
        effect=cohens_dz(differences),
        p_value=tested.p_value,
        p_wilcoxon=wilcoxon(differences),
    )
    return comparison, notes


def _too_few_seeds(values: pd.DataFrame, orders: tuple[int, int], labels: Mapping[int, str]) -> UsageError:
    words = []
    for order in orders:
        seeds = ", ".join(map(str, values[order].dropna().index))
        words.append(f"{labels[order]} has seeds {seeds}")
    return UsageError(f"compare: {' and '.join(words)}; a paired comparison needs two seeds or more that both have")


def _check_same_data(data: pd.DataFrame, orders: tuple[int, int], labels: Mapping[int, str], seed: int) -> None:
    """Raise UsageError if the clients of two methods held different examples at `seed`."""
    first, second = (data.loc[(order, seed)] for order in orders)
    for column in first.index[first != second]:
        values = []
        for of, order in zip((first, second), orders, strict=True):
            values.append(f"{of[column]} for {labels[order]}")
        both = " and ".join(values)
        raise UsageError(f"compare: {column} is {both} at seed {seed}; pairs need the same clients and examples")


def _tested(scores: _Scores, orders: tuple[int, int], differences: pd.Series, site: Site) -> tuple[Tested, list[str]]:
    """Return the test that fits the splits of the seeds, and a note where another one had to do."""
    trials = scores.trials
    has_seed = trials["seed"].isin(differences.index)
    of_pair = trials["order"].isin(orders) & has_seed
    splits = splits_of(trials[of_pair])
    if splits.kind in (REDRAWN, REASSIGNED):
        if splits.test_ratio is not None:
            return corrected_resampled_t(differences, splits.test_ratio), []
        note = "The sizes of the parts were not recorded, so the test takes seeds to be independent."
        return paired_t(differences), [note]
    if splits.kind != KEPT:
        return paired_t(differences), []
    where = "of means over clients"
    if site is not None:
        where = f"at {site}"
    group = _group_of_rows(trials[of_pair])
    if group:
        why = f"rows of one {group} (data.group) depend on each other; with partition.redraw=true there is one"
        return over_seeds_and_rows(differences, math.nan), [f"There is no test {where}: {why}."]
    covariance, reason = _covariance(scores, orders, differences, site)
    if covariance is None:
        return paired_t(differences), [f"The test holds for these test examples alone: {reason}."]
    if math.isnan(covariance):
        why = f"one test example of a class decides {scores.metric}, and says nothing of others"
        return over_seeds_and_rows(differences, covariance), [f"There is no test {where}: {why}."]
    return over_seeds_and_rows(differences, covariance), []


def _group_of_rows(trials: pd.DataFrame) -> str:
    """Return the column that says which rows belong together, `data.group`; empty without one."""
    if "data.group" not in trials:
        return ""
    names = trials["data.group"].dropna()
    return next(iter(names), "")


def _covariance(
    scores: _Scores, orders: tuple[int, int], differences: pd.Series, site: Site
) -> tuple[float | None, str]:
    """Return the covariance of differences that other test examples would cause; or None, and why it is not known."""
    replicates = {}
    for seed, recorded in differences.items():
        of_methods = []
        for order in orders:
            found, reason = scores.replicates.of(order, int(seed))
            if found is None:
                return None, reason
            of_methods.append(of_site(found, site))
        difference = paired(*of_methods)
        if difference is None or not agrees(difference[0], recorded):
            return None, NOT_RECORDED
        replicates[seed] = difference[1]
    return bootstrap_covariance(pd.DataFrame(replicates).to_numpy()), ""


def _corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return `comparisons` with p-values after Holm's correction for their number."""
    p_values = holm([comparison.p_value for comparison in comparisons])
    p_wilcoxon = holm([comparison.p_wilcoxon for comparison in comparisons])
    corrected = []
    for place, comparison in enumerate(comparisons):
        corrected.append(comparison._replace(p_value=p_values[place], p_wilcoxon=p_wilcoxon[place]))
    return corrected


def find_group(name: str, rows: pd.DataFrame, where: str = "compare") -> int:
    """Return the `order` of the group of trials called `name`.

    Args:
        name: An algorithm, for its only hyperparameters or those that validation chose; or an algorithm and
            hyperparameters, as the table shows them.
        rows: Columns algorithm, hyperparameters, order, chosen.
        where: The beginning of the error message.

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
        raise UsageError(f"{where}: no trials of {name} are done; {known}")
    names = []
    for label in labels[of_algorithm.index]:
        names.append(f'"{label}"')
    raise UsageError(
        f"{where}: {name} ran with several hyperparameters and validation chose none; give one of {'; '.join(names)}"
    )
