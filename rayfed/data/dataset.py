"""A pooled dataset before it is partitioned: every example with its domain, its origin and its leakage group.

Rows of one leakage group show the same original, such as a digit on two backgrounds. Partitions keep them together, so
that no client is tested on an original that a client trains on.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from rayfed.core.errors import UsageError, printable
from rayfed.core.layout import Layout
from rayfed.core.rng import floor_share
from rayfed.data.inputs import (
    as_array,
    check_channels_first,
    check_finite,
    count_classes,
    is_tree,
    model_inputs,
    packed,
    targets,
)
from rayfed.data.on_disk import LazyRows, select_rows
from rayfed.data.population import Examples, TestSet

Rows = np.ndarray
"""Positions of examples in a dataset, integers [n]."""
Mask = np.ndarray
"""Marks of the examples of a dataset, bool [N]."""


class ClientRows(NamedTuple):
    """One client of a partition: its number, its domain, and the dataset's rows in its three parts."""

    id: int
    domain: str
    train: Rows
    val: Rows
    test: Rows


class ClientView(Protocol):
    """A transformation of each client's images, such as a rotation; it must treat every image on its own."""

    def domain(self, client: int) -> str:
        """Return the client's domain, which replaces the one that the partition gave it."""

    def images(self, client: int, images: np.ndarray) -> np.ndarray:
        """Return `images` as the client sees them, in the same order."""


@dataclass(frozen=True)
class Dataset:
    """N pooled examples, whose rows a partition assigns to clients. `Dataset.of` fills in the usual defaults.

    Attributes:
        name: Name of the dataset.
        images: Inputs [N, ...]; uint8 [N, channels, height, width] for images; any other dtype reaches the model
            unchanged. Arrays from `rayfed.data.on_disk.memory_mapped` and any read-only `np.memmap` are read on demand.
        labels: Class indices below `num_classes`, int64 [N], or other targets: classes at every position or several
            labels, [N, ...], or numbers, float32 [N, ...].
        domain: Positions in `domains`, integers [N].
        domains: Names of the domains.
        is_test: Whether a row is one of the dataset's own test examples, bool [N].
        source: Positions in `sources`, integers [N]. Source and index together identify an example.
        sources: Names of the sources, such as the files "train" and "t10k".
        index: Index of each example in its source, int64 [N].
        num_classes: Number of classes.
        client: The client to which an example naturally belongs, int64 [N], or None.
        class_names: The names of the classes in order; None: they have none.
        client_names: The names of the clients by the numbers in `client`; None: they have none.
        stratified: Whether partitions draw test and validation parts with the classes in proportion by default
            (`partition.stratify`); None: those of a dataset class of your own, and not those of rayfed's.
        strata: What partitions by class divide the rows by, integers [N] from 0; None: the classes.
        leakage_group: Group of each row, integers [N], or None. Rows of one group show the same original, such as a
            digit on two backgrounds or a patient; partitions never train on one of them and test on another.
        mean, std: Per channel in units of [0, 1], to normalise uint8 images.
        ood: Domains that no client may hold; their examples become the server's "ood" test sets.
        tests: Further test sets for the server's model.
        layout: Where the parts of an input lie in its row of `images`, if it has several.
        client_view: How a client's images differ from the pooled ones, or None.
        is_val: Whether a row is one of the dataset's own validation examples, bool [N]; None: it has none.
    """

    name: str
    images: np.ndarray | LazyRows
    labels: np.ndarray
    domain: np.ndarray
    domains: tuple[str, ...]
    is_test: np.ndarray
    source: np.ndarray
    sources: tuple[str, ...]
    index: np.ndarray
    num_classes: int
    client: np.ndarray | None = None
    class_names: tuple[str, ...] | None = None
    client_names: tuple[str, ...] | None = None
    stratified: bool | None = None
    strata: np.ndarray | None = None
    leakage_group: np.ndarray | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    ood: tuple[str, ...] = ()
    tests: tuple[TestSet, ...] = ()
    client_view: ClientView | None = None
    layout: Layout | None = None
    is_val: np.ndarray | None = None

    def __post_init__(self) -> None:
        where = f"dataset {self.name}"
        self._check_columns(where)
        check_channels_first(f"{where}: images", self.images.shape, self.images.dtype)
        if len(self):
            self._check_codes(where)
        check_finite(where, self.labels)
        if self.is_val is None:
            return
        both = np.flatnonzero(self.is_val & self.is_test)
        if len(both):
            raise UsageError(f"{where}: is_val and is_test both mark row {both[0]}; a row has one split")

    def _check_columns(self, where: str) -> None:
        """Raise UsageError if a column has another type than it should, or another length than the labels."""
        kinds = {"images": ("biuf", "numbers"), "labels": ("iuf", "numbers")}
        kinds |= dict.fromkeys(("is_test", "is_val"), ("b", "booleans"))
        integers = ("domain", "source", "index", "client", "strata", "leakage_group")
        for name in (*kinds, *integers):
            values = getattr(self, name)
            kind, what = kinds.get(name, ("iu", "integers"))
            if values is None:
                continue
            if not (isinstance(values, (np.ndarray, LazyRows)) and values.dtype.kind in kind):
                actual = getattr(values, "dtype", type(values).__name__)
                more = ""
                if name == "domain":
                    more = ", the position of each row's domain in `domains`"
                expected = f"expected an array of {what}{more}"
                raise UsageError(f"{where}: {name} is {actual}; {expected}")
            if len(values) != len(self):
                raise UsageError(f"{where}: {len(values)} {name} but {len(self)} labels")

    def _check_codes(self, where: str) -> None:
        """Raise UsageError if the labels, domains or sources of rows are not below the number that there are."""
        counts = {"labels": self.num_classes, "domain": len(self.domains), "source": len(self.sources)}
        if not self.has_classes:
            del counts["labels"]
        for name, count in counts.items():
            codes = getattr(self, name)
            if 0 <= codes.min() <= codes.max() < count:
                continue
            allowed = f"{name}s names {count}"
            if name == "labels":
                allowed = f"num_classes={count} allows 0..{count - 1}"
            found = f"{name} {codes.min()}..{codes.max()}"
            raise UsageError(f"{where}: {found}, but {allowed}")

    @classmethod
    def of(
        cls,
        name: str,
        images: Any = None,
        labels: Any = None,
        *,
        inputs: Any = None,
        is_test: np.ndarray | None = None,
        is_val: np.ndarray | None = None,
        num_classes: int | None = None,
        **others: Any,
    ) -> "Dataset":
        """Return a dataset with one domain, called `name`, and one source, "all", unless `others` overrides them.

        Names may come from somebody's file: their characters that do not show become escapes.

        Args:
            name: Name of the dataset.
            images: Inputs [N, ...], an array or a tensor; floats become float32. Or a dict or a tuple of them,
                which the model takes by keyword or by position.
            labels: Class indices [N], an array or a tensor; or other targets, as `Dataset.labels` has them. Floats [N]
                that are not all integers from 0 are numbers, and integers [N, 1] are class indices.
            inputs: Another name of `images`.
            is_test: Test examples, bool [N]; None: there are none.
            is_val: Validation examples, bool [N]; None: there are none.
            num_classes: Number of classes; None: the highest label plus 1, or 1 for floats.
            **others: Further attributes of `Dataset`.

        Raises:
            UsageError: Labels are no classes, or attributes do not fit together.
        """
        if images is None:
            images = inputs
        if is_tree(images):
            images, others["layout"] = packed(f"dataset {name}: inputs", images)
        elif not isinstance(images, (LazyRows, np.memmap)):
            images = model_inputs(f"dataset {name}: images", images)
        labels = as_array(f"dataset {name}: labels", labels)
        if not labels.ndim or labels.dtype.kind not in "biuf":
            form = f"{labels.dtype} {list(labels.shape)}"
            raise UsageError(f"dataset {name}: labels are {form}; expected integers [N]")
        labels = targets(f"dataset {name}: labels", labels)
        size = len(labels)
        counted = []
        if labels.dtype.kind == "i" and (labels.ndim == 1 or num_classes is None):
            counted = [labels]
        if is_test is None:
            is_test = np.zeros(size, bool)
        if is_val is not None:
            is_val = as_mask(is_val)
        defaults = {
            "is_test": as_mask(is_test),
            "is_val": is_val,
            "domain": np.zeros(size, np.int16),
            "domains": (name,),
            "source": np.zeros(size, np.int8),
            "sources": ("all",),
            "index": np.arange(size),
            "num_classes": count_classes(f"dataset {name}", counted, "num_classes", num_classes),
        }
        columns = {**defaults, **others}
        for key in ("domains", "ood"):
            if key in columns:
                columns[key] = tuple(map(printable, columns[key]))
        return cls(name=printable(name), images=images, labels=labels, **columns)

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: np.ndarray) -> Examples:
        """Return the examples of some rows; those in a file are not read."""
        return Examples(select_rows(self.images, rows), self.labels[rows], self.layout)

    @property
    def has_classes(self) -> bool:
        """Whether each example has a class."""
        return self.labels.ndim == 1 and self.labels.dtype.kind in "iu"

    def divided_by(self) -> tuple[np.ndarray, int]:
        """Return the strata, else the classes, integers [N], and their number; UsageError if there are none."""
        if self.strata is None and not self.has_classes:
            form = f"{self.labels.dtype} {list(self.labels.shape)}"
            raise UsageError(
                f"partition.name: this partition divides by class, and the labels of {self.name} are {form}; give the "
                "dataset `strata` to divide by, or use iid, quantity, natural or domains"
            )
        if self.strata is None:
            return self.labels, self.num_classes
        return self.strata, int(self.strata.max()) + 1

    def rows(self, *, is_test: bool | None = None, domain: str | None = None) -> np.ndarray:
        """Return the rows that clients may hold (in no "ood" domain), optionally of one split or one domain only."""
        mask = np.ones(len(self), bool)
        for name in self.ood:
            mask &= self.domain != self.domains.index(name)
        if is_test is not None:
            mask &= self.is_test == is_test
        if domain is not None:
            mask &= self.domain == self.domains.index(domain)
        return np.flatnonzero(mask)

    def client_domain(self, client: ClientRows) -> str:
        """Return the domain of a client: from the client view if there is one, else from the partition."""
        if self.client_view:
            return self.client_view.domain(client.id)
        return client.domain

    def domain_of(self, rows: np.ndarray) -> str:
        """Return the name of the only domain among `rows`, or "mixed"."""
        present = np.unique(self.domain[rows])
        if len(present) == 1:
            return self.domains[present[0]]
        return "mixed"


def as_mask(given: Any) -> np.ndarray:
    """Return marks of rows as booleans if they are 0 or 1, and others unchanged."""
    marks = np.asarray(given)
    is_binary = marks.dtype.kind in "iu" and np.isin(marks, (0, 1)).all()
    if is_binary:
        return marks.astype(bool)
    return marks


def from_two_files(is_test: np.ndarray, sources: tuple[str, str]) -> dict[str, Any]:
    """Return the columns of a `Dataset` whose training and test examples come from `sources`, in the files' order."""
    source = is_test.astype(np.int8)
    return {"is_test": is_test, "source": source, "sources": sources, "index": index_within_group(source)}


def index_within_group(groups: np.ndarray) -> np.ndarray:
    """Return the index of each row within its group, int64 [N], such as its position in its file."""
    index = np.empty(len(groups), np.int64)
    for group in np.unique(groups):
        members = groups == group
        index[members] = np.arange(members.sum())
    return index


def first_of_each_group(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Return the first of `rows` in each leakage group; `expand_groups` adds the others again."""
    if dataset.leakage_group is None:
        return rows
    _, first = np.unique(dataset.leakage_group[rows], return_index=True)
    return rows[np.sort(first)]


def spread_groups(groups: np.ndarray | None, owners: np.ndarray) -> np.ndarray:
    """Return which leakage `groups` [N] have rows of several `owners`, such as clients or domains, integers [N].

    There are none without groups.
    """
    if groups is None:
        return np.empty(0, np.int64)
    order = np.lexsort((owners, groups))
    of_group = groups[order]
    of_owner = owners[order]
    is_same_group = of_group[1:] == of_group[:-1]
    is_other_owner = of_owner[1:] != of_owner[:-1]
    return np.unique(of_group[1:][is_same_group & is_other_owner])


def own_tests(dataset: Dataset) -> np.ndarray:
    """Return a mask, bool [N], of the dataset's own test examples and all rows of their leakage groups."""
    return _with_groups(dataset, dataset.is_test)


def own_validation(dataset: Dataset) -> np.ndarray | None:
    """Return a mask, bool [N], of the dataset's own validation examples and all rows of their leakage groups.

    Rows of `own_tests` are not among them. The result is None if the dataset has no validation examples.
    """
    if dataset.is_val is None or not dataset.is_val[dataset.rows()].any():
        return None
    return np.asarray(_with_groups(dataset, dataset.is_val) & ~own_tests(dataset))


def _with_groups(dataset: Dataset, marked: np.ndarray) -> np.ndarray:
    """Return a mask, bool [N], of the `marked` rows and all rows of their leakage groups."""
    if dataset.leakage_group is None:
        return marked
    return np.isin(dataset.leakage_group, dataset.leakage_group[marked])


def expand_groups(dataset: Dataset, rows: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return, for each of `rows` in order, all rows of `among` in its leakage group."""
    if dataset.leakage_group is None:
        return rows
    order = among[np.argsort(dataset.leakage_group[among], kind="stable")]
    sorted_groups = dataset.leakage_group[order]
    groups = dataset.leakage_group[rows]
    starts = np.searchsorted(sorted_groups, groups)
    counts = np.searchsorted(sorted_groups, groups, side="right") - starts
    ends = np.cumsum(counts)
    offsets = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    return order[np.repeat(starts, counts) + offsets]


def cap_rows(dataset: Dataset, rows: np.ndarray, among: np.ndarray, limit: int | None) -> np.ndarray:
    """Return the longest prefix of `rows` whose leakage groups have at most `limit` rows of `among` in total."""
    if dataset.leakage_group is None or limit is None:
        return rows[:limit]
    groups, counts = np.unique(dataset.leakage_group[among], return_counts=True)
    total = np.cumsum(counts[np.searchsorted(groups, dataset.leakage_group[rows])])
    return rows[: np.searchsorted(total, limit, side="right")]


def draw_groups(dataset: Dataset, rows: np.ndarray, random: np.random.Generator, rest: float) -> np.ndarray | None:
    """Return a mask, bool [N], of random leakage groups of `rows`: all but the share `rest` of the groups.

    The result is None if every group has only one of `rows`, so that rows may be drawn individually.
    """
    if dataset.leakage_group is None:
        return None
    groups = np.unique(dataset.leakage_group[rows])
    if len(groups) == len(rows):
        return None
    count = floor_share(len(groups), rest)
    drawn = random.permutation(groups)[count:]
    return np.isin(dataset.leakage_group, drawn)


def check_no_leakage(dataset: Dataset, clients: list[ClientRows]) -> None:
    """Raise UsageError if a client is tested on a leakage group that a client trains on or validates with."""
    if dataset.leakage_group is None:
        return
    tested = np.concatenate([client.test for client in clients])
    fitted = dataset.leakage_group[_fitted_rows(clients)]
    leaked = tested[np.isin(dataset.leakage_group[tested], fitted)]
    if len(leaked):
        rows = f"{len(leaked)} test rows of {dataset.name}, the first of them row {leaked[0]}"
        remedy = "expected all rows of a leakage group, such as those of one patient, on one side"
        raise UsageError(f"partition: {rows}, show originals that are trained on in other rows; {remedy}")


def unheld_rows(dataset: Dataset, clients: list[ClientRows], domain: str) -> np.ndarray:
    """Return the rows of a domain that is left out, without leakage groups that clients train on or validate with."""
    rows = np.flatnonzero(dataset.domain == dataset.domains.index(domain))
    if dataset.leakage_group is not None:
        fitted = dataset.leakage_group[_fitted_rows(clients)]
        rows = rows[~np.isin(dataset.leakage_group[rows], fitted)]
    return rows


def _fitted_rows(clients: list[ClientRows]) -> np.ndarray:
    """Return the rows that any client trains on or validates with."""
    parts = []
    for client in clients:
        parts += [client.train, client.val]
    return np.concatenate(parts)
