"""Digits-5: MNIST, SVHN, USPS, SynthDigits and MNIST-M."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.cache import array_hash, memory_mapped
from rayfed.data.dataset import Dataset
from rayfed.data.domain_sampling import DomainSampling, SampledRows
from rayfed.data.readers import mnist_m_files
from rayfed.data.readers.array_files import ArrayFiles
from rayfed.data.readers.class_folders import image_files
from rayfed.data.readers.dataset_paths import ROOT_HELP, datasets_folder, find_dataset_folder
from rayfed.data.readers.decoding import files_hash, resize_image, run_in_threads
from rayfed.data.sets.digit_formats import COMMON_FORMATS, FOLDERS, FORMATS, PUBLISHED, URLS, idx_files

VERSION = 1  # raise it when the pixels change
MADE = "mnist_m"


@dataclass(frozen=True, kw_only=True)
class Digits5(DomainSampling):
    """Digits-5: ten digits in five domains, in colour; each domain in a folder, in the first of these forms.

    MNIST (LeCun et al. 1998; 70,000): `MNIST/raw/` as for data.name=mnist. SVHN (Netzer et al. 2011; 99,289; for
    non-commercial use): `SVHN/train_32x32.mat` (md5 e26dedcc434d2e4c54c9b2d4a06d8373) and `test_32x32.mat`
    (eb5a983be6a315427106f1b164d9cef3). USPS (Hull 1994; 9,298): `USPS/usps.bz2` (ec16c51db3855ca6c91edd34d0e9b197) and
    `usps.t.bz2` (8ea070ee2aca1ac39742fdd1ef5ed118). SynthDigits (Ganin and Lempitsky 2015; 488,953):
    `SynthDigits/synth_train_32x32.mat` and `synth_test_32x32.mat`. MNIST-M (Ganin et al. 2016): `MNIST_M/` with
    `mnist_m_train.pt` and `mnist_m_test.pt` (archives: 191ed53db9933bd85cc9700558847391 and
    e11cb4d7fff76d7ec588b1134907db59), or Ganin's `mnist_m_train/`, `mnist_m_train_labels.txt`, … (68,002), or FedBN's
    `mnistm_data.pkl`; without the folder, and with `photographs`, it is made from MNIST.

    MNIST-M shows MNIST's digits. Where it is made here, both domains are tested on the same digits. The published
    files do not say which digit is which, so that a random split tests MNIST-M on digits that MNIST trains on, and the
    reverse: with both domains choose split=published, whose test digits are t10k's.

    Any domain may instead be FedBN's `train.pkl` and `test.pkl`, or `partitions/train_part0.pkl` … `9` and `test.pkl`,
    or images in `train/0/` … `test/9/`.

    ADCOL (section 5.1): the defaults and per_party=smallest. FRAug (section 4): domains=[mnist,mnist_m,svhn,usps],
    size=32, test=0.1, share=0.01, ImageNet's mean and std. FedBN: its files and split=published.
    """

    name: ClassVar[str] = "digits5"
    default_partition: ClassVar[str] = "domains"

    root: str | None = option(None, help=ROOT_HELP)
    size: int = option(28, choices=(28, 32), help="side of the images, to which they are shrunk or enlarged")
    split: str = option("random", choices=("random", "published"), help="pooled and drawn, or that of the files")
    photographs: str | None = option(None, help="folder of photographs (.jpg, .png) to make MNIST-M from MNIST with")

    def available_domains(self) -> tuple[str, ...]:
        return tuple(FORMATS)

    def load(self) -> Dataset:
        """The images that are kept, one domain after the other; `source` is the domain, `index` the row in its files.

        Raises:
            UsageError: files that are missing, empty or damaged, or an option that does not fit.
        """
        domains = self.selected_domains()
        files = {name: self._files(name) for name in domains}
        flags = {name: found.is_test for name, found in files.items()} if self.split == "published" else None
        made_of = {MADE: "mnist"} if MADE in domains and self._makes(MADE) else {}
        kept = self.sample({name: len(found.labels) for name, found in files.items()}, flags, made_of)
        code = np.repeat(np.arange(len(domains), dtype=np.int16), [len(part.rows) for part in kept.values()])
        return Dataset.of(
            self.name,
            self._images(files, kept),
            np.concatenate([files[name].labels[part.rows] for name, part in kept.items()]),
            is_test=np.concatenate([part.is_test for part in kept.values()]),
            num_classes=10,
            domain=code,
            domains=domains,
            source=code,
            sources=domains,
            index=np.concatenate([part.rows for part in kept.values()]),
            leakage_group=_originals(kept, made_of),
            ood=tuple(self.held_out),
            **self.normalisation(),
        )

    def _images(self, files: dict[str, ArrayFiles], kept: dict[str, SampledRows]) -> np.ndarray:
        """uint8 [n, 3, size, size]."""

        def fill(out: np.ndarray) -> None:
            start = 0
            for name, part in kept.items():
                raw = files[name].read().images
                place = out[start : start + len(part.rows)]

                def one(row: int, raw=raw, rows=part.rows, place=place) -> None:
                    place[row] = resize_image(Image.fromarray(raw[rows[row]]).convert("RGB"), self.size)

                run_in_threads(one, len(place), f"{self.name}, {name}: images resized, once")
                start += len(place)

        key = {
            "version": VERSION,
            "files": [found.key for found in files.values()],
            "rows": array_hash(*(part.rows for part in kept.values())),
        }
        count = sum(len(part.rows) for part in kept.values())
        return memory_mapped(self.name, key, (count, 3, self.size, self.size), "uint8", fill)

    def _files(self, domain: str) -> ArrayFiles:
        if self.photographs and self._makes(domain):
            return self._made(self.photographs)
        forms = (*FORMATS[domain], *COMMON_FORMATS)
        expected = f"{' and '.join(forms[0].needs)}, or another of the forms in docs/data.md"
        folder = find_dataset_folder(self.root, (FOLDERS[domain],), expected=expected, source=URLS[domain])
        found = [form for form in forms if all((folder / file).exists() for file in form.needs)]
        if not found:
            missing = [file for file in forms[0].needs if not (folder / file).exists()]
            raise UsageError(f"{folder}: no {' and no '.join(missing)}; expected {expected}; from {URLS[domain]}")
        form = found[0]
        names = form.files(folder) if form.files else list(form.needs)
        read = functools.partial(form.read, folder, names)
        return ArrayFiles(f"{self.name}-{domain}", folder, names, read, published=PUBLISHED.get(domain))

    def _makes(self, domain: str) -> bool:
        """Whether the domain is made here, from MNIST."""
        return domain == MADE and bool(self.photographs) and not (datasets_folder(self.root) / FOLDERS[domain]).is_dir()

    def _made(self, photographs: str) -> ArrayFiles:
        expected = "raw with the IDX files"
        folder = find_dataset_folder(self.root, (FOLDERS["mnist"],), expected=expected, source=URLS["mnist"])
        pictures = Path(photographs).expanduser()
        known = files_hash(pictures, image_files(pictures)) if pictures.is_dir() else ""
        read = functools.partial(mnist_m_files.build, folder, photographs)
        return ArrayFiles(f"{self.name}-made", folder, idx_files(folder), read, known, PUBLISHED["mnist"])


def _originals(kept: dict[str, SampledRows], made_of: dict[str, str]) -> np.ndarray | None:
    """A number for each original: its row in the files of the domain that shows it first."""
    if not set(made_of.values()) <= set(kept) or not made_of:
        return None
    firsts = {name: place << 32 for place, name in enumerate(kept)}
    return np.concatenate([part.rows + firsts[made_of.get(name, name)] for name, part in kept.items()])
