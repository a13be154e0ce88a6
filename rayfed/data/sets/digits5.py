"""Digits-5: MNIST, SVHN, USPS, SynthDigits and MNIST-M, and the files in which they come."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from rayfed.core.options import option
from rayfed.core.rng import numpy_generator
from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import DomainSampling, SampledRows
from rayfed.data.on_disk import array_hash, memory_mapped
from rayfed.data.published import Published, sources
from rayfed.data.readers.array_files import Arrays, join_splits, read_once, validated_arrays
from rayfed.data.readers.decoding import resize_image, run_in_threads
from rayfed.data.readers.files import readable
from rayfed.data.sets.mnist import Mnist
from rayfed.data.sets.mnist_m import blended, load_photographs

VERSION = 1  # raise it when the pixels change


@dataclass(frozen=True, kw_only=True)
class Digits5(Published, DomainSampling):
    """Digits-5: ten digits in five domains, in colour. Each domain has a folder of its own.

    MNIST (LeCun et al. 1998; 70,000): `MNIST/raw/` as for data.name=mnist. SVHN (Netzer et al. 2011; 99,289; for
    non-commercial use): `SVHN/train_32x32.mat` and `test_32x32.mat`. USPS (Hull 1994; 9,298): `USPS/usps.bz2` and
    `usps.t.bz2`. SynthDigits (Ganin and Lempitsky 2015; 488,953): `SynthDigits/synth_train_32x32.mat` and
    `synth_test_32x32.mat`. MNIST-M (Ganin et al. 2016): `MNIST_M/mnist_m_train.pt` and `mnist_m_test.pt`;
    without the folder, and with `photographs`, it is generated from MNIST.

    MNIST-M shows MNIST's digits. If it is generated here, both domains are tested on the same digits. The published
    files do not identify the digits, so a random split tests MNIST-M on digits that MNIST trains on, and vice versa:
    with both domains use split=published, whose test digits are those of t10k.

    ADCOL (section 5.1): the defaults and per_party=smallest. FRAug (section 4): domains=[mnist,mnist_m,svhn,usps],
    size=32, test=0.1, share=0.01, ImageNet's mean and std.
    """

    name: ClassVar[str] = "digits5"
    default_partition: ClassVar[str] = "domains"

    size: int = option(28, choices=(28, 32), help="side to which images are resized")
    split: str = option("random", choices=("random", "published"), help="random split, or that of the files")
    photographs: str | None = option(None, help="folder of photographs (.jpg, .png) to generate MNIST-M from")

    def available_domains(self) -> tuple[str, ...]:
        return DOMAINS

    def load(self) -> Dataset:
        """Return the images that are kept, by domain; `source` is the domain, `index` the row in its files."""
        domains = self.selected_domains()
        arrays = {name: self._arrays(name) for name in domains}
        published = None
        if self.split == "published":
            published = {name: part.is_test for name, part in arrays.items()}
        if "mnist_m" in domains and self._generates_mnist_m():
            made_of = {"mnist_m": "mnist"}
        else:
            made_of = {}
        sizes = {}
        for name, part in arrays.items():
            sizes[name] = len(part.labels)
        kept = self.sample(sizes, published, made_of)
        parts = list(kept.values())
        counts = [len(part.rows) for part in parts]
        code = np.repeat(np.arange(len(domains), dtype=np.int16), counts)
        labels = [arrays[name].labels[part.rows] for name, part in kept.items()]
        return Dataset.of(
            self.name,
            self._images(arrays, kept),
            np.concatenate(labels),
            is_test=np.concatenate([part.is_test for part in parts]),
            num_classes=10,
            domain=code,
            domains=domains,
            source=code,
            sources=domains,
            index=np.concatenate([part.rows for part in parts]),
            leakage_group=_leakage_groups(kept, made_of),
            ood=self.left_out,
            **self.normalisation(3),
        )

    def _images(self, arrays: dict[str, Arrays], kept: dict[str, SampledRows]) -> np.ndarray:
        """Return the resized images, uint8 [n, 3, size, size]."""

        def fill(out: np.ndarray) -> None:
            start = 0
            for name, part in kept.items():
                target = out[start : start + len(part.rows)]

                def resize(row: int, raw: Any = arrays[name].images, rows: Any = part.rows, out: Any = target) -> None:
                    image = Image.fromarray(raw[rows[row]]).convert("RGB")
                    out[row] = resize_image(image, self.size)

                what = f"{self.name}, {name}: resizing images (only once)"
                run_in_threads(resize, len(target), what)
                start += len(target)

        rows_hash = array_hash(*(part.rows for part in kept.values()))
        key = {
            "version": VERSION,
            "files": [part.key for part in arrays.values()],
            "rows": rows_hash,
        }
        count = sum(len(part.rows) for part in kept.values())
        shape = (count, 3, self.size, self.size)
        return memory_mapped(self.name, key, shape, "uint8", fill)

    def _arrays(self, domain: str) -> Arrays:
        """Return all images and labels of a domain."""
        if domain == "mnist":
            return Mnist(root=self.root, download=self.download).files()
        if domain == "mnist_m" and self._generates_mnist_m():
            return self._generated()
        name = domain
        if domain == "mnist_m":
            name = "published_mnist_m"
        source = sources()[name]
        files, read_side = FILES[domain]
        folder = self.find(source.name, files)

        def read() -> Arrays:
            sides = []
            for file, side in zip(files, SIDES, strict=True):
                path = folder / file
                sides.append([read_side(path, side)])
            return join_splits(*sides)

        return read_once(f"{self.name}-{domain}", source, folder, files, read)

    def _generates_mnist_m(self) -> bool:
        published = sources()["published_mnist_m"]
        return bool(self.photographs) and not published.present(self.root)

    def _generated(self) -> Arrays:
        """Return MNIST-M as |photograph − digit| (Ganin et al. 2016), in MNIST's order, with random patches."""
        digits = self._arrays("mnist")
        pictures = load_photographs(self.photographs)

        def fill(out: np.ndarray) -> None:
            picture, top, left = numpy_generator(0).random((3, len(out)))
            drawn = blended(digits.images[:, None], pictures, picture, top, left)
            out[:] = drawn.transpose(0, 2, 3, 1)

        key = digits.key + array_hash(*pictures)
        shape = (*digits.images.shape, 3)
        made_of = {"version": VERSION, "made of": key}
        images = memory_mapped(f"{self.name}-made", made_of, shape, "uint8", fill)
        return digits._replace(images=images, key=key)


def _leakage_groups(kept: dict[str, SampledRows], made_of: dict[str, str]) -> np.ndarray | None:
    """Return the leakage groups if a domain is made of another: the rows in the original domain's files."""
    if not made_of or not set(made_of.values()) <= set(kept):
        return None
    offsets = {name: position << 32 for position, name in enumerate(kept)}
    groups = []
    for name, part in kept.items():
        original = made_of.get(name, name)
        groups.append(part.rows + offsets[original])
    return np.concatenate(groups)


SIDES = ("train", "test")


def read_mat(path: Path, side: str) -> Arrays:
    """Read a .mat file of SVHN or SynthDigits with X [32, 32, 3, n] and y [n, 1]; SVHN labels the digit zero as 10."""
    import scipy.io  # takes half a second

    with readable(path, "a .mat file of X [32, 32, 3, n] and y [n, 1]"):
        content = scipy.io.loadmat(path)
        images = np.moveaxis(content["X"], -1, 0)
        labels = content["y"].reshape(-1)
        if (labels % 1 == 0).all():  # they may be floats
            labels = np.where(labels == 10, 0, labels).astype(np.int64)
    return validated_arrays(path, images, labels, (32, 32, 3), 10)


def read_usps(path: Path, side: str) -> Arrays:
    """Read USPS in LIBSVM's text format with bzip2: "label 1:value … 256:value", labels 1..10, values in [-1, 1]."""
    import torchvision  # imported late: takes half a second or more

    with readable(path, "bzip2 with lines of a label 1..10 and 256 values index:value"):
        read = torchvision.datasets.USPS(path.parent, train=side == "train")
    return validated_arrays(path, read.data, read.targets, (16, 16), 10)


def read_mnist_m_tensors(path: Path, side: str) -> Arrays:
    """Read a pair of tensors, images [n, 28, 28, 3] and labels [n], from a .pt file."""
    import torch  # imported late: other datasets need no torch to load

    with readable(path, "a pair of tensors, images and labels, written by torch.save"):
        parts = torch.load(path, map_location="cpu", weights_only=True)
        images, labels = (part.numpy() for part in parts)
    return validated_arrays(path, images, labels, (None, None, 3), 10)


FILES: dict[str, tuple[tuple[str, str], Callable[[Path, str], Arrays]]] = {
    "svhn": (("train_32x32.mat", "test_32x32.mat"), read_mat),
    "usps": (("usps.bz2", "usps.t.bz2"), read_usps),
    "synthdigits": (("synth_train_32x32.mat", "synth_test_32x32.mat"), read_mat),
    "mnist_m": (("mnist_m_train.pt", "mnist_m_test.pt"), read_mnist_m_tensors),
}
"""The training file and the test file of each domain but MNIST, and their reader."""
DOMAINS = ("mnist", *FILES)
