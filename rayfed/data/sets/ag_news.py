"""AG News: short news texts in four classes."""

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
from rayfed.data.readers.files import files_hash
from rayfed.data.readers.tokens import encode, vocabulary

VERSION = 1  # raise it when the tokens change
SIDES = ("train", "test")
CLASSES = 4  # world, sports, business, science and technology
HEADER = ["Class Index", "Title", "Description"]


@dataclass(frozen=True, kw_only=True)
class AgNews:
    """AG's news topics (Zhang, Zhao and LeCun 2015): 120,000 + 7,600 texts, on which DBE and PFLlib train fastText.

    `<root>/AG_NEWS` contains train.csv and test.csv (class 1..4, title, description, without a header or with
    Kaggle's), as torchtext downloads them, or Parquet files whose names start with train and test and whose columns are
    text and label (0..3), as on the Hugging Face hub (fancyzhx/ag_news); these may also be in its subfolder `data`. For
    research and other non-commercial use (Gulli's AG corpus).

    Inputs are word numbers, int64 [length]: the words of title and description by torchtext's "basic_english" rules, 0
    for padding, and 1 for words that are not among the `vocabulary` most frequent ones of all texts.
    """

    root: str | None = option(None, help=ROOT_HELP)
    vocabulary: int = option(
        98_635,
        low=3,
        help="maximum of word numbers, including padding and unknown; model.vocabulary must be at least as large",
    )
    length: int = option(200, low=1, help="words per text; longer texts are truncated, shorter ones padded")

    name: ClassVar[str] = "ag_news"
    default_partition: ClassVar[str] = "dirichlet"
    partition_defaults: ClassVar[dict[str, Any]] = {"alpha": 1.0}

    def load(self) -> Dataset:
        """Return all texts, those of `train` first; `is_test` marks those of `test`.

        Raises:
            UsageError: A file is missing, empty, truncated or damaged, or a label is invalid.
        """
        folder = find_dataset_folder(
            self.root,
            ["AG_NEWS", "ag_news"],
            expected="train.csv and test.csv, or Parquet files",
            source="torchtext's AG_NEWS or the Hugging Face hub's fancyzhx/ag_news",
        )
        files = {side: _files(folder, side) for side in SIDES}
        read = {side: [_read(path) for path in paths] for side, paths in files.items()}
        texts = [text for side in SIDES for file_texts, _ in read[side] for text in file_texts]
        counts = [sum(len(file_texts) for file_texts, _ in read[side]) for side in SIDES]
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
    paths = sorted(folder.glob(f"{side}*.parquet")) or sorted(folder.glob(f"data/{side}*.parquet"))
    if not paths:
        raise UsageError(f"{folder}: contains neither {side}.csv nor {side}*.parquet; expected one of them")
    return paths


def _read(path: Path) -> tuple[list[str], np.ndarray]:
    """Return the texts of a file and their labels, int64 from 0."""
    texts, labels = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    if not texts:
        raise UsageError(f"{path}: empty; expected texts with their classes")
    return texts, labels


def _read_csv(path: Path) -> tuple[list[str], np.ndarray]:
    try:
        content = path.read_text(encoding="utf-8")
        lines = list(csv.reader(io.StringIO(content, newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"{path}: damaged ({error}); expected class, title and description; download it again"
        ) from error
    if content.startswith('"') and not content.rstrip().endswith('"'):
        raise UsageError(f"{path}: truncated within its last text; download it again")
    lines = lines[1:] if lines[:1] == [HEADER] else lines
    label_of = {str(number): number - 1 for number in range(1, CLASSES + 1)}
    for number, line in enumerate(lines, start=1):
        if len(line) != 3 or line[0] not in label_of:
            excerpt = ",".join(line)[:60]
            raise UsageError(
                f"{path}: entry {number} is {excerpt!r}; expected a class 1..{CLASSES}, title, description"
            )
    return [f"{title} {text}" for _, title, text in lines], np.array([label_of[line[0]] for line in lines], np.int64)


def _read_parquet(path: Path) -> tuple[list[str], np.ndarray]:
    table = tables.read(path, ["text", "label"])
    texts, labels = table["text"].to_pylist(), table["label"].to_pylist()
    for number, (text, label) in enumerate(zip(texts, labels, strict=True)):
        if not isinstance(text, str) or label not in range(CLASSES):
            raise UsageError(
                f"{path}: row {number} has label {label!r}; expected a string and a label 0..{CLASSES - 1}"
            )
    return texts, np.array(labels, np.int64)
