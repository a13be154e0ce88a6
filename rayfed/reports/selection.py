"""From values of clients to one number per trial: aggregates over clients, and the round that a rule picks.

Frames are long, with a column `quantity`, which is one of

- `mean`      the mean over clients, each counting once
- `weighted`  the mean over clients, each counting with its number of examples n
- `worst`     the client with the worst value: the lowest accuracy, the highest loss
- `best10`, `worst10`  the mean over the tenth of the clients (rounded up) with the best or the worst values; only with
              more than `FEW_CLIENTS`
- `domain:X`  the mean over the clients of domain X

Where a trial has values of clients for a point, split and metric, those of the server are ignored; otherwise they stand
in (a global model on a domain that no client has). Unseen clients, which took no part in training, are never mixed with
those that did. NaN values are left out.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from rayfed.core.records import SERVER

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
    - `selected`: the round with the best mean over clients of the validation values of the metric that `criteria` names
      for the experiment, at the same point; the earliest one on a tie. It is one round for all metrics and splits, so
      that a report describes one model. A metric that was not measured in that round has no such row, nor has a trial
      without validation.
    - `oracle`: the round with the best mean on the split itself. On test data this is not an honest result.
    - `best5`: the mean of the five best values of each quantity on the split itself, as FedDebias reports; of all
      rounds if there are fewer. `round` is that of the best. Like `oracle`, it looks at test data.
    """
    means = curves[curves["quantity"] == "mean"][[*CURVE, "round", "value"]]
    selected = _best_round(criterion_rows(means, criteria), [*TRIAL, *_MODEL])[[*TRIAL, *_MODEL, "round"]]
    picks = {
        "final": means.sort_values("round").drop_duplicates(CURVE, keep="last"),
        "selected": means.merge(selected, on=[*TRIAL, *_MODEL, "round"]),
        "oracle": _best_round(means, CURVE),
    }
    rounds = pd.concat([pick[[*CURVE, "round"]].assign(rule=rule) for rule, pick in picks.items()], ignore_index=True)
    return pd.concat([rounds.merge(curves, on=[*CURVE, "round"]), _best_five(curves)], ignore_index=True)


def scores_of(metrics: pd.DataFrame, metric: str, split: str, criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows of `metrics` that `pick_rounds` needs for one metric on one split: also the criterion's."""
    wanted = (metrics["metric"] == metric) & (metrics["split"] == split)
    return metrics[wanted | metrics.index.isin(criterion_rows(metrics, criteria).index)]


def criterion_rows(rows: pd.DataFrame, criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return those of `rows` that select a round or hyperparameters: validation values of the experiment's metric."""
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
    """Return the comparable cost of `values`, by which means are ranked so that ties are ties."""
    return comparable(as_cost(values, higher_is_better))


def comparable(values: pd.Series) -> pd.Series:
    """Return `values` to twelve significant digits, so that rounding errors of means do not tell equal ones apart."""
    sizes = values.abs().where(np.isfinite(values) & (values != 0), 1.0)
    scale = 10.0 ** (11 - np.floor(np.log10(sizes))).clip(-300, 300)
    return (values * scale).round() / scale
