"""From values of clients to one number per trial, groups of trials, and the trials that count.

The values of a round are aggregated over clients, and a rule picks the round. The column `quantity` of a frame says how
clients are aggregated:

- `mean`      the mean over clients, each counting once
- `weighted`  the mean over clients, each counting with its number of examples n
- `worst`     the client with the worst value: the lowest accuracy, the highest loss
- `best10`, `worst10`  the mean over the best or worst tenth of the clients (rounded up), if there are more than
              `FEW_CLIENTS`
- `domain:X`  the mean over the clients of domain X

Values of the server count only where clients have none of the same trial, point, split and metric, as for a global
model on a domain that no client has. Unseen clients are never mixed with participants. NaN values are left out.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from rayfed.core.records import SERVER
from rayfed.records.trials import FIXED, STATUSES

TRIAL = ["experiment", "trial"]
_MODEL = ["unseen", "point"]
CURVE = [*TRIAL, *_MODEL, "split", "metric", "higher_is_better"]
RULES = ("final", "selected", "oracle", "best5")
BEST = 5
FEW_CLIENTS = 20
"""The most clients without columns for the best and the worst tenth, and the most domains with a column each."""
DOMAIN = "domain:"
LOCATION_KEYS = ("data.root", "data.download")
"""Keys that say where a dataset's files are and how they got there, which are no hyperparameters. `data.file` and
`data.folder` are not among them, because they say which data a user's own are."""
LEFT_OUT = "leave_out"
_NOT_HYPERPARAMETERS = (
    *("experiment", "name", "results", "resume", "algorithm.name"),
    *("metrics", "evaluate.every", "evaluate.initial", "evaluate.points", "evaluate.splits"),
    *LOCATION_KEYS,
)
_NOT_HYPERPARAMETER_PREFIXES = ("placement.", "checkpoint.", "faults.", "state.", "tracking.", "metrics.")
_MOST_REASONS = 5  # early stops that a report gives one by one


def aggregate_clients(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the table `metrics` with the clients of each round aggregated: columns `CURVE`, round, quantity, value."""
    rows = metrics[metrics["value"].notna()]
    series = rows.groupby(CURVE, sort=False, observed=True).ngroup()
    is_client = rows["client"] != SERVER
    rows = rows[is_client == is_client.groupby(series).transform("any")]
    keys = [*CURVE, "round"]
    number = rows.groupby(keys, sort=False, observed=True).ngroup()  # grouping by one integer is many times faster
    of_group = rows.loc[~number.duplicated(), keys].reset_index(drop=True)
    rows = rows[["value", "n", "domain"]].assign(
        group=number, product=rows["value"] * rows["n"], cost=as_cost(rows["value"], rows["higher_is_better"])
    )
    sums = rows.groupby("group").agg(
        mean=("value", "mean"), product=("product", "sum"), n=("n", "sum"), worst=("cost", "max")
    )
    weighted = (sums["product"] / sums["n"]).where(sums["n"] > 0)
    worst = as_cost(sums["worst"], of_group["higher_is_better"])  # back to values
    values = {"mean": sums["mean"], "weighted": weighted, "worst": worst, **_tenths(rows)}
    parts = [of_group.join(value.rename("value"), how="inner").assign(quantity=name) for name, value in values.items()]
    domains = rows[rows["domain"].notna() & (rows["domain"] != "")]
    per_domain = domains.groupby(["group", "domain"], sort=False, observed=True)["value"].mean().reset_index("domain")
    parts.append(of_group.join(per_domain, how="inner"))
    parts[-1]["quantity"] = DOMAIN + parts[-1].pop("domain").astype(str)
    return pd.concat(parts, ignore_index=True)[[*keys, "quantity", "value"]]


def _tenths(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the means over the best and the worst tenth of the clients by group, where there are many."""
    rows = rows[rows.groupby("group")["value"].transform("size") > FEW_CLIENTS]
    costs = rows.groupby("group")["cost"]
    tenth = np.ceil(costs.transform("size") / 10)
    return {
        name: rows[costs.rank(method="first", ascending=best) <= tenth].groupby("group")["value"].mean()
        for name, best in (("best10", True), ("worst10", False))
    }


def pick_rounds(curves: pd.DataFrame, criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return the values of `curves` (from `aggregate_clients`) at the round that each rule picks, with a column `rule`.

    - `final`: the last round that was evaluated.
    - `selected`: the round with the best validation value, and the earliest one on a tie: the mean over clients, at the
      same point, of the metric that `criteria` names for the experiment. It is one round for all metrics and splits, so
      that a report describes one model. There is no row if the metric was not measured in that round, or if the trial
      has no validation data.
    - `oracle`: the round with the best mean on the split itself. On test data this is not an honest result.
    - `best5`: the mean of the five best values of each quantity on the split itself, or of all if there are fewer, as
      FedDebias reports. `round` is that of the best value. Like `oracle`, it looks at test data.
    """
    means = curves[curves["quantity"] == "mean"][[*CURVE, "round", "value"]]
    selected = selected_rounds(means, criteria)
    picks = {
        "final": means.sort_values("round").drop_duplicates(CURVE, keep="last"),
        "selected": means.merge(selected, on=[*TRIAL, *_MODEL, "round"]),
        "oracle": _best_round(means, CURVE),
    }
    rounds = pd.concat([pick[[*CURVE, "round"]].assign(rule=rule) for rule, pick in picks.items()], ignore_index=True)
    return pd.concat([rounds.merge(curves, on=[*CURVE, "round"]), _best_five(curves)], ignore_index=True)


def selected_rounds(means: pd.DataFrame, criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return the round that `selected` picks for each trial and model: columns `TRIAL`, unseen, point and round."""
    return _best_round(criterion_rows(means, criteria), [*TRIAL, *_MODEL])[[*TRIAL, *_MODEL, "round"]]


def scores_of(metrics: pd.DataFrame, metric: str, split: str, criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows of `metrics` that `pick_rounds` needs for one metric on one split: also the criterion's."""
    wanted = (metrics["metric"] == metric) & (metrics["split"] == split)
    return metrics[wanted | metrics.index.isin(criterion_rows(metrics, criteria).index)]


def criterion_rows(rows: pd.DataFrame, criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return the `rows` that choose a round or hyperparameters: validation values of the experiment's criterion."""
    return rows[(rows["split"] == "val") & (rows["metric"] == rows["experiment"].map(criteria))]


def _best_five(curves: pd.DataFrame) -> pd.DataFrame:
    ordered = curves.assign(cost=ranking_cost(curves["value"], curves["higher_is_better"])).sort_values(
        ["cost", "round"]
    )
    series = [*CURVE, "quantity"]
    best = ordered.groupby(series, sort=False).head(BEST).groupby(series, sort=False)
    return best.agg(round=("round", "first"), value=("value", "mean")).reset_index().assign(rule="best5")


def _best_round(scores: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    return (
        scores.assign(cost=ranking_cost(scores["value"], scores["higher_is_better"]))
        .sort_values(["cost", "round"])
        .drop_duplicates(by)
    )


def as_cost(values: pd.Series, higher_is_better: pd.Series) -> pd.Series:
    """Return `values`, negated where higher is better, so that the lowest is the best."""
    return (-values).where(higher_is_better, values)


def ranking_cost(values: pd.Series, higher_is_better: pd.Series) -> pd.Series:
    """Return the cost of `values`, rounded so that equal means tie."""
    return comparable(as_cost(values, higher_is_better))


def comparable(values: pd.Series) -> pd.Series:
    """Return `values` to twelve significant digits, so that rounding does not distinguish equal means."""
    sizes = values.abs().where(np.isfinite(values) & (values != 0), 1.0)
    scale = 10.0 ** (11 - np.floor(np.log10(sizes))).clip(-300, 300)
    return (values * scale).round() / scale


def group_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trial: experiment, trial, algorithm, seed, status, started, leave_out, hyperparameters, order.

    `hyperparameters` is a string that names what varies: the values of `algorithm.*` that differ between trials of that
    algorithm, without the prefix, and every other configuration value that differs within the experiment. The seed,
    placement, checkpoints, folders, and what is measured and how often do not count. Neither does the domain in
    `leave_out` ("" if none is left out): trials that leave out one domain each form one group.

    `order` is an integer that identifies the group; it sorts by algorithm, then by the values as numbers. Further
    columns have the values that vary, under their dotted names.
    """
    base = trials[["experiment", "trial", "algorithm", "seed", "status", "started"]].reset_index(drop=True)
    fixed = (*FIXED, *_NOT_HYPERPARAMETERS)
    names = [name for name in trials if name not in fixed and not name.startswith(_NOT_HYPERPARAMETER_PREFIXES)]
    values = trials[names].reset_index(drop=True).astype(object)
    values = values.where(values.notna(), None)
    base[LEFT_OUT] = list(trials[LEFT_OUT].astype(object).fillna("").astype(str)) if LEFT_OUT in trials else ""
    if LEFT_OUT in trials:
        left_out = ["each in turn" if domain else None for domain in base[LEFT_OUT]]
        values[LEFT_OUT] = pd.Series(left_out, dtype=object)  # with `map`, pandas would turn None into NaN
    of_algorithm = [name for name in names if name.startswith("algorithm.")]
    others = [name for name in names if name not in of_algorithm]
    shown: list[list[str]] = [[] for _ in range(len(base))]  # by trial, the names of the values that vary
    for columns, keys in ((of_algorithm, ["experiment", "algorithm"]), (others, ["experiment"])):
        for _, group in base.groupby(keys):
            varying = [name for name in columns if values.loc[group.index, name].map(repr).nunique() > 1]
            for index in group.index:
                shown[index].extend(varying)
    labels = [
        ", ".join(f"{name.removeprefix('algorithm.')}={format_value(values.at[index, name])}" for name in names)
        for index, names in enumerate(shown)
    ]
    sort_keys = [
        (str(base.at[index, "algorithm"]), tuple(_sort_key(values.at[index, name]) for name in shown[index]), label)
        for index, label in enumerate(labels)
    ]
    rank = {key: order for order, key in enumerate(sorted(set(sort_keys)))}
    order = pd.Series([rank[key] for key in sort_keys], dtype="int64")
    varying = sorted({name for columns in shown for name in columns}, key=names.index)
    shown_values = values[[name for name in varying if name != LEFT_OUT]]
    return base.assign(hyperparameters=pd.Series(labels, dtype=str), order=order).join(shown_values)


def format_value(value: Any) -> str:
    """Return a configuration value as a short string: 0.1, 3, true, none."""
    if value is None or value != value:  # pandas reads null as NaN
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sort_key(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    try:
        return (0, float(value), format_value(value))  # a number in a column of strings
    except (TypeError, ValueError):
        return (1, 0.0, format_value(value))


def countable_trials(
    trials: pd.DataFrame, groups: pd.DataFrame, criteria: Mapping[str, str]
) -> tuple[pd.DataFrame, list[str]]:
    """Return the trials that count, in the columns of `group_trials`, and a note on each kind of trial that does not.

    For each group, seed and left-out domain, the last trial that is done counts. The arguments are the attributes of
    `Tables`.
    """
    notes = []
    unfinished = {status: int((groups["status"] == status).sum()) for status in STATUSES if status != "done"}
    if any(unfinished.values()):
        words = ", ".join(f"{count} {status}" for status, count in unfinished.items() if count)
        notes.append(f"{sum(unfinished.values())} of {len(groups)} trials are not done and do not count: {words}.")
    stopped = trials[trials["stop_reason"].notna()]
    notes += [
        f"{row['trial']} stopped early, after round {int(row['rounds_done'])} of {int(row['rounds'])}: "
        f"{row['stop_reason']}."
        for row in stopped.head(_MOST_REASONS).to_dict("records")
    ]
    if (more := len(stopped) - _MOST_REASONS) > 0:
        notes.append(f"{more} more trials stopped early; trials.stop_reason says why.")
    done = groups[groups["status"] == "done"].sort_values(["started", "trial"])
    once = done.drop_duplicates(["experiment", "order", "seed", LEFT_OUT], keep="last")
    if repeated := len(done) - len(once):
        words = "1 trial does" if repeated == 1 else f"{repeated} trials do"
        notes.append(f"{words} not count, because a later one has the same hyperparameters and seed.")
    for experiment, metrics in _different(trials, "selection_metric"):
        notes.append(
            f"{experiment}: trials differ in select.metric ({', '.join(metrics)}); rounds and hyperparameters are "
            f"chosen by {criteria[experiment]}; --select METRIC chooses by another."
        )
    notes += _code_notes(once, trials)
    for experiment, intervals in _different(trials.merge(once[TRIAL], on=TRIAL), "evaluate.every"):
        notes.append(
            f"{experiment}: trials differ in evaluate.every ({' and '.join(f'{every:g}' for every in intervals)}). "
            "Trials that are scored more often have more rounds to pick from, so selected, oracle, best5 and --target "
            "do not compare them fairly; final does."
        )
    for experiment, leave_one_out in once[once[LEFT_OUT] != ""].groupby("experiment"):
        pairs = leave_one_out["seed"].nunique() * leave_one_out[LEFT_OUT].nunique()
        for (algorithm, hyperparameters), group in leave_one_out.groupby(["algorithm", "hyperparameters"]):
            if len(group) < pairs:
                name = " ".join(filter(None, [experiment, algorithm, hyperparameters]))
                notes.append(f"{name}: means are over {len(group)} of {pairs} pairs of seed and left-out domain.")
    return once, notes


def _different(trials: pd.DataFrame, column: str) -> list[tuple[str, list[Any]]]:
    """Return each experiment whose trials differ in a column, with the sorted values."""
    if column not in trials:
        return []
    values = trials.dropna(subset=column).groupby("experiment")[column].unique().map(sorted)
    return [(str(experiment), several) for experiment, several in values.items() if len(several) > 1]


def _code_notes(done: pd.DataFrame, trials: pd.DataFrame) -> list[str]:
    """Return a note on each group whose trials ran with different code of the user."""
    notes = []
    hashed = done.merge(trials[[*TRIAL, "code_hash"]], on=TRIAL).dropna(subset=["code_hash"])
    for (experiment, _), group in hashed.groupby(["experiment", "order"]):
        if group["code_hash"].nunique() > 1:
            first = group.iloc[0]
            name = " ".join(filter(None, [experiment, first["algorithm"], first["hyperparameters"]]))
            seeds = [
                f"{digest} at seed{'s' * (of_code['seed'].nunique() > 1)} "
                f"{', '.join(map(str, sorted(of_code['seed'].unique())))}"
                for digest, of_code in group.groupby("code_hash")
            ]
            notes.append(f"{name}: your own code has changed between seeds (code_hash {'; '.join(seeds)}).")
    return notes
