"""Digits-5: MNIST, SVHN, USPS, SynthDigits and MNIST-M."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.cache import array_hash, memory_mapped
from rayfed.data.dataset import Dataset
from rayfed.data.domain_sampling import DomainSampling, SampledRows
from rayfed.data.draws import numpy_generator
from rayfed.data.published import Published, obtain, sources
from rayfed.data.readers.array_files import Arrays, join_splits, read_once
from rayfed.data.readers.decoding import resize_image, run_in_threads
from rayfed.data.readers.digit_files import COMMON_FORMATS, FORMATS, SIDES
from rayfed.data.sets.mnist import Mnist
from rayfed.data.sets.mnist_m import blended, load_photographs

VERSION = 1  # raise it when the pixels change
GENERATED = "mnist_m"
PUBLISHED = {"svhn": "SVHN", "usps": "USPS"}  # torchvision's classes, which list the checksums


@dataclass(frozen=True, kw_only=True)
class Digits5(Published, DomainSampling):
    """Digits-5: ten digits in five domains, in colour. Each domain has a folder with files in one of these formats.

    MNIST (LeCun et al. 1998; 70,000): `MNIST/raw/` as for data.name=mnist. SVHN (Netzer et al. 2011; 99,289; for
    non-commercial use): `SVHN/train_32x32.mat` (md5 e26dedcc434d2e4c54c9b2d4a06d8373) and `test_32x32.mat`
    (eb5a983be6a315427106f1b164d9cef3). USPS (Hull 1994; 9,298): `USPS/usps.bz2` (ec16c51db3855ca6c91edd34d0e9b197) and
    `usps.t.bz2` (8ea070ee2aca1ac39742fdd1ef5ed118). SynthDigits (Ganin and Lempitsky 2015; 488,953):
    `SynthDigits/synth_train_32x32.mat` and `synth_test_32x32.mat`. MNIST-M (Ganin et al. 2016): `MNIST_M/` with
    `mnist_m_train.pt` and `mnist_m_test.pt` (archives: 191ed53db9933bd85cc9700558847391 and
    e11cb4d7fff76d7ec588b1134907db59), or Ganin's `mnist_m_train/`, `mnist_m_train_labels.txt`, … (68,002), or FedBN's
    `mnistm_data.pkl`; without the folder, and with `photographs`, it is generated from MNIST.

    MNIST-M shows MNIST's digits. If it is generated here, both domains are tested on the same digits. The published
    files do not identify the digits, so a random split tests MNIST-M on digits that MNIST trains on, and vice versa:
    with both domains use split=published, whose test digits are those of t10k.

    Any domain may instead consist of FedBN's `train.pkl` and `test.pkl`, of `partitions/train_part0.pkl` … `9` and
    `test.pkl`, or of images in `train/0/` … `test/9/`.

    ADCOL (section 5.1): the defaults and per_party=smallest. FRAug (section 4): domains=[mnist,mnist_m,svhn,usps],
    size=32, test=0.1, share=0.01, ImageNet's mean and std. FedBN: its files and split=published.
    """

    name: ClassVar[str] = "digits5"
    default_partition: ClassVar[str] = "domains"

    size: int = option(28, choices=(28, 32), help="side to which images are resized")
    split: str = option("random", choices=("random", "published"), help="random split, or that of the files")
    photographs: str | None = option(None, help="folder of photographs (.jpg, .png) to generate MNIST-M from")

    def available_domains(self) -> tuple[str, ...]:
        return tuple(FORMATS)

    def load(self) -> Dataset:
        """Return the images that are kept, by domain; `source` is the domain, `index` the row in its files.

        Raises:
            UsageError: Files are missing, empty or damaged, or an option does not match them.
        """
        domains = self.selected_domains()
        arrays = {name: self._arrays(name) for name in domains}
        published = {name: part.is_test for name, part in arrays.items()} if self.split == "published" else None
        made_of = {GENERATED: "mnist"} if GENERATED in domains and self._generates(GENERATED) else {}
        kept = self.sample({name: len(part.labels) for name, part in arrays.items()}, published, made_of)
        code = np.repeat(np.arange(len(domains), dtype=np.int16), [len(part.rows) for part in kept.values()])
        return Dataset.of(
            self.name,
            self._images(arrays, kept),
            np.concatenate([arrays[name].labels[part.rows] for name, part in kept.items()]),
            is_test=np.concatenate([part.is_test for part in kept.values()]),
            num_classes=10,
            domain=code,
            domains=domains,
            source=code,
            sources=domains,
            index=np.concatenate([part.rows for part in kept.values()]),
            leakage_group=_leakage_groups(kept, made_of),
            ood=self.left_out,
            **self.normalisation(),
        )

    def _images(self, arrays: dict[str, Arrays], kept: dict[str, SampledRows]) -> np.ndarray:
        """Return the resized images, uint8 [n, 3, size, size]."""

        def fill(out: np.ndarray) -> None:
            start = 0
            for name, part in kept.items():
                target = out[start : start + len(part.rows)]

                def resize(
                    row: int, raw: Any = arrays[name].images, rows: Any = part.rows, target: Any = target
                ) -> None:
                    target[row] = resize_image(Image.fromarray(raw[rows[row]]).convert("RGB"), self.size)

                run_in_threads(resize, len(target), f"{self.name}, {name}: resizing images (only once)")
                start += len(target)

        key = {
            "version": VERSION,
            "files": [part.key for part in arrays.values()],
            "rows": array_hash(*(part.rows for part in kept.values())),
        }
        count = sum(len(part.rows) for part in kept.values())
        return memory_mapped(self.name, key, (count, 3, self.size, self.size), "uint8", fill)

    def _arrays(self, domain: str) -> Arrays:
        """Return all images and labels of a domain, in the first of its formats that exists."""
        if domain == GENERATED and self._generates(domain):
            return self._generated()
        source = sources()[_source(domain)]
        folder, formats = self.find(source.name), (*FORMATS[domain], *COMMON_FORMATS)
        if domain == "mnist" and (folder / "raw").is_dir():
            return Mnist(root=self.root, download=self.download).files()
        usable = [form for form in formats if all((folder / file).exists() for file in form.required)]
        if not usable:
            if self.download and source.missing(folder):
                obtain(source, folder)
                return self._arrays(domain)
            missing = " and no ".join(file for file in _first_files(domain) if not (folder / file).exists())
            raise UsageError(f"{folder}: no {missing}; expected {source.expected}; from {source.page}")
        form = usable[0]

        def read() -> Arrays:
            sides = zip(SIDES, (form.train, form.test), strict=True)
            return join_splits(*([form.read(folder / file, side) for file in files] for side, files in sides))

        published = PUBLISHED.get(domain)
        return read_once(f"{self.name}-{domain}", folder, form.files(folder), read, published=published)

    def _generates(self, domain: str) -> bool:
        """Return whether the domain is generated from MNIST."""
        return bool(self.photographs) and not sources()[_source(domain)].present(self.root)

    def _generated(self) -> Arrays:
        """Return MNIST-M as |photograph − digit| (Ganin et al. 2016), in MNIST's order, with random patches."""
        digits, pictures = self._arrays("mnist"), load_photographs(self.photographs)

        def fill(out: np.ndarray) -> None:
            picture, top, left = numpy_generator(0).random((3, len(out)))
            out[:] = blended(digits.images[:, None], pictures, picture, top, left).transpose(0, 2, 3, 1)

        key = digits.key + array_hash(*pictures)
        shape = (*digits.images.shape, 3)
        images = memory_mapped(f"{self.name}-made", {"version": VERSION, "made of": key}, shape, "uint8", fill)
        return digits._replace(images=images, key=key)


def _first_files(domain: str) -> tuple[str, ...]:
    """Return the files of the first format of a domain."""
    return FORMATS[domain][0].required if FORMATS[domain] else ("raw",)


def _source(domain: str) -> str:
    """Return the source of a domain; the dataset mnist_m is another one, which is made of MNIST."""
    return "published_mnist_m" if domain == GENERATED else domain


def _leakage_groups(kept: dict[str, SampledRows], made_of: dict[str, str]) -> np.ndarray | None:
    """Return the leakage groups if a domain is made of another: the rows in the original domain's files."""
    if not set(made_of.values()) <= set(kept) or not made_of:
        return None
    offsets = {name: position << 32 for position, name in enumerate(kept)}
    return np.concatenate([part.rows + offsets[made_of.get(name, name)] for name, part in kept.items()])
