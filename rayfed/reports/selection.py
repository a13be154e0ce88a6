"""From values of clients to one number per trial: means over clients, and the round that a rule picks.

The column `quantity` of a frame says how clients are aggregated:

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

import numpy as np
import pandas as pd

from rayfed.core.round_record import SERVER

TRIAL = ["experiment", "trial"]
_MODEL = ["unseen", "point"]
CURVE = [*TRIAL, *_MODEL, "split", "metric", "higher_is_better"]
RULES = ("final", "selected", "oracle", "best5")
BEST = 5
FEW_CLIENTS = 20
"""The most clients without columns for the best and the worst tenth, and the most domains with a column each."""
DOMAIN = "domain:"


def aggregate_clients(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the table `metrics` with the clients of each round aggregated: columns `CURVE`, round, quantity, value."""
    rows = _counted_rows(metrics)
    keys = [*CURVE, "round"]
    number = rows.groupby(keys, sort=False, observed=True).ngroup()  # grouping by one integer is many times faster
    of_group = rows.loc[~number.duplicated(), keys].reset_index(drop=True)
    values = rows[["value", "n", "domain"]].assign(group=number)
    values["product"] = values["value"] * values["n"]
    values["cost"] = as_cost(rows["value"], rows["higher_is_better"])

    parts = []
    for quantity, value in _quantities(values, of_group["higher_is_better"]).items():
        part = of_group.join(value.rename("value"), how="inner")
        parts.append(part.assign(quantity=quantity))
    parts.append(_means_of_domains(values, of_group))
    joined = pd.concat(parts, ignore_index=True)
    return joined[[*keys, "quantity", "value"]]


def _counted_rows(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that count: the clients' values other than NaN, or the server's where clients have none."""
    rows = metrics[metrics["value"].notna()]
    series = rows.groupby(CURVE, sort=False, observed=True).ngroup()
    is_client = rows["client"] != SERVER
    has_clients = is_client.groupby(series).transform("any")
    return rows[is_client == has_clients]


def _quantities(values: pd.DataFrame, higher_is_better: pd.Series) -> dict[str, pd.Series]:
    """Return the values of each quantity but those of domains, by group.

    `values` has the columns group, value, n, product (value x n) and cost.
    """
    sums = values.groupby("group").agg(
        mean=("value", "mean"),
        product=("product", "sum"),
        n=("n", "sum"),
        worst=("cost", "max"),
    )
    weighted = sums["product"] / sums["n"]
    worst = as_cost(sums["worst"], higher_is_better)  # back to values
    weighted = weighted.where(sums["n"] > 0)
    of_all = {"mean": sums["mean"], "weighted": weighted, "worst": worst}
    return of_all | _tenths(values)


def _tenths(values: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the means over the best and the worst tenth of the clients by group, where there are many."""
    sizes = values.groupby("group")["value"].transform("size")
    values = values[sizes > FEW_CLIENTS]
    costs = values.groupby("group")["cost"]
    tenth = np.ceil(costs.transform("size") / 10)
    means = {}
    for quantity, best_first in (("best10", True), ("worst10", False)):
        rank = costs.rank(method="first", ascending=best_first)
        groups = values[rank <= tenth].groupby("group")
        means[quantity] = groups["value"].mean()
    return means


def _means_of_domains(values: pd.DataFrame, of_group: pd.DataFrame) -> pd.DataFrame:
    named = values["domain"].notna() & (values["domain"] != "")
    groups = values[named].groupby(["group", "domain"], sort=False, observed=True)
    means = groups["value"].mean().reset_index("domain")
    part = of_group.join(means, how="inner")
    part["quantity"] = DOMAIN + part.pop("domain").astype(str)
    return part


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
    is_mean = curves["quantity"] == "mean"
    means = curves.loc[is_mean, [*CURVE, "round", "value"]]
    selected = selected_rounds(means, criteria)
    last = means.sort_values("round").drop_duplicates(CURVE, keep="last")
    picks = {
        "final": last,
        "selected": means.merge(selected, on=[*TRIAL, *_MODEL, "round"]),
        "oracle": _best_round(means, CURVE),
    }
    picked = []
    for rule, pick in picks.items():
        picked.append(pick[[*CURVE, "round"]].assign(rule=rule))
    rounds = pd.concat(picked, ignore_index=True)
    values = rounds.merge(curves, on=[*CURVE, "round"])
    return pd.concat([values, _best_five(curves)], ignore_index=True)


def selected_rounds(means: pd.DataFrame, criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return the round that `selected` picks for each trial and model: columns `TRIAL`, unseen, point and round."""
    model = [*TRIAL, *_MODEL]
    best = _best_round(criterion_rows(means, criteria), model)
    return best[[*model, "round"]]


def scores_of(metrics: pd.DataFrame, metric: str, split: str, criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows of `metrics` that `pick_rounds` needs for one metric on one split: also the criterion's."""
    wanted = (metrics["metric"] == metric) & (metrics["split"] == split)
    choosing = metrics.index.isin(criterion_rows(metrics, criteria).index)
    return metrics[wanted | choosing]


def criterion_rows(rows: pd.DataFrame, criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return the `rows` that choose a round or hyperparameters: validation values of the experiment's criterion."""
    is_criterion = rows["metric"] == rows["experiment"].map(criteria)
    return rows[is_criterion & (rows["split"] == "val")]


def _best_five(curves: pd.DataFrame) -> pd.DataFrame:
    series = [*CURVE, "quantity"]
    cost = ranking_cost(curves["value"], curves["higher_is_better"])
    ordered = curves.assign(cost=cost).sort_values(["cost", "round"])
    best = ordered.groupby(series, sort=False).head(BEST)
    groups = best.groupby(series, sort=False)
    means = groups.agg(round=("round", "first"), value=("value", "mean"))
    return means.reset_index().assign(rule="best5")


def _best_round(scores: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    cost = ranking_cost(scores["value"], scores["higher_is_better"])
    ordered = scores.assign(cost=cost).sort_values(["cost", "round"])
    return ordered.drop_duplicates(by)


def as_cost(values: pd.Series, higher_is_better: pd.Series) -> pd.Series:
    """Return `values`, negated where higher is better, so that the lowest is the best."""
    return (-values).where(higher_is_better, values)


def ranking_cost(values: pd.Series, higher_is_better: pd.Series) -> pd.Series:
    """Return the cost of `values`, rounded so that equal means tie."""
    return comparable(as_cost(values, higher_is_better))


def comparable(values: pd.Series) -> pd.Series:
    """Return `values` to twelve significant digits, so that rounding does not distinguish equal means."""
    is_number = np.isfinite(values) & (values != 0)
    digits = np.floor(np.log10(values.abs().where(is_number, 1.0)))
    scale = 10.0 ** (11 - digits).clip(-300, 300)
    return (values * scale).round() / scale
