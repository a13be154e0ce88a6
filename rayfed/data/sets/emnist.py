"""EMNIST: handwritten digits and letters from its IDX files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset, index_within_group
from rayfed.data.normalisation import per_channel
from rayfed.data.published import Published
from rayfed.data.readers import idx
from rayfed.data.readers.array_files import Arrays, join_splits, read_once, validated_arrays

SIDES = ("train", "test")
CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


@dataclass(frozen=True, kw_only=True)
class Emnist(Published):
    """EMNIST (Cohen et al. 2017): 131,600 grey 28 x 28 images of 47 digits and letters in `split=balanced`.

    `<root>/EMNIST/gzip` has the files of NIST's gzip.zip, such as `emnist-balanced-train-images-idx3-ubyte.gz`, or
    `EMNIST/raw` has them unpacked, as torchvision does. NIST states no licence. The files hold the images transposed;
    here they stand upright. Other splits are byclass (814,255 images, 62 classes), bymerge, letters, digits and mnist.
    """

    split: str = option("balanced", choices=tuple(CLASSES), help="EMNIST's subset")
    mean: list[float] = option([0.5], help="subtracted from images in [0, 1]")
    std: list[float] = option([0.5], above=0, help="images are divided by it")

    name: ClassVar[str] = "emnist"
    default_partition: ClassVar[str] = "dirichlet"

    def load(self) -> Dataset:
        """Return all images; `is_test` marks those of test, `source` is train or test, `index` the row in that file.

        Raises:
            UsageError: Files are missing, damaged or of another kind.
        """
        folder = self.find("emnist")
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        files = [_present(folder, f"emnist-{self.split}-{side}-{kind}") for side in SIDES for kind in kinds]

        def read() -> Arrays:
            return join_splits(*([self._read(folder / files[row], folder / files[row + 1])] for row in (0, 2)))

        arrays = read_once(f"{self.name}-{self.split}", folder, files, read)
        source = arrays.is_test.astype(np.int8)
        return Dataset.of(
            self.name,
            arrays.images[:, None],
            arrays.labels,
            is_test=arrays.is_test,
            num_classes=CLASSES[self.split],
            source=source,
            sources=SIDES,
            index=index_within_group(source),
            mean=per_channel(self.mean, 1, where="data.mean"),
            std=per_channel(self.std, 1, where="data.std"),
        )

    def _read(self, images: Path, labels: Path) -> Arrays:
        numbers = idx.read(labels, dimensions=1).astype(np.int64) - (self.split == "letters")  # which count from 1
        pixels = idx.read(images, dimensions=3).swapaxes(1, 2)
        return validated_arrays(labels, pixels, numbers, (28, 28), CLASSES[self.split])


def _present(folder: Path, name: str) -> str:
    """Return where a file is below `folder`."""
    for place in (f"raw/{name}", f"raw/{name}.gz", f"gzip/{name}", f"gzip/{name}.gz"):
        if (folder / place).is_file():
            return place
    raise UsageError(f"{folder}: no {name} in raw or gzip (plain or .gz); expected the files of EMNIST's gzip.zip")
