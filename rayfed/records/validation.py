"""The validation score of one trial, read from its own files."""

import pyarrow as pa

from rayfed.core.best_round import Selection
from rayfed.core.records import SERVER
from rayfed.records.files import read_parquet
from rayfed.records.storage import Storage


def best_validation(home: Storage, trial: str, selection: Selection) -> float | None:
    """Return the best validation score of a trial over its rounds as a gain, so that higher is better; None without.

    The score of a round is the mean over the participants. Test scores play no part.

    Args:
        home: The folder of the experiment.
        trial: The trial.
        selection: The metric and the model that is scored.
    """
    folder = home.child("metrics")
    names = sorted(name for name in folder.files() if name.startswith(f"{trial}-") and name.endswith(".parquet"))
    if not names:
        return None
    rows = pa.concat_tables([read_parquet(folder, name) for name in names]).to_pandas()
    is_chosen_by = (rows["split"] == "val") & (rows["point"] == selection.point) & (rows["metric"] == selection.metric)
    rows = rows[is_chosen_by & ~rows["unseen"] & (rows["client"] != SERVER) & rows["value"].notna()]
    scores = rows.groupby("round")["value"].mean()
    return max(map(selection.gain, scores.tolist()), default=None)
