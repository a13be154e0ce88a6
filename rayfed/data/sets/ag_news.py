"""AG News: short news texts in four classes."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas
import pyarrow

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset, from_two_files
from rayfed.data.on_disk import Arrays, cached_arrays
from rayfed.data.published import Published
from rayfed.data.readers import tables
from rayfed.data.readers.files import files_hash

VERSION = 3  # raise it when the tokens change
SIDES = ("train", "test")
CLASSES = 4  # world, sports, business, science and technology
PADDING = 0
UNKNOWN = 1
_TABLE = str.maketrans({mark: f" {mark} " for mark in "'.,()!?"} | {'"': "", ";": " ", ":": " "})


@dataclass(frozen=True, kw_only=True)
class AgNews(Published):
    """AG's news topics (Zhang, Zhao and LeCun 2015): 120,000 + 7,600 texts, on which DBE and PFLlib train fastText.

    `<root>/AG_NEWS` is a copy of fancyzhx/ag_news on the Hugging Face hub: Parquet files whose names start with train
    and test, also in its subfolder `data`, with the columns text and label (0..3). For research and other
    non-commercial use (Gulli's AG corpus).

    Inputs are word numbers, int64 [length], of the title and the description. Words are divided by torchtext's
    "basic_english" rules. 0 is padding, and 1 a word that is not among the `vocabulary` most frequent ones of all
    texts.
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
        by_split = tables.tables_by_split(folder)
        files = []
        for side in SIDES:
            of_side = by_split.get(side, ())
            files.append([path.relative_to(folder) for path in of_side])
        if not all(files):
            raise UsageError(f"{folder}: has no train*.parquet and test*.parquet; expected both")
        paths = list(map(str, itertools.chain(*files)))
        key = {"version": VERSION, "files": files_hash(folder, paths)}
        key |= {"vocabulary": str(self.vocabulary), "length": str(self.length)}
        arrays = cached_arrays(self.name, key, lambda: self._encoded(folder, files))
        columns = from_two_files(arrays["source"] == 1, SIDES)
        return Dataset.of(self.name, arrays["tokens"], arrays["labels"], num_classes=CLASSES, **columns)

    def _encoded(self, folder: Path, files: list[list[Path]]) -> Arrays:
        pieces = []
        sources = []
        for code, side in enumerate(files):
            for path in side:
                pieces.append(_texts(folder / path))
                sources.append(code)
        table = pandas.concat(pieces, ignore_index=True)
        numbers = vocabulary(table["text"], self.vocabulary)
        sizes = [len(piece) for piece in pieces]
        return {
            "tokens": encode(table["text"], numbers, self.length),
            "labels": table["label"].to_numpy(np.int64),
            "source": np.repeat(np.array(sources, np.int8), sizes),
        }


def _texts(path: Path) -> pandas.DataFrame:
    """Return the columns text and label of a file."""
    table = tables.read(path, ["text", "label"])
    expected = {"text": pyarrow.types.is_string, "label": pyarrow.types.is_integer}
    for name, fits in expected.items():
        column = table[name]
        if not fits(column.type) or column.null_count:
            found = f"{column.type} with {column.null_count} empty cells"
            raise UsageError(f"{path}: column {name!r} is {found}; expected texts and their labels 0 to {CLASSES - 1}")
    return table.replace_schema_metadata(None).to_pandas()


def words(text: str) -> list[str]:
    """Return the lower-case words of an English text by the rules of torchtext's "basic_english".

    The punctuation marks ' . , ( ) ! ? are separate words; quotation marks, colons, semicolons and <br /> are removed.
    """
    return text.lower().replace("<br />", " ").translate(_TABLE).split()


def vocabulary(texts: Iterable[str], size: int) -> dict[str, int]:
    """Number the most frequent words from 2; `size` includes padding (0) and unknown (1); ties by alphabet."""
    counts = Counter[str]()
    for text in texts:
        counts.update(words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    kept = ranked[: size - 2]
    return {word: number for number, word in enumerate(kept, start=2)}


def encode(texts: pandas.Series, numbers: dict[str, int], length: int) -> np.ndarray:
    """Return the numbers of the first words of each text, int64 [n, length]."""
    tokens = np.full((len(texts), length), PADDING)
    for row, text in zip(tokens, texts, strict=True):
        first_words = words(text)[:length]
        row_numbers = []
        for word in first_words:
            row_numbers.append(numbers.get(word, UNKNOWN))
        row[: len(row_numbers)] = row_numbers
    return tokens
