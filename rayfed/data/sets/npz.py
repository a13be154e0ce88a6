"""A user's own data in one .npz file, in which every example belongs to a client."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.paths import absolute
from rayfed.data.dataset import Dataset, as_mask
from rayfed.data.dataset_options import ChannelNormalisation
from rayfed.data.inputs import check_inputs, count_classes, model_inputs, names_as_integers, targets
from rayfed.data.on_disk import Arrays, as_lazy_rows, cached_arrays
from rayfed.data.population import Examples
from rayfed.data.readers.files import existing, files_hash, note, readable
from rayfed.data.splits import split_masks

VERSION = 3  # raise it when the cached array changes
REQUIRED = ("images", "labels", "client")
EXPECTED = f"an .npz file with {', '.join(REQUIRED)}, and is_test or split"
MARKS = ("is_test", "is_val")
KNOWN = (*REQUIRED, *MARKS, "split")


@dataclass(frozen=True, kw_only=True)
class Npz(ChannelNormalisation):
    """One .npz file with the arrays images, labels, client and is_test of equal length N.

    `images` are uint8 [N, height, width] or [N, channels, height, width], or other numbers [N, ...]; `labels` are
    integers from 0 or words [N], or other targets [N, ...]; `client` are integers or words, and `is_test` booleans.
    Booleans `is_val` mark validation examples. Or `split` has train, val or test for each example, in place of both.
    The arrays are unpacked once into the cache, from which images are read when they are needed.
    """

    file: str = option(help="path of the .npz file")
    num_classes: int | None = option(None, low=1, help="number of classes; null: the highest label plus 1")

    default_partition: ClassVar[str] = "natural"
    channels: ClassVar[int | None] = None

    def load(self) -> Dataset:
        """Return the examples of the file; `client` keeps the file's numbers.

        Raises:
            UsageError: The file is missing, truncated or not an .npz, or an array is missing or of a wrong kind.
        """
        where = f"data.file={self.file}"
        path = existing("data.file", self.file, f"expected {EXPECTED}")
        key = {"version": VERSION, "files": files_hash(path.parent, [path.name])}
        arrays = cached_arrays("npz", key, lambda: _read(self.file))
        images = as_lazy_rows(arrays["images"])
        labels = np.array(arrays["labels"])
        num_classes = self.num_classes
        if labels.ndim == 1 and labels.dtype.kind == "i":
            num_classes = count_classes(f"{where}: labels", [labels], "data.num_classes", num_classes)
        channels = 1
        if images.dtype == np.uint8:
            channels = images.shape[1]
        marks = {}
        for name in ("is_test", "is_val", "client"):
            marks[name] = np.array(arrays[name])
        return Dataset.of(path.stem, images, labels, num_classes=num_classes, **marks, **self.normalisation(channels))


def _read(file: str) -> Arrays:
    """Return the arrays of a file, images as uint8 [N, channels, height, width] or float32 [N, ...]."""
    where = f"data.file={file}"
    with readable(where, EXPECTED):
        with np.load(absolute(file), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files if name in KNOWN}
            others = [name for name in stored.files if name not in KNOWN]
        missing = [name for name in REQUIRED if name not in arrays]
        if missing or not {"is_test", "split"} & arrays.keys():
            absent = "is_test"
            if missing:
                absent = missing[0]
            raise ValueError(f"{absent} is not a file in it")
        images = arrays["images"]
        sizes = {}
        for name, array in arrays.items():
            sizes[name] = len(array)
        if len(set(sizes.values())) > 1 or not len(images):
            raise ValueError(f"lengths {sizes}")
    if others:
        note(f"{where}: arrays that are not read: {', '.join(others)}")
    labels = targets(f"{where}: labels", arrays["labels"])
    if images.dtype == np.uint8 and images.ndim == 3:
        images = images[:, None]
    images = model_inputs(f"{where}: images", images)
    check_inputs(f"{where}: images", Examples(images, labels))
    client = names_as_integers(f"{where}: client", arrays["client"])
    return {"images": images, "labels": labels, "client": client, **_marks(where, arrays)}


def _marks(where: str, arrays: Arrays) -> Arrays:
    """Return which rows are test examples and which are validation examples, `is_test` and `is_val`, bool [N]."""
    given = {name: as_mask(arrays[name]) for name in MARKS if name in arrays}
    for name, marks in given.items():
        if marks.dtype.kind != "b" or marks.ndim != 1:
            form = f"{marks.dtype} {list(marks.shape)}"
            raise UsageError(f"{where}: {name} is {form}; expected booleans [N]")
    if "split" not in arrays:
        return {"is_val": np.zeros(len(arrays["images"]), bool)} | given
    if arrays["split"].dtype.kind not in "US":
        raise UsageError(f"{where}: split is {arrays['split'].dtype}; expected words, train, val or test")
    masks = split_masks(f"{where}: split", arrays["split"])
    named = dict(zip(MARKS, masks, strict=True))
    for name, marks in given.items():
        if not np.array_equal(marks, named[name]):
            row = int((marks != named[name]).argmax())
            raise UsageError(f"{where}: {name} and split say different things of row {row}; leave {name} out")
    return named
