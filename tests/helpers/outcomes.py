"""Comparison of the results of two runs: bit for bit, and no row twice or missing."""

from collections.abc import Collection

import pandas as pd

KEYS = ["round", "client", "domain", "split", "point", "metric", "unseen"]


def assert_same_results(one: str, other: str, *, left: Collection[int] = ()) -> None:
    """Compare the tables of the experiment `run` in two folders.

    Scores of unseen clients in the rounds `left` may be in `one` alone, since a last round is scored in any case.
    """
    trials, rounds, metrics = (
        [pd.read_parquet(f"{folder}/run/{name}") for folder in (one, other)] for name in ("trials", "rounds", "metrics")
    )
    for column in ("trial", "status", "weights_hash", "rounds_done", "stop_reason"):
        assert trials[0][column].tolist() == trials[1][column].tolist()
    columns = ["trial", "round", "stage", "bytes_down", "bytes_up", "cohort", "sampled", "clock_seconds"]
    pd.testing.assert_frame_equal(*(table[columns].sort_values("round", ignore_index=True) for table in rounds))
    metrics[0] = metrics[0][~(metrics[0]["round"].isin(left) & metrics[0]["unseen"])]
    scores = [table.sort_values(KEYS)[[*KEYS, "value", "n"]].reset_index(drop=True) for table in metrics]
    assert not scores[0].duplicated(KEYS).any()
    pd.testing.assert_frame_equal(*scores, check_exact=True)
