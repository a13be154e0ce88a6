"""Sources and file formats of each domain of Digits-5."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rayfed.data.readers import digit_files, idx
from rayfed.data.readers.array_files import Arrays
from rayfed.data.sets import mnist_m_files


class FileFormat(NamedTuple):
    """A file format of a domain: required files, reader, and a function that lists all files if there are more."""

    required: tuple[str, ...]
    read: Callable[[Path, list[str]], Arrays]
    files: Callable[[Path], list[str]] | None = None


def idx_files(folder: Path) -> list[str]:
    """Return the IDX files that exist."""
    paths = [idx.find(folder / "raw", file) for file in idx.FILES]
    return [f"raw/{path.name}" for path in paths if path]


COMMON_FORMATS = (
    FileFormat(("train.pkl", "test.pkl"), digit_files.read_fedbn),
    FileFormat((*digit_files.PARTS, "test.pkl"), digit_files.read_fedbn),
    FileFormat(("train", "test"), digit_files.read_folders, digit_files.list_folders),
)
FORMATS = {
    "mnist": (FileFormat(("raw",), digit_files.read_idx, idx_files),),
    "svhn": (FileFormat(("train_32x32.mat", "test_32x32.mat"), digit_files.read_mat),),
    "usps": (FileFormat(("usps.bz2", "usps.t.bz2"), digit_files.read_usps),),
    "synthdigits": (FileFormat(("synth_train_32x32.mat", "synth_test_32x32.mat"), digit_files.read_mat),),
    "mnist_m": (
        FileFormat(("mnist_m_train.pt", "mnist_m_test.pt"), mnist_m_files.read_tensors),
        FileFormat(
            tuple(f"mnist_m_{side}{end}" for side in digit_files.SIDES for end in ("_labels.txt", "")),
            mnist_m_files.read_published,
            mnist_m_files.list_published,
        ),
        FileFormat(("mnistm_data.pkl",), mnist_m_files.read_pickled),
    ),
}
FOLDERS = {"mnist": "MNIST", "svhn": "SVHN", "usps": "USPS", "synthdigits": "SynthDigits", "mnist_m": "MNIST_M"}
PUBLISHED = {"mnist": "MNIST", "svhn": "SVHN", "usps": "USPS"}  # torchvision's classes, which list the checksums
URLS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "svhn": "http://ufldl.stanford.edu/housenumbers/",
    "usps": "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
    "synthdigits": "the links in https://github.com/med-air/FedBN",
    "mnist_m": "https://github.com/liyxi/mnist-m, or set data.photographs to make it from MNIST",
}
