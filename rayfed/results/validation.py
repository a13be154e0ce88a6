"""The validation score of one trial, read from its own files."""

import pyarrow as pa

from rayfed.core.records import SERVER
from rayfed.results.files import read_parquet
from rayfed.results.selection import CRITERIA
from rayfed.results.storage import Storage


def best_validation(home: Storage, trial: str, point: str) -> float | None:
    """Return the best validation score of a trial over its rounds; None if there is none.

    The score of a round is the mean over the participants of the accuracy at `point`, or of the negative loss where
    there is no accuracy, so that higher is better. Test scores play no part.

    Args:
        home: The folder of the experiment.
        trial: The trial.
        point: The model that is scored.
    """
    folder = home.child("metrics")
    names = sorted(name for name in folder.files() if name.startswith(f"{trial}-") and name.endswith(".parquet"))
    if not names:
        return None
    rows = pa.concat_tables([read_parquet(folder, name) for name in names]).to_pandas()
    is_validation = (rows["split"] == "val") & (rows["point"] == point) & ~rows["unseen"] & (rows["client"] != SERVER)
    rows = rows[is_validation & rows["value"].notna()]
    for metric in CRITERIA:
        scores = rows[rows["metric"] == metric].groupby("round")["value"].mean()
        if len(scores):
            return float(-scores.min() if metric == "loss" else scores.max())
    return None
