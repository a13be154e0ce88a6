"""What the page draws its charts from, beside the curves: values for JSON, within limits that keep the page small.

The page draws every chart itself, so that its filters apply to all of them. What exceeds a limit is left out, and the
page says so.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from rayfed.records.storage import Storage
from rayfed.reports.chart_data import (
    ROUND_PARTS,
    client_scores,
    last_maps,
    most_partitions,
    read_map,
    recorded_partitions,
    round_seconds,
    varying_keys,
)
from rayfed.reports.hyperparameter_groups import format_value
from rayfed.reports.read import Tables
from rayfed.reports.selection import RULES
from rayfed.reports.summary import countable_trials

MOST_CLIENT_VALUES = 200_000
MOST_CELLS = 100_000
MOST_POINTS = 100_000
_GRID = 999  # the coordinates of maps are integers from 0 to this, three digits each
_RULE_PRIORITY = ("selected", "final", *(rule for rule in RULES if rule not in ("selected", "final")))


def short_number(value: Any) -> float | None:
    """Return `value` with six significant digits; None where there is none, which JSON can hold."""
    if value is None or pd.isna(value) or math.isinf(value):
        return None
    return float(f"{float(value):.6g}")


def _four_digits(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def hyperparameter_values(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the keys that vary, and the values of each method: `keys`, and `values` by order.

    Args:
        rows: those of `Summary.rows`.
    """
    keys = varying_keys(rows)
    methods = rows.drop_duplicates("order")
    return {
        "keys": keys,
        "values": {int(row["order"]): [_setting(row[key]) for key in keys] for _, row in methods.iterrows()},
    }


def _setting(value: Any) -> float | str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return short_number(value)
    return format_value(value)


def client_values(tables: Tables) -> dict[str, Any]:
    """Return the values of clients: `ids`, `domains`, and `series` of order, point, split, metric, rule and values.

    Clients are sorted by domain, then by number. `omitted` counts the series beyond `MOST_CLIENT_VALUES`, of which
    those of other metrics than accuracy, loss and the one that chooses, and of the rules that look at the split itself,
    go first.
    """
    scores = client_scores(tables)
    holders = sorted(
        {(str(domain), int(client)) for domain, client in zip(scores["domain"], scores["client"], strict=True)}
    )
    keys = ["order", "point", "split", "metric", "rule"]
    wide = scores.pivot_table(index=keys, columns=["domain", "client"], values="value").reindex(columns=holders)
    first = {"accuracy", "loss", *tables.criteria.values()}
    ranked = sorted(wide.index, key=lambda key: (_RULE_PRIORITY.index(key[4]), key[3] not in first))
    most = MOST_CLIENT_VALUES // max(len(holders), 1)
    return {
        "ids": [client for _, client in holders],
        "domains": [domain for domain, _ in holders],
        "partitions": most_partitions(tables),
        "series": [[int(key[0]), *key[1:], [_four_digits(value) for value in wide.loc[key]]] for key in ranked[:most]],
        "omitted": len(ranked[most:]),
    }


def time_parts(tables: Tables) -> dict[str, Any]:
    """Return the wall-clock seconds of a round: the names of the `parts`, and `rows` of order and seconds by part."""
    seconds = round_seconds(tables.rounds, countable_trials(tables)[0])
    rows = [[int(order), *(short_number(row[part]) for part in ROUND_PARTS)] for order, row in seconds.iterrows()]
    return {"parts": list(ROUND_PARTS), "rows": rows}


def partitions(home: Storage, tables: Tables) -> dict[str, Any]:
    """Return the recorded partitions of the trials that count, and how many were `omitted` for their size.

    The counts of a partition are triples of client (its place in the list), class and examples, one after the other.
    """
    done = countable_trials(tables)[0]
    order_of = dict(zip(done["trial"], done["order"], strict=True))
    trials = tables.trials[tables.trials["trial"].isin(order_of)]
    shown, omitted, cells = [], 0, 0
    for one in recorded_partitions(home, trials):
        places, labels = np.nonzero(one.counts)
        cells += len(places)
        if cells > MOST_CELLS:
            omitted += 1
            continue
        triples = np.stack([places, labels, one.counts[places, labels]], axis=1)
        shown.append(
            {
                "digest": one.digest,
                "seed": one.seed,
                "orders": sorted({int(order_of[trial]) for trial in one.trials}),
                "clients": one.clients,
                "domains": one.domains,
                "classes": one.counts.shape[1],
                "counts": triples.ravel().tolist(),
            }
        )
    return {"shown": shown, "omitted": omitted}


def maps(home: Storage, tables: Tables) -> dict[str, Any]:
    """Return the maps of representations, and how many were `omitted` beyond `MOST_POINTS`.

    The points of a map are x, y (integers from 0 to 999), domain and class (places in the lists), one after the other.
    """
    shown, omitted, count = [], 0, 0
    for _, file in last_maps(home, countable_trials(tables)[0]).iterrows():
        points = read_map(home, str(file["file"]))
        count += len(points)
        if count > MOST_POINTS:
            omitted += 1
            continue
        by = {name: pd.factorize(points[name].fillna(""), sort=True) for name in ("domain", "label")}
        columns = [*_on_grid(points), *(codes for codes, _ in by.values())]
        shown.append(
            {
                **{name: str(file[name]) for name in ("point", "split", "layer")},
                **{name: int(file[name]) for name in ("order", "seed", "round")},
                "domains": [str(name) for name in by["domain"][1]],
                "labels": [str(name) for name in by["label"][1]],
                "points": np.stack(columns, axis=1).ravel().tolist(),
            }
        )
    return {"shown": shown, "omitted": omitted}


def _on_grid(points: pd.DataFrame) -> Iterator[np.ndarray]:
    for name in ("x", "y"):
        values = points[name].to_numpy(dtype=float)
        low, extent = values.min(), max(float(np.ptp(values)), 1e-12)
        yield np.rint((values - low) / extent * _GRID).astype(int)
