"""AG News: short news texts in four classes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.cache import Arrays, cached_arrays
from rayfed.data.dataset import Dataset, from_two_files
from rayfed.data.published import Published
from rayfed.data.readers import tables
from rayfed.data.readers.files import files_hash, readable

VERSION = 2  # raise it when the tokens change
SIDES = ("train", "test")
CLASSES = 4  # world, sports, business, science and technology
PADDING, UNKNOWN = 0, 1
_TABLE = str.maketrans({mark: f" {mark} " for mark in "'.,()!?"} | {'"': "", ";": " ", ":": " "})


@dataclass(frozen=True, kw_only=True)
class AgNews(Published):
    """AG's news topics (Zhang, Zhao and LeCun 2015): 120,000 + 7,600 texts, on which DBE and PFLlib train fastText.

    `<root>/AG_NEWS` contains train.csv and test.csv (class 1..4, title, description, without a header or with
    Kaggle's), as torchtext downloads them, or Parquet files whose names start with train and test and whose columns are
    text and label (0..3), as on the Hugging Face hub (fancyzhx/ag_news); these may also be in its subfolder `data`. For
    research and other non-commercial use (Gulli's AG corpus).

    Inputs are word numbers, int64 [length]: the words of title and description by torchtext's "basic_english" rules, 0
    for padding, and 1 for words that are not among the `vocabulary` most frequent ones of all texts.
    """

    vocabulary: int = option(
        98_635, low=3, help="maximum of word numbers, with padding and unknown; model.vocabulary must be as large"
    )
    length: int = option(200, low=1, help="words per text; longer texts are truncated, shorter ones padded")

    name: ClassVar[str] = "ag_news"
    default_partition: ClassVar[str] = "dirichlet"
    partition_defaults: ClassVar[dict[str, Any]] = {"alpha": 1.0}

    def load(self) -> Dataset:
        """Return all texts, those of `train` first; `is_test` marks those of `test`."""
        folder = self.find("ag_news")
        files = {side: _files(folder, side) for side in SIDES}
        names = [str(path.relative_to(folder)) for paths in files.values() for path in paths]
        key = {"version": VERSION, "files": files_hash(folder, names)}
        key |= {"vocabulary": str(self.vocabulary), "length": str(self.length)}
        arrays = cached_arrays(self.name, key, lambda: self._encoded(files))
        columns = from_two_files(arrays["source"] == 1, SIDES)
        return Dataset.of(self.name, arrays["tokens"], arrays["labels"], num_classes=CLASSES, **columns)

    def _encoded(self, files: dict[str, list[Path]]) -> Arrays:
        parts = [_read(path).assign(source=code) for code, side in enumerate(SIDES) for path in files[side]]
        table = pandas.concat(parts)
        return {
            "tokens": encode(table["text"], vocabulary(table["text"], self.vocabulary), self.length),
            "labels": table["label"].to_numpy(np.int64),
            "source": table["source"].to_numpy(np.int8),
        }


def _files(folder: Path, side: str) -> list[Path]:
    if (folder / f"{side}.csv").is_file():
        return [folder / f"{side}.csv"]
    paths = sorted(folder.glob(f"{side}*.parquet")) or sorted(folder.glob(f"data/{side}*.parquet"))
    if not paths:
        raise UsageError(f"{folder}: contains neither {side}.csv nor {side}*.parquet; expected one of them")
    return paths


def _read(path: Path) -> pandas.DataFrame:
    """Return the texts of a file and their labels from 0, the columns text and label."""
    with readable(path, "a file of texts with their classes"):
        if path.suffix == ".parquet":
            table = tables.read(path, ["text", "label"]).to_pandas()
        else:
            names = ["label", "title", "description"]
            rows = pandas.read_csv(path, header=None, names=names, dtype=str, keep_default_na=False)
            rows = rows[rows["label"] != "Class Index"]  # Kaggle's header
            label = pandas.to_numeric(rows["label"], errors="coerce") - 1
            description = rows["description"].where(rows["description"] != "")
            table = pandas.DataFrame({"text": rows["title"] + " " + description, "label": label})
    valid = (table["label"].isin(range(CLASSES)) & table["text"].notna()).to_numpy()
    if not valid.all() or not len(valid):
        entry = f"entry {int(valid.argmin()) + 1} has another class or no text" if len(valid) else "empty"
        raise UsageError(f"{path}: {entry}; expected texts with {CLASSES} classes")
    return table


def words(text: str) -> list[str]:
    """Return the lower-case words of an English text by the rules of torchtext's "basic_english".

    The punctuation marks ' . , ( ) ! ? are separate words; quotation marks, colons, semicolons and <br /> are removed.
    """
    return text.lower().replace("<br />", " ").translate(_TABLE).split()


def vocabulary(texts: Iterable[str], size: int) -> dict[str, int]:
    """Number the most frequent words from 2; `size` includes padding (0) and unknown (1); ties by alphabet."""
    counts = Counter(word for text in texts for word in words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: size - 2], start=2)}


def encode(texts: pandas.Series, numbers: dict[str, int], length: int) -> np.ndarray:
    """Return the numbers of the first words of each text, int64 [n, length]."""
    tokens = np.full((len(texts), length), PADDING)
    for row, text in zip(tokens, texts, strict=True):
        row_numbers = [numbers.get(word, UNKNOWN) for word in words(text)[:length]]
        row[: len(row_numbers)] = row_numbers
    return tokens
