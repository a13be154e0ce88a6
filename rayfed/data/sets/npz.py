"""A user's own data in one .npz file, in which every example belongs to a client."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.paths import absolute, looked_in
from rayfed.data.cache import Arrays, cached_arrays
from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import ChannelNormalisation, DropClients
from rayfed.data.lazy_rows import select_rows
from rayfed.data.population import check_channels_first, count_classes, model_inputs, not_finite, targets
from rayfed.data.readers.files import files_hash, readable

VERSION = 2  # raise it when the cached array changes
EXPECTED = {
    "images": "uint8 [N, height, width] or [N, channels, height, width], or floats [N, ...]",
    "labels": "integers [N], from 0, or other targets [N, ...]",
    "client": "integers [N], from 0",
    "is_test": "booleans [N]",
}


@dataclass(frozen=True, kw_only=True)
class Npz(DropClients, ChannelNormalisation):
    """One .npz file with the arrays images, labels, client and is_test of equal length.

    They are unpacked once into the cache, from which images are read when they are needed.
    """

    file: str = option(help="path of the .npz file")
    num_classes: int | None = option(None, low=1, help="number of classes; null: the highest label plus 1")

    default_partition: ClassVar[str] = "natural"
    channels: ClassVar[int | None] = None

    def load(self) -> Dataset:
        """Return the examples of the file without those of `drop_clients`; `client` keeps the file's numbers.

        Raises:
            UsageError: The file is missing, truncated or not an .npz, or an array is missing or of a wrong kind.
        """
        path = absolute(self.file)
        if not path.is_file():
            needed, where = ", ".join(EXPECTED), looked_in(self.file)
            raise UsageError(f"data.file={self.file}: no such file{where}; expected an .npz file with {needed}")
        key = {"version": VERSION, "files": files_hash(path.parent, [path.name])}
        arrays = cached_arrays("npz", key, lambda: _read(self.file))
        images, labels, client = arrays["images"], arrays["labels"], arrays["client"].astype(np.int64)
        rows = self.remaining_rows(client, path)
        channels = images.shape[1] if images.dtype == np.uint8 else 1
        where, num_classes = f"data.file={self.file}: labels", self.num_classes
        if labels.ndim == 1 and labels.dtype.kind == "i":  # of all clients, so that dropping one keeps the classes
            num_classes = count_classes(where, [labels], "data.num_classes", num_classes)
        return Dataset.of(
            path.stem,
            select_rows(images, rows),
            labels[rows],
            is_test=arrays["is_test"][rows],
            num_classes=num_classes,
            index=rows,
            client=client[rows],
            **self.normalisation(channels),
        )


def _read(file: str) -> Arrays:
    """Return the four arrays of a file, images as uint8 [N, channels, height, width] or float32 [N, ...]."""
    where = f"data.file={file}"
    with readable(where, f"an .npz file with {', '.join(EXPECTED)}"):
        with np.load(absolute(file), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in EXPECTED}
        images = arrays["images"]
    as_images = images.dtype == np.uint8 and images.ndim in (3, 4)
    if not as_images and not (images.dtype.kind == "f" and images.ndim >= 2):
        form = f"{images.dtype} {list(images.shape)}"
        raise UsageError(f"{where}: images is {form}; expected {EXPECTED['images']}")
    check_channels_first(f"{where}: images", images.shape, images.dtype)
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1 or not len(images):
        lengths = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UsageError(f"{where}: arrays of different or no length ({lengths}); expected one length for all")
    arrays["labels"] = targets(f"{where}: labels", arrays["labels"])
    if as_images:
        return arrays | {"images": images[:, None] if images.ndim == 3 else images}
    floats = model_inputs(f"{where}: images", images)
    if not_finite(floats):
        raise UsageError(f"{where}: images has values that are not finite; expected {EXPECTED['images']}")
    return arrays | {"images": floats}
