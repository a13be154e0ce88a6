"""Labelled tables: a user's Parquet and CSV files, local datasets of the Hugging Face hub, and FEMNIST."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option, unquoted
from rayfed.core.paths import absolute, looked_in
from rayfed.data.dataset import Dataset, index_within_group, spread_groups
from rayfed.data.dataset_options import ChannelNormalisation
from rayfed.data.on_disk import as_lazy_rows
from rayfed.data.published import Published
from rayfed.data.readers import columns, tables
from rayfed.data.readers.files import files_below, tell_left_out
from rayfed.data.readers.tables import tables_by_split
from rayfed.data.splits import split_in, split_named


@dataclass(frozen=True, kw_only=True)
class LabelledTable(ChannelNormalisation):
    """Options for the roles of table columns, shared by `Table` and `HuggingFace`."""

    features: list[str] | dict[str, Any] | None = option(
        None,
        help="columns of numbers, or one of images or lists; null: image or img; {name: columns, …}: parts of an "
        "input, which the model takes by keyword",
    )
    label: str | list[str] = option(
        "label",
        help="column of the classes: integers from 0, or strings (numbered alphabetically); or of numbers, lists or "
        "masks; or several columns of labels",
    )
    strata: str | None = option(None, help="column that partitions by class divide by; null: the label")
    client: str | None = option(None, help="column of the clients: integers, or strings (numbered alphabetically)")
    domain: str | None = option(None, help="column of the domains")
    group: str | None = option(
        None,
        help="column of what several rows belong to, such as a patient: all its rows are in one part (train, val or "
        "test), and parts are drawn by its first row",
    )
    num_classes: int | None = option(None, low=1, help="number of classes; null: the file's, else highest label plus 1")
    size: int | None = option(None, low=1, help="side to resize images to; null: they already have one size")
    standardize: str | None = option(
        None,
        choices=("client", "global"),
        help="scale each column of numbers to mean 0 and sd 1 by training rows alone: those of all clients that train "
        "(global), or each client's by its own (client)",
    )

    channels: ClassVar[int | None] = None
    stratified: ClassVar[bool] = True
    """Whether partitions stratify by default; see `Dataset.stratified`."""

    @property
    def _first_label(self) -> str:
        if isinstance(self.label, str):
            return self.label
        return self.label[0]

    def _count_rows(self, files: Sequence[Path]) -> int:
        """Return the number of rows in all of `files`."""
        return sum(len(tables.read(file, [self._first_label])) for file in files)

    @property
    def default_partition(self) -> str:
        if self.client:
            return "natural"
        if self.domain:
            return "domains"
        return "iid"

    def dataset(
        self,
        name: str,
        files: Sequence[Path],
        source: np.ndarray,
        sources: tuple[str, ...],
        is_test: np.ndarray,
        is_val: np.ndarray | None,
    ) -> Dataset:
        """Return the rows of `files`; `source`, `is_test` and `is_val` have one value per row."""
        if isinstance(self.label, str):
            label_columns = [self.label]
        else:
            label_columns = self.label
        parts = self.parts(files[0])
        features = []
        for chosen in parts.values():
            features.extend(chosen)
        for label in set(label_columns) & set(features):
            raise UsageError(f"data.features: {label} is data.label, which would leak the answer; leave it out")
        for path in files:
            optional = [self.client, self.domain, self.strata, self.group]
            named = filter(None, optional)
            tables.check_columns(path, [*features, *label_columns, *named])
        labels, num_classes = columns.labels_of(files, self.label, self.num_classes)
        per_row = {"source": source, "is_test": is_test, "is_val": is_val, "index": index_within_group(source)}
        names: dict[str, Any] = {"class_names": columns.class_names(files, self.label)}
        if self.group:
            per_row["leakage_group"] = self._groups(files, is_test, is_val)
        self._add_owners(files, per_row, names)
        inputs = {}
        for part, x in self.inputs(name, files, parts, len(labels)).items():
            inputs[part] = as_lazy_rows(x)
        images = [x for x in inputs.values() if x.dtype == np.uint8]
        channels = 1
        if images:
            channels = images[0].shape[1]
        return Dataset.of(
            name,
            inputs.get("", inputs),
            labels,
            num_classes=num_classes,
            sources=sources,
            stratified=self.stratified,
            **names,
            **per_row,
            **self.normalisation(channels),
        )

    def _add_owners(self, files: Sequence[Path], per_row: dict[str, Any], names: dict[str, Any]) -> None:
        """Add the domain, the stratum and the client of each row, as far as columns give them, and their names."""
        if self.domain:
            domain, names["domains"] = columns.encode_names(files, self.domain)
            per_row["domain"] = np.unique(domain, return_inverse=True)[1]
        if self.strata:
            strata, _ = columns.encode_names(files, self.strata)
            _, per_row["strata"] = np.unique(strata, return_inverse=True)
        if self.client:
            per_row["client"], names["client_names"] = columns.encode_clients(files, self.client)

    def _groups(self, files: Sequence[Path], is_test: np.ndarray, is_val: np.ndarray | None) -> np.ndarray:
        """Return the group of each row, integers [N] from 0.

        Raises:
            UsageError: The rows of a group are in several splits.
        """
        assert self.group is not None
        numbers, names = columns.encode_names(files, self.group)
        groups = np.unique(numbers, return_inverse=True)[1]
        split = is_test.astype(int)
        if is_val is not None:
            split[is_val] = 2
        spread = spread_groups(groups, split)
        if len(spread):
            splits = np.unique(split[groups == spread[0]])
            found = " and ".join(np.array(["train", "test", "val"])[splits])
            raise UsageError(f"data.group={self.group}: {names[spread[0]]} has rows in {found}; give them one split")
        return np.asarray(groups)

    def parts(self, path: Path) -> dict[str, list[str]]:
        """Return the columns of each part of an input by its name, which is empty for inputs of one array."""
        if not isinstance(self.features, dict):
            names = tables.schema(path).names
            images = [name for name in columns.IMAGE_COLUMNS if name in names][:1]
            if not (self.features or images):
                remedy = f"set data.features to the input columns, from {', '.join(names)}"
                raise UsageError(f"{path}: no column image or img; {remedy}")
            return {"": self.features or images}
        for name in self.features:
            if isinstance(name, bool):
                raise UsageError(f"data.features: an input is called {name!r}{unquoted(name)}")
        parts = {}
        for name, given in self.features.items():
            if isinstance(given, str):
                given = [given]
            parts[str(name)] = given
        return parts

    def inputs(self, name: str, files: Sequence[Path], parts: dict[str, list[str]], rows: int) -> dict[str, Any]:
        """Return the inputs [rows, ...] of each part."""
        sized = [part for part, chosen in parts.items() if columns.holds_images(files[0], chosen)]
        sized = sized or list(parts)
        inputs = {}
        for part, chosen in parts.items():
            size = None
            if part in sized:
                size = self.size
            inputs[part] = columns.read_inputs(name, files, chosen, rows, size)
        return inputs


@dataclass(frozen=True, kw_only=True)
class Table(LabelledTable):
    """A Parquet or CSV file, or all of a folder in the order of their names, as one table of labelled rows.

    A column may be integers in one file and floats in another. Folders such as `site=north` are columns, too, as pandas
    writes them with `partition_cols`.

    A file that ends in .csv or .tsv, or in these and .gz, .bz2 or .xz, is read as CSV: UTF-8, the names of the columns
    in the first line, cells separated by commas, or by semicolons, tabs or | if these give more names. `parquet` and
    `csv` are two names of this reader.

    Images are encoded (PNG, JPEG, …) in a column of bytes or of structs with a field `bytes`. `split` names a column
    that marks test and validation examples; without it, the partition holds out a quarter of each client or domain.
    """

    file: str = option(help="path of the Parquet or CSV file, or of a folder of files of one kind")
    split: str | None = option(
        None, help="column with train, val or test for each row, or with true for test examples and false for others"
    )

    @property
    def partition_defaults(self) -> dict[str, Any]:
        if self.split or self.default_partition == "iid":
            return {}
        return {"test": 0.25}

    def load(self) -> Dataset:
        """Return all rows; `index` counts them across all files.

        Raises:
            UsageError: A file is missing or damaged, or a column is missing, of a wrong type or has empty cells.
        """
        path = absolute(self.file)
        files = [path]
        problem = f"no such file{looked_in(self.file)}"
        if path.is_dir():
            found = files_below(path)
            problem = "a folder without .parquet or .csv files"
            files = []
            for file in found:
                if file.suffix.lower() == ".parquet" or tables.is_csv(file):
                    files.append(file)
            _refuse_two_kinds(self.file, files)
            others = Counter(file.suffix or "without an ending" for file in found if file not in files)
            tell_left_out(path, others)
        if not files or not files[0].is_file():
            raise UsageError(f"data.file={self.file}: {problem}; expected a Parquet or CSV file, or a folder of them")
        size = self._count_rows(files)
        if self.split:
            is_test, is_val = columns.split_rows(files, self.split)
        else:
            is_test = np.zeros(size, bool)
            is_val = None
        source = np.zeros(size, np.int8)
        return self.dataset(path.stem, files, source, ("all",), is_test, is_val)


def _refuse_two_kinds(folder: str, files: Sequence[Path]) -> None:
    """Raise UsageError if some files are Parquet and others CSV: the cells of CSV are text."""
    of_csv = sum(map(tables.is_csv, files))
    if 0 < of_csv < len(files):
        kinds = f"{len(files) - of_csv} Parquet and {of_csv} CSV"
        raise UsageError(f"data.file={folder}: a folder with files of two kinds ({kinds}); keep one kind in it")


@dataclass(frozen=True, kw_only=True)
class HubTables(LabelledTable):
    """Base class of datasets in tables of the hub, in which the names of splits say what they are for."""

    name: ClassVar[str] = ""  # "": that of the folder

    splits: list[str] | None = option(
        None, help="splits to read; null: all; those that are neither for testing nor for validation are trained on"
    )

    @property
    def tables_folder(self) -> Path:
        """The folder of the tables."""
        raise NotImplementedError

    def load(self) -> Dataset:
        """Return the rows of all splits, training first; `source` is the split and `index` the row in it."""
        folder = self.tables_folder
        by_split = tables_by_split(folder)
        for split in self.splits or []:
            if split not in by_split:
                present = ", ".join(by_split)
                raise UsageError(f"data.splits={self.splits}: {folder} has {present}")
        kinds = {split: _kind(split) for split in self.splits or by_split}
        splits = sorted(kinds, key=lambda split: (kinds[split] == "test", split))
        unknown = [split for split in splits if kinds[split] is None]
        if unknown and len(splits) > 1 and not self.splits:
            remedy = f"name those to read, data.splits=[{', '.join(splits)}], in which others are trained on"
            problem = f"the split {unknown[0]} is none of train, val and test"
            raise UsageError(f"data.folder={folder}: {problem}; {remedy}")
        files: list[Path] = []
        counts = []
        for split in splits:
            files += by_split[split]
            counts.append(self._count_rows(by_split[split]))
        if not files:
            raise UsageError(f"data.folder={folder}: its splits have no tables")
        numbers = np.arange(len(splits), dtype=np.int8)
        source = np.repeat(numbers, counts)
        kind_of_split = np.array([str(kinds[split]) for split in splits])
        kind = kind_of_split[source]
        name = self.name
        if not name:
            _, _, name = folder.name.removeprefix("datasets--").rpartition("--")
        is_test = kind == "test"
        return self.dataset(name, files, source, tuple(splits), is_test, kind == "val")


def _kind(split: str) -> str | None:
    """Return whether a split, such as validation_matched, is train, val or test; None: its name does not say."""
    word = split_in(split)
    if word is None:
        return None
    return split_named(word)


@dataclass(frozen=True, kw_only=True)
class HuggingFace(HubTables):
    """A labelled dataset of the hub in a local folder, read by pyarrow; nothing is downloaded.

    `folder` was written by `datasets.Dataset.save_to_disk` or `DatasetDict.save_to_disk`, or is a copy of the dataset's
    repository with its Parquet files (`hf download … --repo-type dataset`). For licences, see the datasets' pages.

    Columns are used as in `parquet`. The names of the splits say what is for testing (test) and for validation (val,
    valid, validation or dev). Without a split for testing, the partition holds out a quarter of each client or domain.
    """

    folder: str = option(help="folder of the dataset")
    tokenizer: str | None = option(
        None,
        help="folder of a tokenizer of transformers; a column of texts (text) becomes input_ids and attention_mask",
    )
    max_length: int | None = option(None, low=1, help="tokens of a text, which is cut or padded; null: of the longest")

    def parts(self, path: Path) -> dict[str, list[str]]:
        if self.features or not self.tokenizer:
            return super().parts(path)
        return {"": ["text"]}

    def inputs(self, name: str, files: Sequence[Path], parts: dict[str, list[str]], rows: int) -> dict[str, Any]:
        if self.tokenizer is None:
            return super().inputs(name, files, parts, rows)
        if [*parts] != [""] or len(parts[""]) > 1:
            raise UsageError(f"data.features={self.features}: expected the one column of texts for data.tokenizer")
        return columns.tokens(files, parts[""][0], self.tokenizer, self.max_length)

    @property
    def tables_folder(self) -> Path:
        return absolute(self.folder)

    @property
    def partition_defaults(self) -> dict[str, Any]:
        if self.default_partition == "iid":
            return {}
        splits = self.splits or tables_by_split(self.tables_folder)
        if any(_kind(split) == "test" for split in splits):
            return {}
        return {"test": 0.25}


@dataclass(frozen=True, kw_only=True)
class Femnist(Published, HubTables):
    """FEMNIST (Caldas et al. 2018, "LEAF"): 814,277 grey images of 28 x 28 of 62 digits and letters by 3,597 writers.

    `<root>/FEMNIST` is a copy of flwrlabs/femnist on the Hugging Face hub: Parquet files with the columns image,
    writer_id and character. Clients are the writers; a tenth of each one's images is held out, as in LEAF. Licence: BSD
    2-clause.
    """

    label: str = option("character", help="column of the classes")
    client: str | None = option("writer_id", help="column of the clients")

    name: ClassVar[str] = "femnist"
    stratified: ClassVar[bool] = False
    partition_defaults: ClassVar[dict[str, Any]] = {"test": 0.1}

    @property
    def tables_folder(self) -> Path:
        return self.find("femnist")
