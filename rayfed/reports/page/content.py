"""The content of the page: everything that it shows of each experiment, as values for JSON."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

import rayfed
from rayfed.core.errors import UsageError
from rayfed.core.options import key_path
from rayfed.records.metric_names import is_fraction
from rayfed.records.storage import open_storage
from rayfed.records.trials import FIXED, recorded_configuration
from rayfed.reports.captions import RULE_CAPTIONS, mean_caption
from rayfed.reports.common_rounds import DIFFERENT_CLIENTS, missing_values_notes, scored_on_different_clients
from rayfed.reports.page import charts
from rayfed.reports.page.charts import short_number
from rayfed.reports.pairs import all_pairs, paired_scores
from rayfed.reports.queries import pairs_columns, pairs_notes
from rayfed.reports.read import Tables, list_experiments, of_experiment, read
from rayfed.reports.selection import DOMAIN, FEW_CLIENTS, TRIAL
from rayfed.reports.summary import (
    Summary,
    countable_trials,
    out_of_domain_points,
    points_to_show,
    summarise,
)
from rayfed.reports.target import gigabytes_sent

_VERSIONS = tuple(name for name in FIXED if name.startswith("version_"))


def page_content(folder: str | Path, experiment: str | None = None, select: str | None = None) -> dict[str, Any]:
    """Return what the page shows of `experiment`, or of every experiment in `folder`; `select` is as in `read`.

    Raises:
        UsageError: there are no results.
    """
    names = list_experiments(folder) if experiment is None else [experiment]
    tables = read(folder, experiment, select=select)
    return {
        "folder": str(folder),
        "version": rayfed.__version__,
        "rules": RULE_CAPTIONS,
        "experiments": [_experiment(folder, of_experiment(tables, name), name) for name in names],
    }


def configuration(trial: pd.Series) -> dict[str, Any]:
    """Return the configuration of a row of the table `trials` as a nested mapping, which `rayfed run` reads.

    The folder of the results and the name of the experiment are left out, and so are values that are null.
    """
    tree: dict[str, Any] = {}
    for key, value in recorded_configuration(trial.to_dict()).items():
        *parents, last = key_path(key)
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return {key: value for key, value in tree.items() if value != {}}


def configurations(tables: Tables) -> Iterator[dict[str, Any]]:
    """Yield for each method its configuration as YAML, with the seeds that were run."""
    done = countable_trials(tables)[0]
    for order, group in done.groupby("order"):
        group = group.sort_values("seed")
        rows = tables.trials[tables.trials["trial"] == group["trial"].iloc[0]]
        trial = rows.iloc[0]
        seeds = ", ".join(map(str, sorted(set(group["seed"]))))
        code = _text(trial.get("code_hash"))
        own = f" It names code of your own, which must be the same (code_hash {code})." if code else ""
        head = f"# rayfed run FILE.yaml seed=N; seeds of this table: {seeds}.{own}\n"
        text = yaml.safe_dump(configuration(trial), sort_keys=False, default_flow_style=None, allow_unicode=True)
        yield {"order": int(order), "yaml": head + text}


def _experiment(folder: str | Path, tables: Tables, name: str) -> dict[str, Any]:
    summary = summarise(tables)
    home = open_storage(folder).child(name)
    return {
        "name": name,
        "criterion": tables.criteria[name],
        "methods": list(_methods(tables, summary)),
        "metrics": {
            metric: {"percent": is_fraction(metric), "higher": bool(rows["higher_is_better"].iloc[0])}
            for metric, rows in summary.rows.groupby("metric")
        },
        "rows": _values(_shown(summary.rows), ["order", "unseen", "point", "split", "metric", "rule", "quantity"]),
        "curves": _values(
            summary.curves[
                (summary.curves["quantity"] == "mean") & ~summary.curves["unseen"] & np.isfinite(summary.curves["mean"])
            ],
            ["order", "point", "split", "metric", "round"],
        ),
        "axes": _axes(tables),
        "repetitions": _repetitions(tables),
        "notes": [*summary.notes, *missing_values_notes(tables.metrics, summary.rows[~summary.rows["unseen"]])],
        "different": {"note": DIFFERENT_CLIENTS, "scores": scored_on_different_clients(tables.metrics)},
        "pairs": list(_pairs(tables, summary)),
        "sensitivity": charts.hyperparameter_values(summary.rows),
        "clients": charts.client_values(tables),
        "seconds": charts.time_parts(tables),
        "partitions": charts.partitions(home, tables),
        "maps": charts.maps(home, tables),
        "trials": list(_trials(tables)),
        "versions": _versions(tables.trials),
        "configurations": list(configurations(tables)),
    }


def _methods(tables: Tables, summary: Summary) -> Iterator[dict[str, Any]]:
    points, of_ood = points_to_show(tables), out_of_domain_points(summary.rows)
    for order, rows in summary.rows.groupby("order"):
        first = rows.iloc[0]
        yield {
            "order": int(order),
            "algorithm": first["algorithm"],
            "hyperparameters": first["hyperparameters"],
            "point": points.get((first["experiment"], int(order)), "global"),
            "point_ood": of_ood.get((first["experiment"], int(order)), "global"),
            "chosen": sorted(set(rows.loc[rows["chosen"], "point"])),
            "chosen_by_default": bool(first["chosen_by_default"]),
        }


def _shown(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `rows` without those of domains that are too many for columns of tables."""
    domains = rows[rows["quantity"].str.startswith(DOMAIN)]
    count = domains.groupby(["unseen", "point", "split", "metric"])["quantity"].transform("nunique")
    return rows.drop(index=domains.index[count > FEW_CLIENTS])


def _values(rows: pd.DataFrame, keys: list[str]) -> list[list[Any]]:
    """Return `keys`, mean, sd and number of seeds of each row; six digits are enough for any table.

    JSON has no infinite numbers, so an infinite mean is the text that JavaScript's `Number` reads.
    """
    columns = [rows[key].tolist() for key in keys]
    means = [f"{'-' * (mean < 0)}Infinity" if math.isinf(mean) else short_number(mean) for mean in rows["mean"]]
    sds = [short_number(sd) for sd in rows["sd"]]
    return [list(line) for line in zip(*columns, means, sds, rows["seeds"].tolist(), strict=True)]


def _axes(tables: Tables) -> list[list[Any]]:
    """Return order, round, and the means over trials of the gigabytes sent and the epsilon spent until its end."""
    done = countable_trials(tables)[0]
    rounds = tables.rounds.sort_values("round").merge(done[[*TRIAL, "order"]], on=TRIAL)
    rounds = rounds.assign(gigabytes=gigabytes_sent(rounds), epsilon=rounds["epsilon"].astype(float))
    means = rounds.groupby(["order", "round"])[["gigabytes", "epsilon"]].mean().reset_index()
    return [
        [int(order), int(number), short_number(gigabytes), short_number(epsilon)]
        for order, number, gigabytes, epsilon in means.itertuples(index=False)
    ]


def _repetitions(tables: Tables) -> str:
    done = countable_trials(tables)[0]
    if done.empty:
        return ""
    return mean_caption(done.merge(tables.trials[[*TRIAL, "partition_hash"]], on=TRIAL))


def _pairs(tables: Tables, summary: Summary) -> Iterator[dict[str, Any]]:
    """Yield the comparisons of all pairs under the default rule, on test and ood data.

    They are of the metric that chooses, accuracy and loss.
    """
    for metric in dict.fromkeys([*tables.criteria.values(), "accuracy", "loss"]):
        for split in ("test", "ood"):
            try:
                scores = paired_scores(tables, metric=metric, point=None, split=split, rule=None, summary=summary)
                pairs = all_pairs(scores)
            except UsageError:  # no such values, or fewer than two methods
                continue
            orders = [list(order) for order in pairs.orders]
            yield {
                "metric": metric,
                "split": split,
                "caption": scores.caption,
                "orders": orders,
                "columns": list(pairs_columns(pairs, metric).items()),
                "notes": pairs_notes(pairs),
            }


def _trials(tables: Tables) -> Iterator[dict[str, Any]]:
    last = tables.rounds[tables.rounds["stage"] == "round"].groupby("trial")["round"].max()
    columns = ("trial", "algorithm", "status", "error", "traceback", "weights_hash", "partition_hash")
    for _, trial in tables.trials.sort_values(["algorithm", "seed", "trial"]).iterrows():
        yield {
            **{name: _text(trial.get(name)) for name in columns},
            "seed": int(trial["seed"]),
            "seconds": short_number(trial.get("seconds")),
            "round": int(last.get(trial["trial"], 0)),
            "rounds": short_number(trial.get("rounds")),
        }


def _versions(trials: pd.DataFrame) -> list[dict[str, str | None]]:
    """Return the distinct combinations of installed versions."""
    rows = trials[[name for name in _VERSIONS if name in trials]].drop_duplicates()
    return [
        {str(name).removeprefix("version_"): _text(value) for name, value in row.items()} for _, row in rows.iterrows()
    ]


def _text(value: Any) -> str | None:
    return None if _is_null(value) else str(value)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value)) or value is pd.NA or value is pd.NaT


def as_json(content: Mapping[str, Any]) -> str:
    """Return JSON that may stand in an HTML script element."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
