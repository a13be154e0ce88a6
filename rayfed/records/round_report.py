"""A round on its way from the process of a trial to the recorder: columns, and the means that progress shows."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from rayfed.core.round_record import SERVER, SPLITS, Record
from rayfed.records.tables import score_columns, to_bytes

_MOST_DOMAINS = 20  # with a curve of their own; with more, only the mean over all clients has a curve
_OBJECT_BYTES = 4096  # about what a record without scores takes in memory
_COSTS = (
    *("clients_per_second", "bytes_to_hosts", "bytes_from_hosts", "epsilon", "balance", "gpu_bytes"),
    *("simulated_seconds", "clock_seconds", "staleness_mean"),
)


@dataclass(frozen=True)
class RoundReport:
    """A round for the recorder. The process of the trial makes it, so that the recorder has little to do.

    Attributes:
        record: The round without its scores.
        packed: The columns of the scores as bytes; see `to_bytes`.
        values: What progress and trackers show of the round, by name. `POINT/SPLIT/METRIC` is the mean over the
            participants that have a value, or over the server's test sets if no client has the split; NaN if none has
            one. `POINT/SPLIT/METRIC.DOMAIN` is the mean over one of several domains. Names of unseen clients' values
            begin with `unseen/`, and those of a round's costs with `round/`.
    """

    record: Record
    packed: bytes
    values: Mapping[str, float]

    @classmethod
    def of(cls, record: Record) -> "RoundReport":
        columns = score_columns(record.scores)
        values = values_of(record, columns)
        return cls(replace(record, scores=[]), to_bytes(columns), values)

    @property
    def nbytes(self) -> int:
        """About the bytes that the round takes in memory."""
        predicted = sum(one.outputs.nbytes + one.labels.nbytes for one in self.record.predictions)
        return len(self.packed) + predicted + _OBJECT_BYTES

    def without_domains(self) -> dict[str, float]:
        """Return the values that are not of a single domain."""
        return {name: value for name, value in self.values.items() if not self._is_of_domain(name)}

    def _is_of_domain(self, name: str) -> bool:
        parts = name.split(".")  # metrics and domains may have points, too
        return any(".".join(parts[:end]) in self.values for end in range(1, len(parts)))

    def means(self, metric: str, point: str) -> dict[str, float]:
        """Return the means of `metric` at `point` by split, of the splits that have scores."""
        means = {}
        for split in SPLITS:
            mean = self.mean(point, split, metric)
            if mean is not None:
                means[split] = mean
        return means

    def mean(self, point: str, split: str, metric: str) -> float | None:
        """Return the mean over the participants; None without scores."""
        return self.values.get(f"{point}/{split}/{metric}")


def values_of(record: Record, columns: pa.RecordBatch) -> dict[str, float]:
    """Return the values of a round by name.

    Args:
        columns: Its scores.
    """
    return dict(_means(columns)) | _costs(record)


def _means(columns: pa.RecordBatch) -> Iterator[tuple[str, float]]:
    """Yield the means of scores by name."""
    if not columns.num_rows:
        return
    value = columns.column("value").to_numpy()
    is_client = columns.column("client").to_numpy() != SERVER
    domain, domains = _codes(columns, "domain")
    group, names = _groups(columns)
    has_clients = np.bincount(group, weights=is_client) > 0
    counted = is_client | ~has_clients[group]
    group = group[counted]
    domain = domain[counted]
    value = value[counted]
    means = _mean_by(group, value)
    cell = group * len(domains) + domain
    cells = np.unique(cell)
    means_of_cells = _mean_by(cell, value)
    domains_of_group = np.bincount(cells // len(domains), minlength=len(names))
    for number, name in enumerate(names):
        yield name, float(means[number])
    for number in cells:
        of_group, of_domain = divmod(int(number), len(domains))
        if 1 < domains_of_group[of_group] <= _MOST_DOMAINS:
            name = f"{names[of_group]}.{domains[of_domain]}"
            yield name, float(means_of_cells[number])


def _groups(columns: pa.RecordBatch) -> tuple[np.ndarray, list[str]]:
    """Return for each score the number of its group, and the names of the groups."""
    unseen = columns.column("unseen").to_numpy(zero_copy_only=False)
    key = unseen.astype(np.int64)
    parts = []
    for name in ("point", "split", "metric"):
        codes, strings = _codes(columns, name)
        key = key * len(strings) + codes
        parts.append((codes, strings))
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    names = []
    for row in first:
        name = "/".join(strings[codes[row]] for codes, strings in parts)
        if unseen[row]:
            name = f"unseen/{name}"
        names.append(name)
    return group, names


def _codes(columns: pa.RecordBatch, name: str) -> tuple[np.ndarray, list[str]]:
    """Return a column of strings as the number of the string in each row, and the strings."""
    column = columns.column(name)
    return column.indices.to_numpy().astype(np.int64), column.dictionary.to_pylist()


def _mean_by(group: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the mean by number of the group, over the values that are not NaN; NaN where there is none."""
    defined = ~np.isnan(value)
    size = int(group.max()) + 1
    totals = np.bincount(group[defined], weights=value[defined], minlength=size)
    counts = np.bincount(group[defined], minlength=size)
    means = np.full(size, math.nan)
    np.divide(totals, counts, out=means, where=counts > 0)
    return means


def _costs(record: Record) -> dict[str, float]:
    costs = {
        "clients": float(record.cohort),
        "bytes_down": float(sum(record.bytes_down.values())),
        "bytes_up": float(sum(record.bytes_up.values())),
    }
    for name in _COSTS:
        costs[name] = getattr(record, name)
    for part, seconds in record.seconds.items():
        costs[f"seconds/{part}"] = seconds
    known = {}
    for name, value in costs.items():
        if value is not None:
            known[f"round/{name}"] = value
    return known
