"""From values of clients to one number a trial: means of each round, and the round that a rule picks.

Both functions give long frames with a column `quantity`, which is one of

- `mean`      over clients, each counting once
- `weighted`  over clients, each counting with its number of examples n
- `worst`     the client with the worst value: the least accuracy, the greatest loss
- `domain:X`  the mean over the clients of domain X

Values of clients are used where there are any; values of the server stand in where a trial has no others for the same
point, split and metric (a global model on a domain that no client has). Unseen clients, who took no part in training, are
never mixed with those who did. Values that are not numbers are left out.
"""

import pandas as pd

from rayfed.results.metric_names import badness
from rayfed.results.tables import SERVER

TRIAL = ["experiment", "trial"]
_MODEL = ["unseen", "point"]
CURVE = [*TRIAL, *_MODEL, "split", "metric"]
RULES = ("final", "selected", "oracle", "best5")
BEST = 5
CRITERIA = ("accuracy", "loss")  # of the validation data, the first that there is; no other metric picks a model
DOMAIN = "domain:"
CLIENT = "client:"


def by_round(metrics: pd.DataFrame) -> pd.DataFrame:
    """Columns `CURVE`, round, quantity, value: the `metrics` table with the clients of each round put together."""
    rows = metrics[metrics["value"].notna()]
    of_client = rows["client"] != SERVER
    any_client = of_client.groupby([rows[name] for name in CURVE]).transform("any")
    rows = rows[of_client == any_client]
    rows = rows.assign(
        product=rows["value"] * rows["n"],
        badness=badness(rows["value"], rows["metric"]),
    )
    rounds = rows.groupby([*CURVE, "round"], sort=False)
    sums = rounds.agg(mean=("value", "mean"), product=("product", "sum"), n=("n", "sum"), worst=("badness", "max"))
    sums = sums.reset_index()
    sums["weighted"] = (sums["product"] / sums["n"]).where(sums["n"] > 0)
    sums["worst"] = badness(sums["worst"], sums["metric"])  # back again
    wide = sums.drop(columns=["product", "n"])
    overall = wide.melt([*CURVE, "round"], ["mean", "weighted", "worst"], var_name="quantity", value_name="value")
    domains = rows[rows["domain"].notna() & (rows["domain"] != "")]
    per_domain = domains.groupby([*CURVE, "round", "domain"], sort=False)["value"].mean().reset_index()
    per_domain["quantity"] = DOMAIN + per_domain["domain"].astype(str)
    return pd.concat([overall, per_domain[overall.columns]], ignore_index=True)


def picked(curves: pd.DataFrame) -> pd.DataFrame:
    """The values of `curves` (from `by_round`) at the round that each rule picks; columns as there, and `rule`.

    - `final`: the last round that was evaluated.
    - `selected`: the round with the best mean over clients of the validation accuracy (loss, where there is none) at
      the same point; the earliest of equals. It is one round for all metrics and splits, so that a report tells of one
      model; what was not measured in that round has no such row, nor has a trial without validation.
    - `oracle`: the round with the best mean of the split itself. On test data that is nobody's honest result.
    - `best5`: the mean of the five best values of each quantity on the split itself, as FedDebias reports; of fewer
      rounds, of all. `round` is that of the best. It looks at test data as `oracle` does.
    """
    means = curves[curves["quantity"] == "mean"][[*CURVE, "round", "value"]]
    judged = of_criterion(means, [*TRIAL, *_MODEL])
    selected = _best_round(judged, [*TRIAL, *_MODEL])[[*TRIAL, *_MODEL, "round"]]
    picks = {
        "final": means.sort_values("round").drop_duplicates(CURVE, keep="last"),
        "selected": means.merge(selected, on=[*TRIAL, *_MODEL, "round"]),
        "oracle": _best_round(means, CURVE),
    }
    rounds = pd.concat([pick[[*CURVE, "round"]].assign(rule=rule) for rule, pick in picks.items()], ignore_index=True)
    return pd.concat([rounds.merge(curves, on=[*CURVE, "round"]), _best_five(curves)], ignore_index=True)


def of_criterion(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Those of `rows` (split, metric, ...) that choose among rounds or settings: validation values of the first of
    `CRITERIA` that there is in each group `by`."""
    judged = rows[(rows["split"] == "val") & rows["metric"].isin(CRITERIA)]
    place = judged["metric"].map(CRITERIA.index)
    return judged[place == place.groupby([judged[name] for name in by]).transform("min")]


def of_clients(metrics: pd.DataFrame) -> pd.DataFrame:
    """As `by_round`, with a quantity `client:I` for each client."""
    rows = metrics[metrics["value"].notna() & (metrics["client"] != SERVER)]
    return rows.assign(quantity=CLIENT + rows["client"].astype(str))[[*CURVE, "round", "quantity", "value"]]


def _best_five(curves: pd.DataFrame) -> pd.DataFrame:
    ordered = curves.assign(badness=badness(curves["value"], curves["metric"])).sort_values(["badness", "round"])
    series = [*CURVE, "quantity"]
    best = ordered.groupby(series, sort=False).head(BEST).groupby(series, sort=False)
    return best.agg(round=("round", "first"), value=("value", "mean")).reset_index().assign(rule="best5")


def _best_round(scored: pd.DataFrame, of: list[str]) -> pd.DataFrame:
    return (
        scored.assign(badness=badness(scored["value"], scored["metric"]))
        .sort_values(["badness", "round"])
        .drop_duplicates(of)
    )
