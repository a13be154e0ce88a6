"""From values of clients to one number a trial: means of each round, and the round that a rule picks.

Both functions give long frames with a column `quantity`, which is one of

- `mean`      over clients, each counting once
- `weighted`  over clients, each counting with its number of examples n
- `worst`     the client with the worst value: the least accuracy, the greatest loss
- `domain:X`  the mean over the clients of domain X

Values of clients are used where there are any; values of the server stand in where a trial has no others for the same
point, split and metric (a global model on a domain that no client has). Values that are not numbers are left out.
"""

import pandas as pd

from rayfed.results.tables import SERVER

TRIAL = ["experiment", "trial"]
CURVE = [*TRIAL, "point", "split", "metric"]
RULES = ("final", "selected", "oracle")
DOMAIN = "domain:"

_LOWER_IS_BETTER = {"loss", "error", "nll", "mse", "mae", "rmse", "ece", "brier", "perplexity", "mdl", "fid", "entropy"}


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of `metric` is the better one, by the words of its name (`test_loss`, `mdl`, ...)."""
    return not _LOWER_IS_BETTER.isdisjoint(metric.lower().replace("-", "_").split("_"))


def by_round(metrics: pd.DataFrame) -> pd.DataFrame:
    """Columns `CURVE`, round, quantity, value: the `metrics` table with the clients of each round put together."""
    rows = metrics[metrics["value"].notna()]
    of_client = rows["client"] != SERVER
    any_client = of_client.groupby([rows[name] for name in CURVE]).transform("any")
    rows = rows[of_client == any_client]
    rows = rows.assign(
        product=rows["value"] * rows["n"],
        badness=rows["value"].where(rows["metric"].map(lower_is_better).astype(bool), -rows["value"]),
    )
    rounds = rows.groupby([*CURVE, "round"], sort=False)
    sums = rounds.agg(mean=("value", "mean"), product=("product", "sum"), n=("n", "sum"), worst=("badness", "max"))
    sums = sums.reset_index()
    sums["weighted"] = (sums["product"] / sums["n"]).where(sums["n"] > 0)
    sums["worst"] = sums["worst"].where(sums["metric"].map(lower_is_better).astype(bool), -sums["worst"])
    wide = sums.drop(columns=["product", "n"])
    overall = wide.melt([*CURVE, "round"], ["mean", "weighted", "worst"], var_name="quantity", value_name="value")
    domains = rows[rows["domain"].notna() & (rows["domain"] != "")]
    per_domain = domains.groupby([*CURVE, "round", "domain"], sort=False)["value"].mean().reset_index()
    per_domain["quantity"] = DOMAIN + per_domain["domain"].astype(str)
    return pd.concat([overall, per_domain[overall.columns]], ignore_index=True)


def picked(curves: pd.DataFrame) -> pd.DataFrame:
    """The values of `curves` (from `by_round`) at the round that each rule picks; columns as there, and `rule`.

    - `final`: the last round that was evaluated.
    - `selected`: of the rounds where both were evaluated, the one with the best mean over clients of the validation
      split, of the same point and metric; the earliest of equals. A trial without validation has no such row.
    - `oracle`: the round with the best mean of the split itself. On test data that is nobody's honest result.
    """
    means = curves[curves["quantity"] == "mean"][[*CURVE, "round", "value"]]
    validation = means[means["split"] == "val"].drop(columns="split")
    validated = means.drop(columns="value").merge(validation, on=[*TRIAL, "point", "metric", "round"])
    picks = {
        "final": means.sort_values("round").drop_duplicates(CURVE, keep="last"),
        "selected": _best_round(validated),
        "oracle": _best_round(means),
    }
    rounds = pd.concat([pick[[*CURVE, "round"]].assign(rule=rule) for rule, pick in picks.items()], ignore_index=True)
    return rounds.merge(curves, on=[*CURVE, "round"])


def _best_round(scored: pd.DataFrame) -> pd.DataFrame:
    badness = scored["value"].where(scored["metric"].map(lower_is_better).astype(bool), -scored["value"])
    return scored.assign(badness=badness).sort_values(["badness", "round"]).drop_duplicates(CURVE)
