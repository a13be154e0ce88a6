"""The scores of each trial as its files hold them, compressed, and what reports need of them all.

As data frames, the scores of a large sweep take gigabytes. What a report shows are means over clients, and the values
of clients in a few rounds only, and both follow from the scores of one trial at a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import pandas as pd
import pyarrow as pa

from rayfed.core.records import SERVER
from rayfed.records.files import decompressed
from rayfed.records.schema import METRICS_SCHEMA
from rayfed.reports.selection import CLIENT, TRIAL, aggregate_clients, client_values, pick_rounds, scores_of

_STRINGS = [field.name for field in METRICS_SCHEMA if pa.types.is_string(field.type)]
_NO_ROWS = METRICS_SCHEMA.empty_table()
_COUNTED = [*TRIAL, "algorithm", "unseen", "point", "split", "metric", "round"]


class TrialScores:
    """The rows of one trial in the table `metrics`.

    Args:
        files: The Parquet files, as `read_compressed` returns them.
    """

    def __init__(self, files: Sequence[bytes]):
        self._files = files

    def rows(self) -> pa.Table:
        """Return the rows."""
        return pa.concat_tables([_NO_ROWS, *(decompressed(file) for file in self._files)])

    def frame(self) -> pd.DataFrame:
        """Return the rows with categories in place of strings."""
        tables = [decompressed(file, _STRINGS) for file in self._files] or [_NO_ROWS]
        return pa.concat_tables(tables).unify_dictionaries().to_pandas()

    @property
    def curves(self) -> pd.DataFrame:
        """What `aggregate_clients` returns."""
        return self._reduced.curves

    @property
    def counts(self) -> pd.DataFrame:
        """What `count_scores` returns."""
        return self._reduced.counts

    @cached_property
    def _reduced(self) -> "_Reduced":
        frame = self.frame()
        return _Reduced(_as_strings(aggregate_clients(frame)), _as_strings(count_scores(frame)))


class _Reduced(NamedTuple):
    curves: pd.DataFrame
    counts: pd.DataFrame


def count_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return which scores there are: one row per trial, model, split, metric and round of the table `metrics`.

    The columns besides these are the numbers of `values`, of those that are NaN (`missing`), and of those that clients
    have (`clients`); and `cohort`, equal where the same clients have values other than NaN, and 0 where none has.
    """
    group = metrics.groupby(_COUNTED, sort=False, observed=True).ngroup().rename("group")
    is_client, missing = metrics["client"] != SERVER, metrics["value"].isna()
    of_group = pd.DataFrame({"values": 1, "missing": missing, "clients": is_client}).groupby(group).sum()
    scored = pd.DataFrame({"group": group, "client": metrics["client"]})[is_client & ~missing].drop_duplicates()
    hashes = pd.Series(pd.util.hash_array(scored["client"].to_numpy()), scored["group"], dtype="uint64")
    cohort = hashes.groupby(level=0).sum().reindex(of_group.index, fill_value=0)  # a sum, so in any order
    return metrics.loc[~group.duplicated(), _COUNTED].reset_index(drop=True).assign(**of_group, cohort=cohort)


def picked_values(
    scores: Iterable[TrialScores], trials: pd.DataFrame, metric: str, split: str, criteria: Mapping[str, str]
) -> pd.DataFrame:
    """Return the participants' values of a metric on a split at the rounds that rules pick: see `pick_rounds`.

    There are the quantities of `aggregate_clients` and of `client_values`, the latter with `domain`, that of the
    client's first score; only trials in `trials` count.
    """
    parts = []
    for one in scores:
        rows = scores_of(_as_strings(one.frame()).merge(trials[TRIAL], on=TRIAL), metric, split, criteria)
        rows = rows[~rows["unseen"]]
        curves = scores_of(one.curves.merge(trials[TRIAL], on=TRIAL), metric, split, criteria)
        clients = client_values(rows[(rows["metric"] == metric) & (rows["split"] == split)])
        picked = pick_rounds(pd.concat([curves[~curves["unseen"]], clients], ignore_index=True), criteria)
        first = rows.drop_duplicates([*TRIAL, "client"])
        domains = first.assign(quantity=CLIENT + first["client"].astype(str))[[*TRIAL, "quantity", "domain"]]
        parts.append(picked.merge(domains.fillna({"domain": ""}), on=[*TRIAL, "quantity"], how="left"))
    return pd.concat(parts, ignore_index=True)


def _as_strings(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `frame` with strings in place of categories."""
    categories = frame.select_dtypes("category")
    return frame.assign(**{name: column.astype(column.cat.categories.dtype) for name, column in categories.items()})
