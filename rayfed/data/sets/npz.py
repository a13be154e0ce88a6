"""A user's own data in one .npz file, in which every example belongs to a client."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.core.paths import absolute
from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import ChannelNormalisation
from rayfed.data.inputs import check_inputs, count_classes, model_inputs, targets
from rayfed.data.on_disk import Arrays, as_lazy_rows, cached_arrays
from rayfed.data.population import Examples
from rayfed.data.readers.files import existing, files_hash, readable

VERSION = 2  # raise it when the cached array changes
EXPECTED = ("images", "labels", "client", "is_test")


@dataclass(frozen=True, kw_only=True)
class Npz(ChannelNormalisation):
    """One .npz file with the arrays images, labels, client and is_test of equal length N.

    `images` are uint8 [N, height, width] or [N, channels, height, width], or other numbers [N, ...]; `labels` are
    integers from 0 [N], or other targets [N, ...]; `client` are integers from 0, and `is_test` booleans. The arrays are
    unpacked once into the cache, from which images are read when they are needed.
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
        path = existing("data.file", self.file, f"expected an .npz file with {', '.join(EXPECTED)}")
        key = {"version": VERSION, "files": files_hash(path.parent, [path.name])}
        arrays = cached_arrays("npz", key, lambda: _read(self.file))
        images, labels, num_classes = as_lazy_rows(arrays["images"]), np.array(arrays["labels"]), self.num_classes
        if labels.ndim == 1 and labels.dtype.kind == "i":
            num_classes = count_classes(f"{where}: labels", [labels], "data.num_classes", num_classes)
        return Dataset.of(
            path.stem,
            images,
            labels,
            is_test=np.array(arrays["is_test"]),
            num_classes=num_classes,
            client=arrays["client"].astype(np.int64),
            **self.normalisation(images.shape[1] if images.dtype == np.uint8 else 1),
        )


def _read(file: str) -> Arrays:
    """Return the four arrays of a file, images as uint8 [N, channels, height, width] or float32 [N, ...]."""
    where = f"data.file={file}"
    with readable(where, f"an .npz file with {', '.join(EXPECTED)}"):
        with np.load(absolute(file), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in EXPECTED}
        images = arrays["images"]
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) > 1 or not len(images):
            raise ValueError(f"lengths {sizes}")
    arrays["labels"] = targets(f"{where}: labels", arrays["labels"])
    if images.dtype == np.uint8 and images.ndim == 3:
        images = images[:, None]
    images = model_inputs(f"{where}: images", images)
    check_inputs(f"{where}: images", Examples(images, arrays["labels"]))
    return arrays | {"images": images}
