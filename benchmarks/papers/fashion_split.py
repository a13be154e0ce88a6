"""Write the 20-client split of Fashion-MNIST that DBE's authors publish as a partition file, as the one beside it.

    python benchmarks/papers/fashion_split.py PUBLISHED.npz PARTITION.parquet

PUBLISHED.npz has the arrays images, labels, client and is_test of the authors' files. Client 12's training part, the
largest, may be absent, as in some copies of their repository: it is what nobody else has. The four files of
Fashion-MNIST are read from RAYFED_DATA.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow
from pyarrow import parquet

from rayfed.core.errors import UsageError
from rayfed.data.sets.mnist import SOURCES, FashionMnist

INCOMPLETE = 12
IMAGES, OF_CLASS_9 = 8551, 6765  # of client 12, in the authors' config.json


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 written, 2 refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", help="the .npz to read")
    parser.add_argument("partition", help="the Parquet file to write")
    args = parser.parse_args(argv)
    try:
        images, labels, source, index = FashionMnist().pool()
        with np.load(args.published) as stored:
            client, is_test = holders(images, labels, stored)
        _check(labels[client == INCOMPLETE])
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    columns = {
        "client": client.astype(np.int8),
        "split": np.where(is_test, "test", "train"),
        "source": np.array(SOURCES)[source],
        "index": index.astype(np.int32),
    }
    encodings = {"index": "DELTA_BINARY_PACKED"}  # a sixth of the size
    few = ["client", "split", "source"]
    table = pyarrow.table(columns)
    parquet.write_table(table, args.partition, compression="zstd", use_dictionary=few, column_encoding=encodings)
    return 0


def holders(
    images: np.ndarray, labels: np.ndarray, published: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the client of each image and whether it is for testing; client 12 trains on all that is not published.

    Raises:
        UsageError: Two images are the same, or a published one is not among them or has another label.
    """
    row = {image.tobytes(): number for number, image in enumerate(images)}
    rows = np.array([row.get(image.tobytes(), -1) for image in published["images"]])
    if len(row) < len(images) or len(set(rows.tolist()) - {-1}) < (rows >= 0).sum():
        raise UsageError("some images are the same, so that it is open who has which")
    if (rows < 0).any() or (labels[rows] != published["labels"]).any():
        raise UsageError("some published images are not in the files of Fashion-MNIST, or have another label there")
    client, is_test = np.full(len(images), INCOMPLETE), np.zeros(len(images), dtype=bool)
    client[rows], is_test[rows] = published["client"], published["is_test"]
    return client, is_test


def _check(labels: np.ndarray) -> None:
    """Raise a `UsageError` if client 12 has not the number of images and of those of class 9 that the authors state."""
    counts = len(labels), int((labels == 9).sum())
    if counts != (IMAGES, OF_CLASS_9):
        raise UsageError(
            f"client {INCOMPLETE} would have {counts[0]} images, {counts[1]} of them of class 9; "
            f"expected {IMAGES} and {OF_CLASS_9}"
        )


if __name__ == "__main__":
    sys.exit(main())
