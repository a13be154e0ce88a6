"""UCI HAR: six activities of thirty people, recorded by a smartphone at their waist."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.data.cache import Arrays, cached_arrays
from rayfed.data.dataset import Dataset, index_within_group
from rayfed.data.dataset_options import DropClients
from rayfed.data.lazy_rows import select_rows
from rayfed.data.published import Published
from rayfed.data.readers.files import files_hash, readable

VERSION = 1  # raise it when the arrays change
SIDES = ("train", "test")
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
LENGTH, CLASSES = 128, 6  # 2.56 seconds at 50 Hz


@dataclass(frozen=True, kw_only=True)
class UciHar(Published, DropClients):
    """Human Activity Recognition Using Smartphones (Anguita et al. 2013): 10,299 windows of nine signals, 30 people.

    `<root>/UCI HAR Dataset` is the official folder from the UCI Machine Learning Repository (data set 240, CC BY 4.0).
    Its subfolders `train` and `test` each contain `Inertial Signals/body_acc_x_train.txt` and eight more files with 128
    numbers per line, `y_train.txt` (1..6) and `subject_train.txt` (1..30). Inputs are float32 [9, 1, 128], as in
    PFLlib: body acceleration, angular velocity and total acceleration, each in x, y and z.

    Clients are the people. As the official test split consists of nine people, by default every person's windows are
    divided 75 to 25 at random, as in DBE (Zhang et al. 2023); `is_test` marks the official split.
    """

    name: ClassVar[str] = "uci_har"
    default_partition: ClassVar[str] = "natural"
    partition_defaults: ClassVar[dict[str, Any]] = {"test": 0.25}

    def load(self) -> Dataset:
        """Return all windows, those of `train` first; `source` is the side, `index` the line, `client` the person."""
        folder = self.find("uci_har")
        files = [f"{side}/Inertial Signals/{signal}_{side}.txt" for signal in SIGNALS for side in SIDES]
        files += [f"{side}/{name}_{side}.txt" for name in ("y", "subject") for side in SIDES]
        key = {"version": VERSION, "files": files_hash(folder, files)}
        arrays = cached_arrays(self.name, key, lambda: _read(folder))
        source, client = arrays["source"], arrays["client"]
        rows = self.remaining_rows(client, folder)
        return Dataset.of(
            self.name,
            select_rows(arrays["signals"], rows),
            arrays["labels"][rows],
            is_test=source[rows] == 1,
            num_classes=CLASSES,
            source=source[rows],
            sources=SIDES,
            index=index_within_group(source)[rows],
            client=client[rows],
        )


def _read(folder: Path) -> Arrays:
    """Return signals, float32 [n, 9, 1, 128], and the label from 0, the client and the side of each."""
    labels = [_integers(folder / side / f"y_{side}.txt", CLASSES) for side in SIDES]
    clients = [_integers(folder / side / f"subject_{side}.txt", None) for side in SIDES]
    signals = []
    for side, label, client in zip(SIDES, labels, clients, strict=True):
        paths = [folder / side / "Inertial Signals" / f"{signal}_{side}.txt" for signal in SIGNALS]
        channels = [_numbers(path) for path in paths]
        if len(client) != len(label):
            raise UsageError(f"{folder / side}: {len(client)} lines of subjects, but {len(label)} of labels")
        for path, values in zip(paths, channels, strict=True):
            if values.shape != (len(label), LENGTH):
                actual = f"{values.shape[0]} lines of {values.shape[1]} numbers"
                raise UsageError(f"{path}: {actual}; expected {len(label)} of {LENGTH}")
        signals.append(np.stack(channels, 1)[:, :, None])
    return {
        "signals": np.concatenate(signals),
        "labels": np.concatenate(labels) - 1,
        "client": np.concatenate(clients),
        "source": np.repeat(np.arange(2, dtype=np.int8), [len(label) for label in labels]),
    }


def _numbers(path: Path) -> np.ndarray:
    """Read a text file of numbers: float32 [lines, numbers]."""
    with readable(path, "lines of numbers"):
        values = np.loadtxt(path, np.float32, ndmin=2)
        if not values.size or not np.isfinite(values).all():
            raise ValueError("no numbers" if not values.size else "a number that is not finite")
    return values


def _integers(path: Path, high: int | None) -> np.ndarray:
    """Read a text file with one positive integer per line: int64 [lines]."""
    values = _numbers(path)
    invalid = (values[:, 0] < 1) | (values[:, 0] % 1 != 0) | (values[:, 0] > (high or np.inf))
    if values.shape[1] != 1 or invalid.any():
        line, span = int(np.argmax(invalid)), f"1..{high}" if high else "from 1"
        raise UsageError(f"{path}: line {line + 1} is {values[line].tolist()}; expected one integer, {span}")
    return values[:, 0].astype(np.int64)
