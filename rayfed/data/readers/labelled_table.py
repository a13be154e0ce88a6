"""The options that say which columns of a table are what, and the dataset that its rows make."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset, index_within_group
from rayfed.data.drop_clients import DropClients
from rayfed.data.lazy_rows import as_lazy_rows, select_rows
from rayfed.data.normalisation import per_channel
from rayfed.data.readers import columns, input_columns, tables


@dataclass(frozen=True, kw_only=True)
class LabelledTable(DropClients):
    """Which columns of a table are what; the options of `Parquet` and `HuggingFace`."""

    features: list[str] | None = option(
        None, help="columns of the inputs: one of images or lists, or several of numbers; null: image or img"
    )
    label: str = option("label", help="column of the classes: whole numbers from 0, or texts, numbered by alphabet")
    client: str | None = option(
        None, help="column that says whose a row is: whole numbers, or texts, numbered likewise"
    )
    domain: str | None = option(None, help="column that says of what domain a row is")
    num_classes: int | None = option(None, low=1, help="how many classes; null: what the file says, else what is there")
    size: int | None = option(None, low=1, help="side to which images are brought; null: all are of one size already")
    mean: list[float] = option([0.5], help="subtracted from images in [0, 1]; one number, or one per channel")
    std: list[float] = option([0.5], above=0, help="images are divided by it; one number, or one per channel")

    @property
    def default_partition(self) -> str:
        return "natural" if self.client else "domains" if self.domain else "iid"

    def dataset(
        self, name: str, files: Sequence[Path], source: np.ndarray, sources: tuple[str, ...], is_test
    ) -> Dataset:
        """The rows of `files`, without those of `drop_clients`; source codes and `is_test` are given per row."""
        if self.label in (self.features or ()):
            raise UsageError(
                f"data.features: {self.label} is data.label, which would give the answer away; leave it out"
            )
        features = self.features or self._image_column(files[0])
        for path in files:
            wanted = [self.client, self.domain]
            tables.check_columns(path, [*features, self.label, *(extra for extra in wanted if extra)])
        labels, num_classes = columns.classes(files, self.label, self.num_classes)
        if not len(labels):
            raise UsageError(f"{files[0]}: has no rows; expected at least one")
        extra: dict[str, Any] = {}
        if self.domain:
            domain, names = columns.numbered(files, self.domain)
            extra = {"domain": np.unique(domain, return_inverse=True)[1], "domains": names}
        kept = np.arange(len(labels))
        if self.client:
            client = columns.numbered(files, self.client)[0]
            kept = self.remaining_rows(client, files[0].parent)
            extra["client"] = client
        elif self.drop_clients:
            raise UsageError(f"data.drop_clients={self.drop_clients}: data.client names no column")
        images = input_columns.inputs(name, files, features, len(labels), self.size)
        channels = images.shape[1] if images.dtype == np.uint8 else 1
        per_row = {"source": source, "is_test": is_test} | {
            key: value for key, value in extra.items() if key != "domains"
        }
        whole = len(kept) == len(labels)  # then nothing is copied out of a file of the cache
        return Dataset.of(
            name,
            images if whole else select_rows(as_lazy_rows(images), kept),
            labels[kept],
            num_classes=num_classes,
            sources=sources,
            index=index_within_group(source)[kept],
            mean=per_channel(self.mean, channels, where="data.mean"),
            std=per_channel(self.std, channels, where="data.std"),
            **{key: value[kept] for key, value in per_row.items()},
            **({"domains": extra["domains"]} if "domains" in extra else {}),
        )

    def _image_column(self, path: Path) -> list[str]:
        names = tables.schema(path).names
        found = [name for name in input_columns.IMAGE_COLUMNS if name in names]
        if not found:
            raise UsageError(
                f"{path}: no column image or img; name the inputs with data.features, of {', '.join(names)}"
            )
        return found[:1]
