"""The names that datasets, files and folders give to their training, validation and test examples."""

import re
from collections.abc import Sequence

import numpy as np

from rayfed.core.errors import UsageError

SPELLINGS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "development"),
    "test": ("test", "testing"),
}
EXPECTED = "train, val or test, also training, valid, validation, dev, development or testing"
_SPLITS: dict[str, str] = {}
for _split, _spellings in SPELLINGS.items():
    _SPLITS.update(dict.fromkeys(_spellings, _split))


def split_named(name: str) -> str | None:
    """Return train, val or test for a spelling of it, in letters of any size; None for another name."""
    return _SPLITS.get(name.strip().lower())


def split_in(text: str) -> str | None:
    """Return the first spelling of a split among the words of `text`, such as of a file's name; None without one."""
    words = re.split(r"[^a-z]+", text.lower())
    return next((word for word in words if word in _SPLITS), None)


def split_masks(where: str, names: Sequence[str] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows are test examples and which are validation examples, bool [n], by the split of each row.

    Raises:
        UsageError: A name is no spelling of a split; the message starts with `where`.
    """
    different, codes = np.unique(np.asarray(names, str), return_inverse=True)
    splits = list(map(split_named, different.tolist()))
    if None in splits:
        unknown = different[splits.index(None)].item()
        raise UsageError(f"{where} has {unknown!r}; expected {EXPECTED}")
    split = np.array(splits, str)[codes]
    return split == "test", split == "val"
