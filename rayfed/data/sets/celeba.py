"""CelebA: photographs of celebrities, with 40 attributes of each."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas

from rayfed.core.errors import UsageError
from rayfed.core.options import option, suggestion
from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import ChannelNormalisation
from rayfed.data.published import Published
from rayfed.data.readers.decoding import decode_images
from rayfed.data.readers.files import readable

IMAGES = "img_align_celeba"
ATTRIBUTES = "list_attr_celeba.txt"
IDENTITIES = "identity_CelebA.txt"


@dataclass(frozen=True, kw_only=True)
class CelebA(Published, ChannelNormalisation):
    """CelebA (Liu et al. 2015): 202,599 photographs of 10,177 celebrities, and whether each shows an attribute.

    From https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html: `celeba/list_attr_celeba.txt`, `identity_CelebA.txt` and
    `img_align_celeba/000001.jpg`. Non-commercial research only.

    Clients are the celebrities, as in LEAF (Caldas et al. 2018): a class is whether the photograph shows `attribute`
    (by default Smiling), photographs are squares of 84, and celebrities with fewer than five photographs are left out.
    LEAF draws a tenth of each client's photographs for testing.
    """

    name: ClassVar[str] = "celeba"
    default_partition: ClassVar[str] = "natural"
    partition_defaults: ClassVar[dict[str, Any]] = {"test": 0.1}

    attribute: str = option("Smiling", help="the attribute that is the class, such as Smiling, Male or Eyeglasses")
    least: int = option(5, low=1, help="photographs of a celebrity; those with fewer are left out")
    celebrities: int | None = option(None, low=1, help="how many celebrities to use, the first ones; null: all")
    size: int = option(84, low=8, help="side to which photographs are resized")

    def load(self) -> Dataset:
        """Return the photographs of the celebrities that are kept; `client` is the celebrity."""
        folder = self.find("celeba", [ATTRIBUTES, IDENTITIES])
        shows = _attribute(folder / ATTRIBUTES, self.attribute)
        identity = _identities(folder / IDENTITIES)
        unknown = [file for file in shows if file not in identity]
        if unknown:
            raise UsageError(f"{folder / IDENTITIES}: has no line for {unknown[0]}, which {ATTRIBUTES} has")
        kept = self._kept(Counter(identity[file] for file in shows))
        files = []
        clients = []
        for file in shows:
            if identity[file] in kept:
                files.append(file)
                clients.append(kept[identity[file]])
        labels = [int(shows[file]) for file in files]
        paths = [f"{IMAGES}/{file}" for file in files]
        return Dataset.of(
            self.name,
            decode_images(self.name, folder, paths, self.size),
            np.array(labels),
            num_classes=2,
            client=np.array(clients),
            **self.normalisation(3),
        )

    def _kept(self, counts: Counter[int]) -> dict[int, int]:
        """Return the number of the client for each celebrity that is kept."""
        enough = [celebrity for celebrity in sorted(counts) if counts[celebrity] >= self.least]
        if not enough:
            most = max(counts.values())
            raise UsageError(f"data.least={self.least}: no celebrity has as many photographs; the most is {most}")
        return {celebrity: number for number, celebrity in enumerate(enough[: self.celebrities])}


def _attribute(path: Path, name: str) -> dict[str, bool]:
    """Return for each file of the table of attributes whether it shows the attribute."""
    with readable(path, "a count, a line with 40 attributes, and a line of -1 and 1 for each photograph"):
        table = pandas.read_csv(path, sep=r"\s+", skiprows=1)
        if not len(table) or not table.isin([-1, 1]).all(axis=None):
            raise ValueError("values other than -1 and 1")
    if name not in table:
        raise UsageError(f"data.attribute={name}: no such attribute; {suggestion(name, list(table.columns))}")
    return {str(file): value == 1 for file, value in table[name].items()}


def _identities(path: Path) -> dict[str, int]:
    """Return the number of the celebrity of each file."""
    with readable(path, "lines with a photograph and the number of its celebrity"):
        table = pandas.read_csv(path, sep=r"\s+", names=["file", "celebrity"], dtype={"file": str, "celebrity": int})
    return dict(zip(table["file"], table["celebrity"].tolist(), strict=True))
