"""Texts as rows of token numbers."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

PADDING, UNKNOWN = 0, 1

_MARKS = {mark: f" {mark} " for mark in "'.,()!?"}
_TABLE = str.maketrans(_MARKS | {'"': "", ";": " ", ":": " "})


def words(text: str) -> list[str]:
    """Return the lower-case words of an English text by the rules of torchtext's "basic_english".

    The punctuation marks ' . , ( ) ! ? are separate words; quotation marks, colons, semicolons and <br /> are removed.
    """
    return text.lower().replace("<br />", " ").translate(_TABLE).split()


def vocabulary(texts: Iterable[str], size: int) -> dict[str, int]:
    """Number the most frequent words from 2; `size` includes padding (0) and unknown (1); ties by alphabet."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: size - 2], start=2)}


def encode(out: np.ndarray, texts: Iterable[str], numbers: dict[str, int]) -> None:
    """Fill `out` [n, length], which must be zero, with the numbers of the first words of each text."""
    length = out.shape[1]
    for row, text in enumerate(texts):
        row_numbers = [numbers.get(word, UNKNOWN) for word in words(text)[:length]]
        out[row, : len(row_numbers)] = row_numbers
