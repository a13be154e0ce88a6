"""A user's own data in one .npz file, each example with the client that it belongs to."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfed.data.cache import UNREADABLE
from rayfed.data.colour import per_channel
from rayfed.data.dataset import Dataset
from rayfed.data.drop_clients import DropClients
from rayfed.errors import UsageError
from rayfed.options import option

EXPECTED = {
    "images": "uint8 [N, height, width] or [N, channels, height, width], or floats [N, ...]",
    "labels": "whole numbers [N], from 0",
    "client": "whole numbers [N], from 0",
    "is_test": "true or false [N]",
}


@dataclass(frozen=True, kw_only=True)
class Npz(DropClients):
    """One .npz file with the arrays images, labels, client and is_test, all of one length."""

    file: str = option(help="the .npz file")
    mean: list[float] = option([0.5], help="subtracted from uint8 images in [0, 1]; one number, or one per channel")
    std: list[float] = option([0.5], above=0, help="uint8 images are divided by it; one number, or one per channel")

    default_partition: ClassVar[str] = "natural"

    def load(self) -> Dataset:
        """The file's examples without those of `drop_clients`; `client` keeps the file's numbers.

        Raises:
            UsageError: a file that is missing, cut short or no .npz; an array that is missing or of a wrong kind.
        """
        path = Path(self.file).expanduser()
        arrays = read(path)
        images, client = arrays["images"], arrays["client"].astype(np.int64)
        kept = self.kept(client, path)
        channels = images.shape[1] if images.dtype == np.uint8 else 1
        return Dataset.of(
            path.stem,
            images[kept],
            arrays["labels"][kept].astype(np.int64),
            is_test=arrays["is_test"][kept],
            num_classes=int(arrays["labels"].max()) + 1,  # of the whole file: dropping a client keeps the classes
            index=kept,
            client=client[kept],
            mean=per_channel(self.mean, channels, where="data.mean"),
            std=per_channel(self.std, channels, where="data.std"),
        )


def read(path: Path) -> dict[str, np.ndarray]:
    """The four arrays of `path`, checked; images gain a channel axis where uint8 [N, height, width]."""
    if not path.is_file():
        raise UsageError(f"data.file={path}: no such file; expected an .npz with {', '.join(EXPECTED)}")
    name = "the archive"
    try:
        stored = np.load(path, allow_pickle=False)
        if isinstance(stored, np.ndarray):
            raise UsageError(f"data.file={path}: a single array; expected an .npz with {', '.join(EXPECTED)}")
        with stored:
            for name in EXPECTED:
                if name not in stored.files:
                    found, needed = ", ".join(stored.files) or "nothing", ", ".join(EXPECTED)
                    raise UsageError(f"data.file={path}: no array {name!r} (found: {found}); needs {needed}")
            arrays = {}
            for name in EXPECTED:
                arrays[name] = stored[name]
    except UsageError:
        raise
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"data.file={path}: cannot read {name}: cut short, damaged or no .npz ({reason})") from error
    _check(path, arrays)
    if arrays["images"].dtype == np.uint8:
        arrays["images"] = arrays["images"].reshape(len(arrays["images"]), -1, *arrays["images"].shape[-2:])
    else:
        arrays["images"] = arrays["images"].astype(np.float32)
    return arrays


def _check(path: Path, arrays: dict[str, np.ndarray]) -> None:
    images = arrays["images"]
    fits = {name: arrays[name].dtype.kind in "iu" and arrays[name].ndim == 1 for name in ("labels", "client")}
    fits["is_test"] = arrays["is_test"].dtype == bool and arrays["is_test"].ndim == 1
    as_images = images.dtype == np.uint8 and images.ndim in (3, 4)
    fits["images"] = as_images or (images.dtype.kind == "f" and images.ndim >= 2)
    for name, fit in fits.items():
        if not fit:
            found = f"{arrays[name].dtype} {list(arrays[name].shape)}"
            raise UsageError(f"data.file={path}: {name} is {found}; expected {EXPECTED[name]}")
    if as_images and images.ndim == 4 and images.shape[1] > 4 and images.shape[3] <= 4:
        found = f"uint8 {list(images.shape)}, channels last"
        raise UsageError(f"data.file={path}: images is {found}; expected {EXPECTED['images']}")
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1 or not len(images):
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UsageError(f"data.file={path}: arrays of different or no length ({found}); expected one length for all")
    for name in ("labels", "client"):
        if arrays[name].min() < 0:
            raise UsageError(f"data.file={path}: {name} has {arrays[name].min()}; expected {EXPECTED[name]}")
    if not np.isfinite(images).all():
        raise UsageError(f"data.file={path}: images has values that are not finite; expected {EXPECTED['images']}")
