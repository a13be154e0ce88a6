"""UCI HAR: six activities of thirty people, recorded by a smartphone at their waist."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.cache import memory_mapped
from rayfed.data.dataset import Dataset, index_within_group
from rayfed.data.drop_clients import DropClients
from rayfed.data.readers.dataset_paths import ROOT_HELP, find_dataset_folder
from rayfed.data.readers.files import files_hash

SIDES = ("train", "test")
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
LENGTH, CLASSES = 128, 6  # 2.56 seconds at 50 Hz


@dataclass(frozen=True, kw_only=True)
class UciHar(DropClients):
    """Human Activity Recognition Using Smartphones (Anguita et al. 2013): 10,299 windows of nine signals, 30 people.

    `<root>/UCI HAR Dataset` is the official folder from the UCI Machine Learning Repository (data set 240, CC BY 4.0).
    Its subfolders `train` and `test` each contain `Inertial Signals/body_acc_x_train.txt` and eight more files with 128
    numbers per line, `y_train.txt` (1..6) and `subject_train.txt` (1..30). Inputs are float32 [9, 1, 128], as in
    PFLlib: body acceleration, angular velocity and total acceleration, each in x, y and z.

    Clients are the people. As the official test split consists of nine people, by default every person's windows are
    divided 75 to 25 at random, as in DBE (Zhang et al. 2023); `is_test` marks the official split.
    """

    root: str | None = option(None, help=ROOT_HELP)

    name: ClassVar[str] = "uci_har"
    default_partition: ClassVar[str] = "natural"
    partition_defaults: ClassVar[dict[str, Any]] = {"test": 0.25}

    def load(self) -> Dataset:
        """Return all windows, those of `train` first; `source` is train or test, `index` the line, `client` the person.

        Raises:
            UsageError: A file is missing, damaged, or inconsistent with the others.
        """
        folder = find_dataset_folder(
            self.root,
            ["UCI HAR Dataset", "UCI_HAR_Dataset"],
            expected="train and test with their Inertial Signals",
            source="data set 240 of the UCI Machine Learning Repository",
        )
        files = [f"{side}/Inertial Signals/{signal}_{side}.txt" for signal in SIGNALS for side in SIDES]
        labels = [_integers(folder / side / f"y_{side}.txt", CLASSES) for side in SIDES]
        people = [_integers(folder / side / f"subject_{side}.txt", None) for side in SIDES]
        for side, label, person in zip(SIDES, labels, people, strict=True):
            if len(label) != len(person):
                path = folder / side / f"subject_{side}.txt"
                raise UsageError(f"{path}: {len(person)} lines, but y_{side}.txt has {len(label)}")
        counts = [len(label) for label in labels]
        client = np.concatenate(people)
        rows = self.remaining_rows(client, folder)
        signals = memory_mapped(
            self.name,
            {"files": files_hash(folder, files)},
            (sum(counts), len(SIGNALS), 1, LENGTH),
            "float32",
            lambda out: _fill(out, folder, counts),
        )
        source = np.repeat(np.arange(2, dtype=np.int8), counts)
        return Dataset.of(
            self.name,
            signals if len(rows) == len(client) else signals[rows],
            np.concatenate(labels)[rows] - 1,
            is_test=source[rows] == 1,
            num_classes=CLASSES,
            source=source[rows],
            sources=SIDES,
            index=index_within_group(source)[rows],
            client=client[rows],
        )


def _fill(out: np.ndarray, folder: Path, counts: list[int]) -> None:
    start = 0
    for side, count in zip(SIDES, counts, strict=True):
        for channel, signal in enumerate(SIGNALS):
            path = folder / side / "Inertial Signals" / f"{signal}_{side}.txt"
            values = _table(path)
            if values.shape != (count, LENGTH):
                raise UsageError(
                    f"{path}: {values.shape[0]} lines of {values.shape[1]} numbers; expected {count} of {LENGTH}"
                )
            if not np.isfinite(values).all():
                line = int(np.argmin(np.isfinite(values).all(1))) + 1
                raise UsageError(f"{path}: line {line} has a value that is not finite")
            out[start : start + count, channel, 0] = values
        start += count


def _table(path: Path) -> np.ndarray:
    """Read a text file of numbers: float32 [lines, numbers]."""
    try:
        if not path.stat().st_size:
            raise UsageError(f"{path}: empty; expected numbers; download the archive again")
        return np.loadtxt(path, np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: missing, truncated or damaged ({reason}); download the archive again") from error


def _integers(path: Path, high: int | None) -> np.ndarray:
    """Read a text file with one positive integer per line: int64 [lines]."""
    values = _table(path)
    invalid = (values[:, 0] < 1) | (values[:, 0] % 1 != 0) | (values[:, 0] > (high or np.inf))
    if values.shape[1] != 1 or invalid.any():
        line, span = int(np.argmax(invalid)), f"1..{high}" if high else "from 1"
        raise UsageError(f"{path}: line {line + 1} is {values[line].tolist()}; expected one integer, {span}")
    return values[:, 0].astype(np.int64)
