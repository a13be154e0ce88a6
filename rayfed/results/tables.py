"""The columns of the `metrics` and `rounds` tables, and the rows that a run adds to them.

Rounds are numbered alike in both tables: 0 is the setup before the first round, 1 to R are the rounds, and R + 1 is the
final stage after the last one. A resume can therefore drop exactly what it is going to repeat: every row after the
checkpoint's round.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa

SERVER = -1
"""The value of `client` in a row that belongs to the server and to no client."""
SPLITS = ("train", "val", "test", "ood")
POINTS = ("global", "downloaded", "trained", "adapted")
STAGES = ("setup", "round", "final")


class TrialId(NamedTuple):
    """What every row of a trial repeats, so that a table makes sense without the others."""

    experiment: str
    trial: str
    algorithm: str
    seed: int


class MetricRow(NamedTuple):
    """One value: `metric` of the model at `point` on the `n` examples of one client's `split`.

    `client` is `SERVER` for a value of the server. Accuracies are fractions of 1. A `unseen` is a client that took no
    part in training and was scored after it.
    """

    round: int
    client: int
    domain: str
    split: str
    point: str
    metric: str
    value: float
    n: int
    unseen: bool = False


class RoundRow(NamedTuple):
    """What one round cost: seconds of wall clock, bytes on the wire by payload field, and the privacy spent so far.

    The table also gets `bytes_down` and `bytes_up`, the sums over the fields. `bytes_formula` is both together by the
    formula of the method's paper, None where there is none. `epsilon` is None without privacy; else
    `privacy_unit` says what it is of: `client`, all data of one; `representation`, one vector; `stretched coordinate`,
    one number of a vector that was stretched to [0, 1], while its others stay (see `rayfed.algorithms.dp_adcol`).
    """

    round: int
    stage: str
    seconds_broadcast: float = 0.0
    seconds_train: float = 0.0
    seconds_upload: float = 0.0
    seconds_aggregate: float = 0.0
    seconds_evaluate: float = 0.0
    seconds_total: float = 0.0
    bytes_down_by_field: Mapping[str, int] = {}
    bytes_up_by_field: Mapping[str, int] = {}
    bytes_formula: float | None = None
    cohort: int = 0
    epsilon: float | None = None
    privacy_unit: str | None = None


_TRIAL = [("experiment", pa.string()), ("trial", pa.string()), ("algorithm", pa.string()), ("seed", pa.int64())]
_SECONDS = [name for name in RoundRow._fields if name.startswith("seconds_")]

METRICS_SCHEMA = pa.schema(
    [
        *_TRIAL,
        ("round", pa.int32()),
        ("client", pa.int32()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("point", pa.string()),
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("n", pa.int64()),
        ("unseen", pa.bool_()),
    ]
)

ROUNDS_SCHEMA = pa.schema(
    [
        *_TRIAL,
        ("round", pa.int32()),
        ("stage", pa.string()),
        *((name, pa.float64()) for name in _SECONDS),
        ("bytes_down", pa.int64()),
        ("bytes_up", pa.int64()),
        ("bytes_down_by_field", pa.map_(pa.string(), pa.int64())),  # pandas reads a list of (field, bytes) pairs
        ("bytes_up_by_field", pa.map_(pa.string(), pa.int64())),
        ("bytes_formula", pa.float64()),
        ("cohort", pa.int32()),
        ("epsilon", pa.float64()),
        ("privacy_unit", pa.string()),
    ]
)


def metrics_table(trial: TrialId, rows: Iterable[MetricRow]) -> pa.Table:
    """`rows` as Arrow columns; raises `ValueError` for a split or a point that no reader would look for."""
    rows = list(rows)
    _known({row.split for row in rows}, SPLITS, "split")
    _known({row.point for row in rows}, POINTS, "point")
    return _table(METRICS_SCHEMA, trial, {name: [row[i] for row in rows] for i, name in enumerate(MetricRow._fields)})


def rounds_table(trial: TrialId, rows: Iterable[RoundRow]) -> pa.Table:
    """`rows` as Arrow columns; raises `ValueError` for an unknown stage."""
    rows = list(rows)
    _known({row.stage for row in rows}, STAGES, "stage")
    columns: dict[str, list] = {name: [row[i] for row in rows] for i, name in enumerate(RoundRow._fields)}
    for way in ("bytes_down", "bytes_up"):
        by_field = columns[f"{way}_by_field"]
        columns[way] = [sum(fields.values()) for fields in by_field]
        columns[f"{way}_by_field"] = [list(fields.items()) for fields in by_field]
    return _table(ROUNDS_SCHEMA, trial, columns)


def _table(schema: pa.Schema, trial: TrialId, columns: dict[str, list]) -> pa.Table:
    length = len(columns["round"])
    constant = {name: [value] * length for name, value in trial._asdict().items()}
    return pa.table({**constant, **columns}, schema=schema)


def _known(found: set[str], known: tuple[str, ...], what: str) -> None:
    if unknown := found - set(known):
        raise ValueError(f"{what} {sorted(unknown)[0]!r}: known are {', '.join(known)}")
