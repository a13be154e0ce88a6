"""Datasets of the Hugging Face hub, from a folder on disk and without the package `datasets`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.readers import tables
from rayfed.data.readers.columns import TEST
from rayfed.data.readers.hub_folders import tables_by_split
from rayfed.data.readers.labelled_table import LabelledTable


@dataclass(frozen=True, kw_only=True)
class HuggingFace(LabelledTable):
    """A folder with a labelled dataset of the hub, read by pyarrow; nothing is fetched.

    `folder` is what `datasets.Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, a copy of the dataset's
    repository with its Parquet files (`hf download … --repo-type dataset`), or its folder in the cache of
    huggingface_hub (`datasets--owner--name`) or of datasets. Licences are those of the datasets; see their pages.

    Columns are used as in `parquet`. The split called test holds the test examples, all others are for training; many
    datasets with clients or domains have no such split, so a quarter of each is for testing by default, and
    `partition.test=null` takes the split.
    """

    folder: str = option(help="the folder")
    splits: list[str] | None = option(None, help="splits to read; null: all")

    @property
    def partition_defaults(self) -> dict[str, Any]:
        return {} if self.default_partition == "iid" else {"test": 0.25}

    def load(self) -> Dataset:
        """The rows of all splits, training first; `source` is the split and `index` the row in it.

        Raises:
            UsageError: a folder of another form, files that are missing or damaged, columns as in `parquet`.
        """
        folder = Path(self.folder).expanduser()
        found = tables_by_split(folder)
        for split in self.splits or []:
            if split not in found:
                raise UsageError(f"data.splits={self.splits}: {folder} has {', '.join(found)}")
        splits = sorted(self.splits or found, key=lambda split: (split in TEST, split))
        files = [path for split in splits for path in found[split]]
        counts = [sum(len(tables.read(path, [self.label])) for path in found[split]) for split in splits]
        source = np.repeat(np.arange(len(splits), dtype=np.int8), counts)
        is_test = np.isin(source, [number for number, split in enumerate(splits) if split in TEST])
        name = folder.name.removeprefix("datasets--").rpartition("--")[2]
        return self.dataset(name, files, source, tuple(splits), is_test)
