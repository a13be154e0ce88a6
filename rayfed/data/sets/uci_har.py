"""UCI HAR: six activities of thirty people, recorded by a smartphone at their waist."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rayfed.data.dataset import Dataset, from_two_files
from rayfed.data.on_disk import Arrays, cached_arrays
from rayfed.data.published import Published
from rayfed.data.readers.files import files_hash, readable

VERSION = 1  # raise it when the arrays change
SIDES = ("train", "test")
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
# 2.56 seconds at 50 Hz
LENGTH = 128
CLASSES = 6


@dataclass(frozen=True, kw_only=True)
class UciHar(Published):
    """Human Activity Recognition Using Smartphones (Anguita et al. 2013): 10,299 windows of nine signals, 30 people.

    `<root>/UCI HAR Dataset` is the official folder from the UCI Machine Learning Repository (data set 240, CC BY 4.0).
    Its subfolders `train` and `test` each contain `Inertial Signals/body_acc_x_train.txt` and eight more files with 128
    numbers per line, `y_train.txt` (1..6) and `subject_train.txt` (1..30). Inputs are float32 [9, 1, 128], as in
    PFLlib: body acceleration, angular velocity and total acceleration, each in x, y and z.

    Clients are the people. The official test split consists of nine people, and `is_test` marks it. So by default every
    person's windows are divided 75 to 25 at random, as in DBE (Zhang et al. 2023).
    """

    name: ClassVar[str] = "uci_har"
    default_partition: ClassVar[str] = "natural"
    partition_defaults: ClassVar[dict[str, Any]] = {"test": 0.25}

    def load(self) -> Dataset:
        """Return all windows, those of `train` first; `source` is the side, `index` the line, `client` the person."""
        folder = self.find("uci_har")
        files = []
        for signal in SIGNALS:
            for side in SIDES:
                files.append(f"{side}/Inertial Signals/{signal}_{side}.txt")
        for name in ("y", "subject"):
            files += [f"{side}/{name}_{side}.txt" for side in SIDES]
        key = {"version": VERSION, "files": files_hash(folder, files)}
        arrays = cached_arrays(self.name, key, lambda: _read(folder))
        columns = from_two_files(arrays["source"] == 1, SIDES)
        columns["client"] = np.array(arrays["client"])
        return Dataset.of(self.name, arrays["signals"], arrays["labels"], num_classes=CLASSES, **columns)


def _read(folder: Path) -> Arrays:
    """Return signals, float32 [n, 9, 1, 128], and the label from 0, the client and the side of each."""
    signals = []
    labels = []
    clients = []
    for side in SIDES:
        file = folder / side / f"y_{side}.txt"
        labels.append(_integers(file))
        file = folder / side / f"subject_{side}.txt"
        clients.append(_integers(file))
        inertial = folder / side / "Inertial Signals"
        paths = []
        for signal in SIGNALS:
            paths.append(inertial / f"{signal}_{side}.txt")
        shape = (len(labels[-1]), LENGTH)
        channels = [_numbers(path, shape) for path in paths]
        signals.append(np.stack(channels, 1)[:, :, None])
    sizes = [len(label) for label in labels]
    return {
        "signals": np.concatenate(signals),
        "labels": np.concatenate(labels) - 1,
        "client": np.concatenate(clients),
        "source": np.repeat(np.arange(2, dtype=np.int8), sizes),
    }


def _numbers(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Read a text file of finite numbers: float32 [lines, numbers]."""
    count, length = shape
    with readable(path, f"{count} lines of {length} numbers"):
        values = np.loadtxt(path, np.float32, ndmin=2)
        if values.shape != shape or not np.isfinite(values).all():
            lines, found = values.shape
            raise ValueError(f"{lines} lines of {found} numbers from {values.min()}")
    return values


def _integers(path: Path) -> np.ndarray:
    """Read a text file with one positive integer per line: int64 [lines]."""
    with readable(path, "lines of one integer from 1"):
        values = np.loadtxt(path, np.int64, ndmin=1)
        if values.ndim > 1 or not len(values) or values.min() < 1:
            raise ValueError(f"{list(values.shape)} numbers from {values.min(initial=1)}")
    return values
