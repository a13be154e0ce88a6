"""Which rows a reader asked for: one metric and split, at the point where each algorithm is scored."""

import pandas as pd

from rayfed.errors import UsageError
from rayfed.options import suggestion
from rayfed.results.read import Tables
from rayfed.results.summary import points_to_show


def wanted(rows: pd.DataFrame, tables: Tables, *, metric: str, point: str | None, split: str) -> pd.DataFrame:
    """`rows` (experiment, algorithm, newcomer, point, split, metric, …) of the participants, of one metric and split.

    `point` None is the point that each algorithm's paper scores; on the split "ood" it is the global model, which alone
    is scored there.

    Raises:
        UsageError: there are none.
    """
    rows = rows[~rows["newcomer"]]
    points = points_to_show(tables)
    for name, value in (("metric", metric), ("split", split)):
        if value not in set(rows[name]):
            raise UsageError(f"{name}={value}: {suggestion(value, sorted(set(rows[name])))}")
        rows = rows[rows[name] == value]
    default = "global" if split == "ood" else None
    asked = [point or default or points[key] for key in zip(rows["experiment"], rows["algorithm"], strict=True)]
    found = rows[rows["point"] == pd.Series(asked, index=rows.index)]
    if found.empty:
        said = point or "/".join(sorted(set(asked)))
        raise UsageError(f"point={said}: no {split} {metric} there; known: {', '.join(sorted(set(rows['point'])))}")
    return found
