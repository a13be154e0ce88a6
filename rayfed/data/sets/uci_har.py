"""UCI HAR: six activities of thirty people, by the sensors of a telephone at their waist."""

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
from rayfed.data.readers.decoding import files_hash

SIDES = ("train", "test")
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
LENGTH, CLASSES = 128, 6  # 2.56 seconds at 50 Hz


@dataclass(frozen=True, kw_only=True)
class UciHar(DropClients):
    """Human Activity Recognition Using Smartphones (Anguita et al. 2013): 10,299 windows of nine signals, 30 people.

    The official folder, `<root>/UCI HAR Dataset`, of the archive at the UCI Machine Learning Repository (data set 240,
    CC BY 4.0): in `train` and `test` each, `Inertial Signals/body_acc_x_train.txt` and eight more of 128 numbers a
    line, `y_train.txt` (1..6) and `subject_train.txt` (1..30). Inputs are float32 [9, 1, 128], as PFLlib has them:
    body acceleration, angular velocity and total acceleration, x y z each.

    People are the clients. The official test part are nine people, so by default everybody's windows are divided
    75 to 25 at random, as DBE does (Zhang et al. 2023); `is_test` marks the official part.
    """

    root: str | None = option(None, help=ROOT_HELP)

    name: ClassVar[str] = "uci_har"
    default_partition: ClassVar[str] = "natural"
    partition_defaults: ClassVar[dict[str, Any]] = {"test": 0.25}

    def load(self) -> Dataset:
        """All windows, those of `train` first; `source` is train or test, `index` the line, `client` the person.

        Raises:
            UsageError: a file that is missing, damaged, or does not fit the others.
        """
        folder = find_dataset_folder(
            self.root,
            ["UCI HAR Dataset", "UCI_HAR_Dataset"],
            expected="train and test with their Inertial Signals",
            source="data set 240 of the UCI Machine Learning Repository",
        )
        files = [f"{side}/Inertial Signals/{signal}_{side}.txt" for signal in SIGNALS for side in SIDES]
        labels = [_numbers(folder / side / f"y_{side}.txt", CLASSES) for side in SIDES]
        people = [_numbers(folder / side / f"subject_{side}.txt", None) for side in SIDES]
        for side, label, person in zip(SIDES, labels, people, strict=True):
            if len(label) != len(person):
                path = folder / side / f"subject_{side}.txt"
                raise UsageError(f"{path}: {len(person)} lines, but y_{side}.txt has {len(label)}")
        counts = [len(label) for label in labels]
        client = np.concatenate(people)
        kept = self.remaining_rows(client, folder)
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
            signals if len(kept) == len(client) else signals[kept],
            np.concatenate(labels)[kept] - 1,
            is_test=source[kept] == 1,
            num_classes=CLASSES,
            source=source[kept],
            sources=SIDES,
            index=index_within_group(source)[kept],
            client=client[kept],
        )


def _fill(out: np.ndarray, folder: Path, counts: list[int]) -> None:
    start = 0
    for side, count in zip(SIDES, counts, strict=True):
        for channel, signal in enumerate(SIGNALS):
            path = folder / side / "Inertial Signals" / f"{signal}_{side}.txt"
            found = _table(path)
            if found.shape != (count, LENGTH):
                raise UsageError(
                    f"{path}: {found.shape[0]} lines of {found.shape[1]} numbers; expected {count} of {LENGTH}"
                )
            if not np.isfinite(found).all():
                raise UsageError(f"{path}: line {int(np.argmin(np.isfinite(found).all(1))) + 1} has a value not finite")
            out[start : start + count, channel, 0] = found
        start += count


def _table(path: Path) -> np.ndarray:
    """float32 [lines, numbers] of a text file."""
    try:
        if not path.stat().st_size:
            raise UsageError(f"{path}: empty; expected numbers; fetch the archive again")
        return np.loadtxt(path, np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: missing, cut short or damaged ({reason}); fetch the archive again") from error


def _numbers(path: Path, high: int | None) -> np.ndarray:
    """int64 [lines]: a whole number from 1 in each line."""
    found = _table(path)
    wrong = (found[:, 0] < 1) | (found[:, 0] % 1 != 0) | (found[:, 0] > (high or np.inf))
    if found.shape[1] != 1 or wrong.any():
        line, span = int(np.argmax(wrong)), f"1..{high}" if high else "from 1"
        raise UsageError(f"{path}: line {line + 1} is {found[line].tolist()}; expected one whole number, {span}")
    return found[:, 0].astype(np.int64)
