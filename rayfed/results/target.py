"""What it takes to reach a target: rounds and gigabytes, of each trial that is done."""

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.results.metric_names import is_share, lower_are_better
from rayfed.results.read import Tables
from rayfed.results.selection import TRIAL
from rayfed.results.text_table import plain_table

GIGABYTE = 1e9


def check_target(target: float, metric: str) -> None:
    """Raises UsageError for a percentage where accuracies are fractions of 1, and for what is no number."""
    if target != target or (is_share(metric) and not 0 <= target <= 1):
        raise UsageError(f"target={target:g}: {metric} is a fraction of 1; give a number from 0 to 1, such as 0.8")


def reached(means: pd.DataFrame, tables: Tables, target: float) -> pd.DataFrame:
    """`means`, a row a trial and evaluated round (experiment, trial, round, metric, value), made one row a trial.

    Columns experiment, trial, `round`, the first evaluated one whose value is at least `target` (at most, where less is
    better), and `gigabytes`, all that went down and up until then, the setup included, in 10⁹ bytes. Both are NaN where
    the target was never reached.
    """
    low = lower_are_better(means["metric"])
    enough = means[(means["value"] <= target).where(low, means["value"] >= target)]
    first = enough.groupby(TRIAL)["round"].min().reset_index()
    found = means[TRIAL].drop_duplicates().merge(first, on=TRIAL, how="left")
    sent = tables.rounds[[*TRIAL, "round", "bytes_down", "bytes_up"]].merge(first, on=TRIAL, suffixes=("", "_reached"))
    sent = sent[sent["round"] <= sent["round_reached"]]
    total = (sent["bytes_down"] + sent["bytes_up"]).groupby([sent[name] for name in TRIAL]).sum() / GIGABYTE
    return found.merge(total.rename("gigabytes").reset_index(), on=TRIAL, how="left")


def target_table(found: pd.DataFrame, trials: pd.DataFrame, *, width: int) -> str:
    """A line a setting: mean ± sd over its trials of what `reached` gives, and how many reached the target."""
    rows = found.merge(trials[[*TRIAL, "order", "algorithm", "setting"]], on=TRIAL).sort_values("order")
    columns: dict[str, list[str]] = {"algorithm": [], "setting": [], "rounds": [], "GB": [], "reached": []}
    for _, group in rows.groupby("order"):
        columns["algorithm"].append(group["algorithm"].iloc[0])
        columns["setting"].append(group["setting"].iloc[0])
        columns["rounds"].append(_mean(group["round"], 1))
        columns["GB"].append(_mean(group["gigabytes"], 3))
        columns["reached"].append(f"{group['round'].notna().sum()} of {len(group)}")
    if not any(columns["setting"]):
        del columns["setting"]
    return plain_table(columns, left=("algorithm", "setting"), width=width)


def _mean(values: pd.Series, decimals: int) -> str:
    values = values.dropna()
    if values.empty:
        return "never"
    spread = f"{values.std():.{decimals}f}" if len(values) > 1 else "-"
    return f"{values.mean():.{decimals}f} ± {spread}"
