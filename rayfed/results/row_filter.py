"""Which rows a reader asked for: one metric and split, at the point where each algorithm is scored."""

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.results.read import Tables
from rayfed.results.summary import points_to_show

DEFAULT_SPLITS = ("test", "ood", "val", "train")  # the first that there is; some data have no test parts


def wanted(
    rows: pd.DataFrame, tables: Tables, *, metric: str, point: str | None, split: str | None = None
) -> pd.DataFrame:
    """`rows` (experiment, algorithm, unseen client, point, split, metric, …) of the participants, of one metric and split.

    `point` None is the point that each algorithm's paper scores; on the split "ood" it is the global model, which alone
    is scored there. `split` None is, for each experiment, the first of `DEFAULT_SPLITS` with values at that point.

    Raises:
        UsageError: there are none.
    """
    rows = rows[~rows["unseen"]]
    points = points_to_show(tables)
    for name, value in (("metric", metric), ("split", split)):
        if value is not None and value not in set(rows[name]):
            raise UsageError(f"{name}={value}: {suggestion(value, sorted(set(rows[name])))}")
        rows = rows if value is None else rows[rows[name] == value]
    places = zip(rows["experiment"], rows["algorithm"], rows["split"], strict=True)
    asked = [point or ("global" if of == "ood" else points[name, algorithm]) for name, algorithm, of in places]
    found = rows[rows["point"] == pd.Series(asked, index=rows.index)]
    if found.empty:
        said = point or "/".join(sorted(set(asked)))
        what = " ".join(filter(None, [split, metric]))
        raise UsageError(f"point={said}: no {what} there; known: {', '.join(sorted(set(rows['point'])))}")
    if split is not None:
        return found
    place = found["split"].map(DEFAULT_SPLITS.index)
    return found[place == place.groupby(found["experiment"]).transform("min")]
