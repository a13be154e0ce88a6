"""From the names of a dataset and a partition to the population that the engine is given."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import build
from rayfed.core.registry import resolve
from rayfed.data import leakage_groups as originals
from rayfed.data.dataset import Dataset, Part
from rayfed.data.leave_out import check_rows, loaded
from rayfed.data.partitions import PARTITIONS
from rayfed.data.partitions.table import client_domain, partition_hash
from rayfed.data.population import Client, Examples, Population, TestSet
from rayfed.data.rows import Rows, lazy, pick
from rayfed.data.sets import DATASETS


def check(
    data_name: str,
    data_options: Mapping[str, Any] | None = None,
    partition_name: str | None = None,
    partition_options: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    """The dataset and the partition, built from their options but with nothing loaded.

    A name is an entry of `DATASETS` or `PARTITIONS`, or a user's own "module:Class": a dataclass whose fields are its
    options, with `load() -> Dataset` for a dataset or `split(dataset) -> list[Part]` for a partition. A dataset may say
    its `default_partition` (else "domains") and `partition_defaults`, options for that partition that are not given.

    Raises:
        UsageError: an unknown name, or an option that is unknown, missing, of a wrong type or out of range.
    """
    data = build(_class(data_name, DATASETS, "data", "load"), dict(data_options or {}), where="data")
    default = getattr(data, "default_partition", "domains")
    name = default if partition_name is None else partition_name
    options = dict(getattr(data, "partition_defaults", {}) if name == default else {}) | dict(partition_options or {})
    return data, build(_class(name, PARTITIONS, "partition", "split"), options, where="partition")


def load(
    data_name: str = "mini_digits",
    data_options: Mapping[str, Any] | None = None,
    partition_name: str | None = None,
    partition_options: Mapping[str, Any] | None = None,
    leave_out: str | None = None,
) -> Population:
    """The clients of a dataset under a partition; the dataset's own choice of partition where none is named.

    Nobody holds the domain `leave_out`: it becomes the "ood" test set, in place of the domains of `held_out`.

    Raises:
        UsageError: as `check`; files that are missing or damaged; a dataset that cannot be divided as asked.
    """
    dataset, parts = divided(data_name, data_options, partition_name, partition_options, leave_out)
    dataset = dataclasses.replace(dataset, images=lazy(dataset.images))
    clients = tuple(_client(dataset, part) for part in parts)
    return Population(
        name=dataset.name,
        clients=clients,
        num_classes=dataset.num_classes,
        shape=tuple(clients[0].train.x.shape[1:]),
        mean=dataset.mean,
        std=dataset.std,
        tests=(*map(_unread, dataset.tests), *(_unheld(dataset, parts, name) for name in dataset.ood)),
        partition_hash=partition_hash(dataset, parts),
    )


def divided(
    data_name: str,
    data_options: Mapping[str, Any] | None = None,
    partition_name: str | None = None,
    partition_options: Mapping[str, Any] | None = None,
    leave_out: str | None = None,
) -> tuple[Dataset, list[Part]]:
    """The dataset, and which of its rows each client holds; arguments and errors are those of `load`."""
    data, partition = check(data_name, data_options, partition_name, partition_options)
    dataset = loaded(data, leave_out)
    parts = [Part(*part) for part in partition.split(dataset)]
    _check_parts(dataset, parts)
    return dataset, parts


def _class(name: str, table: Mapping[str, str], where: str, method: str) -> type[Any]:
    where = f"{where}.name"
    found = resolve(name, table, where=where)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, method)):
        raise UsageError(f"{where}={name}: expected a dataclass with a method {method}(), got {found!r}")
    return found


def _check_parts(dataset: Dataset, parts: list[Part]) -> None:
    """Holds for every partition, a user's own too: ids in order, something to train on, no row in two parts."""
    if [part.id for part in parts] != list(range(len(parts))) or not parts:
        first = [part.id for part in parts][:5]
        raise UsageError(f"partition: client ids {first}…; expected 0..N-1 in order, at least one")
    for part in parts:
        if not len(part.train):
            raise UsageError(f"partition: client {part.id} ({part.domain}) of {dataset.name} has no training samples")
    rows = np.concatenate([rows for part in parts for rows in part[2:]])
    check_rows(dataset, rows)
    values, counts = np.unique(rows, return_counts=True)
    if counts.max() > 1:
        row = values[counts.argmax()]
        raise UsageError(f"partition: row {row} of {dataset.name} is in {counts.max()} parts; expected each row in one")
    originals.check(dataset, parts)


def _client(dataset: Dataset, part: Part) -> Client:
    personal = dataset.personal
    examples = []
    for rows in part[2:]:
        images = pick(dataset.images, rows)
        if personal:
            view = functools.partial(personal.images, part.id)
            images = images.seen(view) if isinstance(images, Rows) else view(images)
        examples.append(Examples(images, dataset.labels[rows]))
    return Client(part.id, client_domain(dataset, part), *examples)


def _unread(test: TestSet) -> TestSet:
    examples = test.examples
    return dataclasses.replace(test, examples=dataclasses.replace(examples, x=lazy(examples.x)))


def _unheld(dataset: Dataset, parts: list[Part], name: str) -> TestSet:
    rows = originals.unheld(dataset, parts, name)
    return TestSet(name, "ood", Examples(pick(dataset.images, rows), dataset.labels[rows]))
