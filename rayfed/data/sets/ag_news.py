"""AG News: short news in four classes."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.cache import memory_mapped
from rayfed.data.dataset import Dataset, index_within_group
from rayfed.data.readers import tables
from rayfed.data.readers.dataset_paths import ROOT_HELP, find_dataset_folder
from rayfed.data.readers.decoding import files_hash
from rayfed.data.readers.tokens import encode, vocabulary

VERSION = 1  # raise it when the tokens change
SIDES = ("train", "test")
CLASSES = 4  # world, sports, business, science and technology
HEADER = ["Class Index", "Title", "Description"]


@dataclass(frozen=True, kw_only=True)
class AgNews:
    """AG's news topics (Zhang, Zhao and LeCun 2015): 120,000 + 7,600 texts, as DBE and PFLlib train fastText on them.

    `<root>/AG_NEWS` holds train.csv and test.csv (class 1..4, title, description, without a header or with Kaggle's),
    as torchtext fetches them, or Parquet files whose names begin with train and test, of columns text and label (0..3),
    as the Hugging Face hub has them (fancyzhx/ag_news), there or in its folder `data`. For research and other
    non-commercial use (Gulli's AG corpus).

    Inputs are int64 [length] word numbers: the words of title and description by torchtext's "basic_english" rules,
    0 for padding, 1 for a word that is not among the `vocabulary` most frequent ones of all texts.
    """

    root: str | None = option(None, help=ROOT_HELP)
    vocabulary: int = option(
        98_635,
        low=3,
        help="at most so many word numbers, padding and unknown included; model.vocabulary must be as large",
    )
    length: int = option(200, low=1, help="words of a text: longer ones are cut, shorter ones padded")

    name: ClassVar[str] = "ag_news"
    default_partition: ClassVar[str] = "dirichlet"
    partition_defaults: ClassVar[dict[str, Any]] = {"alpha": 1.0}

    def load(self) -> Dataset:
        """All texts, those of `train` first; `is_test` marks those of `test`.

        Raises:
            UsageError: a file that is missing, empty, cut short or damaged, or a label that is none.
        """
        folder = find_dataset_folder(
            self.root,
            ["AG_NEWS", "ag_news"],
            expected="train.csv and test.csv, or Parquet files",
            source="torchtext's AG_NEWS or the Hugging Face hub's fancyzhx/ag_news",
        )
        files = {side: _files(folder, side) for side in SIDES}
        read = {side: [_read(path) for path in paths] for side, paths in files.items()}
        texts = [text for side in SIDES for found, _ in read[side] for text in found]
        counts = [sum(len(found) for found, _ in read[side]) for side in SIDES]
        names = [str(path.relative_to(folder)) for paths in files.values() for path in paths]
        tokens = memory_mapped(
            self.name,
            {"version": VERSION, "files": files_hash(folder, names), "vocabulary": self.vocabulary},
            (len(texts), self.length),
            "int64",
            lambda out: encode(out, texts, vocabulary(texts, self.vocabulary)),
        )
        source = np.repeat(np.arange(2, dtype=np.int8), counts)
        return Dataset.of(
            self.name,
            tokens,
            np.concatenate([labels for side in SIDES for _, labels in read[side]]),
            is_test=source == 1,
            num_classes=CLASSES,
            source=source,
            sources=SIDES,
            index=index_within_group(source),
        )


def _files(folder: Path, side: str) -> list[Path]:
    if (folder / f"{side}.csv").is_file():
        return [folder / f"{side}.csv"]
    found = sorted(folder.glob(f"{side}*.parquet")) or sorted(folder.glob(f"data/{side}*.parquet"))
    if not found:
        raise UsageError(f"{folder}: no {side}.csv and no {side}*.parquet; expected one or the other")
    return found


def _read(path: Path) -> tuple[list[str], np.ndarray]:
    """The texts of a file and their labels, int64 from 0."""
    texts, labels = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    if not texts:
        raise UsageError(f"{path}: empty; expected texts with their classes")
    return texts, labels


def _read_csv(path: Path) -> tuple[list[str], np.ndarray]:
    try:
        content = path.read_text(encoding="utf-8")
        lines = list(csv.reader(io.StringIO(content, newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: damaged ({error}); expected class, title and description; fetch it again") from error
    if content.startswith('"') and not content.rstrip().endswith('"'):
        raise UsageError(f"{path}: cut short: its last text has no end; fetch it again")
    lines = lines[1:] if lines[:1] == [HEADER] else lines
    known = {str(number): number - 1 for number in range(1, CLASSES + 1)}
    for number, line in enumerate(lines, start=1):
        if len(line) != 3 or line[0] not in known:
            shown = ",".join(line)[:60]
            raise UsageError(f"{path}: entry {number} is {shown!r}; expected a class 1..{CLASSES}, title, description")
    return [f"{title} {text}" for _, title, text in lines], np.array([known[line[0]] for line in lines], np.int64)


def _read_parquet(path: Path) -> tuple[list[str], np.ndarray]:
    table = tables.read(path, ["text", "label"])
    texts, labels = table["text"].to_pylist(), table["label"].to_pylist()
    for number, (text, label) in enumerate(zip(texts, labels, strict=True)):
        if not isinstance(text, str) or label not in range(CLASSES):
            raise UsageError(f"{path}: row {number} has label {label!r}; expected a text and a label 0..{CLASSES - 1}")
    return texts, np.array(labels, np.int64)
