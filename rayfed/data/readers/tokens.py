"""Texts as rows of word numbers."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

PADDING, UNKNOWN = 0, 1

_MARKS = {mark: f" {mark} " for mark in "'.,()!?"}
_TABLE = str.maketrans(_MARKS | {'"': "", ";": " ", ":": " "})


def words(text: str) -> list[str]:
    """The words and marks of an English text, in small letters: the rules of torchtext's "basic_english".

    The marks ' . , ( ) ! ? are words of their own; quotation marks, colons, semicolons and <br /> are left out.
    """
    return text.lower().replace("<br />", " ").translate(_TABLE).split()


def vocabulary(texts: Iterable[str], size: int) -> dict[str, int]:
    """Numbers from 2 for the most frequent words, `size` in all with padding (0) and unknown (1); ties by alphabet."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: size - 2], start=2)}


def encode(out: np.ndarray, texts: Iterable[str], numbers: dict[str, int]) -> None:
    """Fills `out` [n, length], which is zero, with the first words of each text."""
    length = out.shape[1]
    for row, text in enumerate(texts):
        found = [numbers.get(word, UNKNOWN) for word in words(text)[:length]]
        out[row, : len(found)] = found
