"""Loading: from the names and options of a dataset and a partition to the population that the engine is given."""

import dataclasses
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.layout import Layout
from rayfed.core.options import build, suggestion
from rayfed.core.registry import resolve
from rayfed.core.rng import global_generators_seeded
from rayfed.core.words import first_few
from rayfed.data.dataset import ClientRows, ClientView, Dataset, check_no_leakage, unheld_rows
from rayfed.data.dataset_options import DomainSelection
from rayfed.data.inputs import as_array, check_inputs, model_inputs, packed
from rayfed.data.on_disk import LazyRows, as_lazy_rows
from rayfed.data.partitions import PARTITIONS
from rayfed.data.partitions.base import Partition, describe_validation, partition_hash
from rayfed.data.partitions.domains import Natural
from rayfed.data.partitions.stratified import single_rows
from rayfed.data.population import (
    ClientTable,
    Examples,
    ListedClients,
    MadeClients,
    PooledExamples,
    Population,
    TestSet,
    content_hash,
)
from rayfed.data.readers.files import note
from rayfed.data.sets import DATASETS
from rayfed.data.sets.synthetic import Synthetic
from rayfed.data.without import by_domain_or_number, described, names_in, other_options, remaining

QUICK_SECONDS = 2.0  # that a user's own dataset may take to be loaded twice
_DRAWS_ANEW = "returns something else the second time; draw from a seeded generator, such as np.random.default_rng(0)"


def build_data(
    data_name: str,
    data_options: Mapping[str, Any] | None = None,
    partition_name: str | None = None,
    partition_options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Return the dataset and the partition, built from their options but not loaded.

    The option `without` is no option of a dataset, and has no effect here; see `rayfed.data.without`.
    A name is an entry of `DATASETS` or `PARTITIONS`, or a user's own "module:Class": a dataclass whose fields are its
    options, with `load() -> Dataset` for a dataset or `split(dataset) -> list[ClientRows]` for a partition. A dataset
    may define `default_partition` (else "domains") and `partition_defaults`, default options of that partition.
    `seed` is that of the run, which a partition without a seed of its own follows (`Partition.follows_seed`).

    Raises:
        UsageError: A name is unknown, or an option is unknown, missing, of a wrong type or out of range.
    """
    kind = _class(data_name, DATASETS, "data", "load")
    data = build(kind, other_options(data_options), where="data")
    default = getattr(data, "default_partition", "domains")
    if partition_name is None:
        name = default
    else:
        name = partition_name
    options = dict(partition_options or {})
    if name == default:
        options = dict(getattr(data, "partition_defaults", {})) | options
    partition = build(_class(name, PARTITIONS, "partition", "split"), options, where="partition")
    if isinstance(partition, Partition):
        return data, partition.with_seed(seed)
    if getattr(partition, "seed", 0) is None:
        if not getattr(partition, "follows_seed", True):
            seed = 0
        partition = dataclasses.replace(partition, seed=seed)
    return data, partition


def load(
    data_name: str = "mini_digits",
    data_options: Mapping[str, Any] | None = None,
    partition_name: str | None = None,
    partition_options: Mapping[str, Any] | None = None,
    leave_out: str | Sequence[str] | None = None,
    seed: int = 0,
) -> Population:
    """Return the population that results from partitioning a dataset.

    Args:
        data_name, data_options, partition_name, partition_options, seed: As for `build_data`.
        leave_out: The domains that no client holds, in place of those that the dataset itself holds out. Each becomes
            an "ood" test set.

    Raises:
        UsageError: As for `build_data`; also if files are missing or damaged, or the partition cannot divide the data.
    """
    data, partition = build_data(data_name, data_options, partition_name, partition_options, seed)
    without = names_in(data_options)
    if isinstance(data, Synthetic) and data.makes_clients and isinstance(partition, Natural) and not leave_out:
        return population_without_clients(_made_population(data, partition), without)
    dataset, held_rows, left_out = _partitioned(data, partition, leave_out, without)
    if ":" in data_name:  # rayfed's own readers check what they read
        _check_inputs(dataset, data_name)
    clients = client_table(dataset, held_rows)
    unheld = {name: unheld_rows(dataset, held_rows, name) for name in dataset.ood}
    ood = []
    for name, rows in unheld.items():
        ood.append(TestSet(name, "ood", dataset.select(rows)))
    tests = []
    for test in dataset.tests:
        tests.append(_lazy_test_set(test, dataset.layout))
    layout = dataset.layout
    if layout:
        layout = layout.normalised(dataset.mean, dataset.std)
    return Population(
        name=dataset.name,
        clients=clients,
        num_classes=dataset.num_classes,
        shape=clients[0].train.shape,
        mean=dataset.mean,
        std=dataset.std,
        tests=(*tests, *ood),
        partition_hash=partition_hash(dataset, held_rows),
        test_source=_sources(dataset, partition, held_rows),
        test_drawn=_draws_tests(partition, dataset),
        layout=layout,
        class_names=dataset.class_names,
        left_out=left_out,
    )


def _draws_tests(partition: Any, dataset: Dataset) -> bool | None:
    """Return what `Partition.draws_tests` does; None for a partition that is not derived from `Partition`."""
    if isinstance(partition, Partition):
        return partition.draws_tests(dataset)
    return None


def _sources(dataset: Dataset, partition: Any, clients: list[ClientRows]) -> str:
    """Return on which examples clients are tested and validated, as far as it is known, as the end of a sentence."""
    tested = ""
    if isinstance(partition, Partition):
        tested = partition.test_source(dataset)
    return ", ".join(filter(None, [tested, describe_validation(dataset, clients)]))


@dataclasses.dataclass(frozen=True)
class _NaturalClient:
    """Makes a client of `data`, with the parts that the partition `natural` gives it."""

    data: Synthetic
    partition: Natural

    def __call__(self, number: int) -> tuple[Examples, Examples, Examples]:
        whole = Examples(*self.data.examples(number))
        rows = self.partition.of_client(number, len(whole))
        train, val, test = map(whole.select, rows)
        return train, val, test


def _made_population(data: Synthetic, partition: Natural) -> Population:
    """Return the population of `data` with clients that are made on demand."""
    sizes = partition.sizes(data.sizes())
    made = MadeClients(_NaturalClient(data, partition), sizes)
    domains = []
    for number in range(len(sizes)):
        domains.append(f"client-{number}")
    clients = ClientTable(made, sizes, domains)
    tested = "no test examples"
    if partition.test:
        tested = f"tested on {partition.test:g} of their rows"
    drawn = f"Natural(seed={partition.seed!r}, validation={partition.drawn_validation!r}, test={partition.test!r})"
    digest = hashlib.blake2b(drawn.encode(), digest_size=6)
    digest.update(np.ascontiguousarray(sizes).data)
    return Population(
        data.name,
        clients,
        data.classes,
        clients[0].train.shape,
        partition_hash=digest.hexdigest(),
        test_source=tested,
        test_drawn=bool(partition.test),
    )


def load_partitioned(
    data_name: str,
    data_options: Mapping[str, Any] | None = None,
    partition_name: str | None = None,
    partition_options: Mapping[str, Any] | None = None,
    leave_out: str | Sequence[str] | None = None,
    seed: int = 0,
) -> tuple[Dataset, list[ClientRows]]:
    """Return the dataset and the rows of each client; arguments and errors are those of `load`."""
    data, partition = build_data(data_name, data_options, partition_name, partition_options, seed)
    divided = _partitioned(data, partition, leave_out, names_in(data_options))
    return divided.dataset, divided.clients


class _Divided(NamedTuple):
    """A dataset, the clients that hold its rows, and in words which ones are left out."""

    dataset: Dataset
    clients: list[ClientRows]
    left_out: str


def _partitioned(
    data: Any, partition: Any, leave_out: str | Sequence[str] | None, without: Sequence[str] = ()
) -> _Divided:
    """Return the loaded dataset and its clients; `without` are the names in `data.without`."""
    if without and isinstance(data, DomainSelection):
        data = data.marked_absent(without)
    if leave_out is not None and isinstance(data, DomainSelection):  # keeps all examples, or refuses for its split
        data = data.without(_checked_domains(leave_out, data.selected_domains(), data.name))
        leave_out = None
    dataset = _loaded(data)
    if not len(dataset.labels):
        raise UsageError(f"dataset {dataset.name}: has no examples")
    if leave_out is not None:
        dataset = dataset_without_domain(dataset, leave_out)
    if dataset.stratified is None:
        is_own = not type(data).__module__.startswith("rayfed.")
        dataset = dataclasses.replace(dataset, stratified=is_own)
    if isinstance(partition, Partition):
        partition.check_redraw(dataset)
    everyone = divided_clients(dataset, partition)
    if not _is_ours(partition):
        _refuse_changing_split(dataset, partition, everyone)
    dataset, clients = _remaining_clients(without, dataset, partition, everyone)
    check_clients(dataset, clients)
    _tell_equal_images(dataset)
    if isinstance(partition, Partition):
        _tell_single_rows(dataset, clients, partition.strata(dataset))
    untested = []
    for client in clients:
        if not len(client.test):
            untested.append(client.id)
    if 0 < len(untested) < len(clients):
        share = f"{len(untested)} of {len(clients)} clients"
        note(f"{dataset.name}: {share} have no test examples: {first_few(untested, 5)}")
    return _Divided(dataset, clients, described(without, len(clients), len(everyone)))


@dataclasses.dataclass(frozen=True)
class _RenumberedView:
    """What the remaining clients see, who have other numbers than in the whole partition.

    Attributes:
        view: The view of the clients by their numbers in the whole partition.
        numbers: That number of each client.
    """

    view: ClientView
    numbers: Sequence[int]

    def domain(self, client: int) -> str:
        return self.view.domain(self.numbers[client])

    def images(self, client: int, images: np.ndarray) -> np.ndarray:
        return self.view.images(self.numbers[client], images)


def _remaining_clients(
    names: Sequence[str], dataset: Dataset, partition: Any, clients: list[ClientRows]
) -> tuple[Dataset, list[ClientRows]]:
    """Return the dataset and the clients of a partition that `names` do not leave out, numbered anew from 0."""
    if not names:
        return dataset, clients
    domains = [dataset.client_domain(client) for client in clients]
    columns = by_domain_or_number(domains)
    if isinstance(partition, Natural):
        columns = [*partition.names(dataset), domains]
    places = remaining(names, dataset.name, columns)
    kept = [clients[place]._replace(id=number) for number, place in enumerate(places)]
    if dataset.client_view is not None:
        dataset = dataclasses.replace(dataset, client_view=_RenumberedView(dataset.client_view, places))
    return dataset, kept


def _is_ours(component: object) -> bool:
    """Return whether a dataset or a partition is rayfed's."""
    return type(component).__module__.startswith("rayfed.")


def _loaded(data: Any) -> Dataset:
    """Return the examples of `data`; UsageError if the user's own code returns others when it loads again.

    What takes long is loaded once.
    """
    began = time.monotonic()
    dataset = _read(data)
    if _is_ours(data) or time.monotonic() - began > QUICK_SECONDS:
        return dataset
    before = _contents(dataset)
    if _contents(_read(data)) != before:
        raise UsageError(f"data: {type(data).__name__}.load {_DRAWS_ANEW}")
    return dataset


def _read(data: Any) -> Dataset:
    """Return the examples of `data`. Its code may draw from the global generators."""
    with global_generators_seeded(0, "load"):
        dataset: Dataset = data.load()
    return dataset


def _contents(dataset: Dataset) -> list[str]:
    """Return hashes of what a dataset has."""
    tests = []
    for test in dataset.tests:
        tests.append(_lazy_test_set(test, dataset.layout).examples)
    parts = [Examples(dataset.images, dataset.labels), *tests]
    marks = [dataset.is_test, dataset.is_val, dataset.domain, dataset.client, dataset.strata, dataset.leakage_group]
    given = []
    for column in marks:
        if column is not None:
            given.append(np.ascontiguousarray(column).tobytes())
    hash_of_given = hashlib.sha256(b"".join(given)).hexdigest()
    return [*map(content_hash, parts), hash_of_given]


def _refuse_changing_split(dataset: Dataset, partition: Any, before: list[ClientRows]) -> None:
    """Raise UsageError if the user's own partition, which returned `before`, divides the rows differently again."""
    again = divided_clients(dataset, partition)
    if partition_hash(dataset, again) != partition_hash(dataset, before):
        raise UsageError(f"partition: {type(partition).__name__}.split {_DRAWS_ANEW}")


def _tell_single_rows(dataset: Dataset, clients: Sequence[ClientRows], strata: np.ndarray | None) -> None:
    """Say which clients have a single row of a class, which no stratified draw can give to two parts."""
    if strata is None:
        return
    words = []
    for client in clients:
        for label in single_rows(np.concatenate(client[2:]), strata):
            words.append(f"class {label} of {client.domain} ({client.id})")
    if words:
        shown = first_few(words, 5)
        note(f"{dataset.name}: {shown}: one row, which is in one part alone; partition.stratify cannot divide it")


def _class(name: str, table: Mapping[str, str], where: str, method: str) -> type[Any]:
    where = f"{where}.name"
    cls = resolve(name, table, where=where)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and hasattr(cls, method)):
        raise UsageError(f"{where}={name}: expected a dataclass with a method {method}(), got {cls!r}")
    return cls


def divided_clients(dataset: Dataset, partition: Any) -> list[ClientRows]:
    """Return the clients of a partition, numbered from 0, with rows that are integers."""
    clients = []
    name = type(partition).__name__
    with global_generators_seeded(0, "split"):  # a user's partition may draw from them
        divided = list(partition.split(dataset))
    for number, (_, domain, *given) in enumerate(divided):
        parts = [np.asarray(rows) for rows in given]
        for rows in parts:
            if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
                form = f"{rows.dtype} {list(rows.shape)}"
                expected = "positions in the dataset, integers [n], such as np.flatnonzero(mask)"
                raise UsageError(f"partition: client {number} of {name} has rows that are {form}; expected {expected}")
        train, val, test = (rows.astype(np.int64) for rows in parts)
        clients.append(ClientRows(number, str(domain), train, val, test))
    if not clients:
        raise UsageError(f"partition: {name} of {dataset.name} has no clients")
    return clients


def check_clients(dataset: Dataset, clients: list[ClientRows]) -> None:
    """Raise UsageError if a client has no training examples, or a row is used twice or may not be held."""
    empty = []
    for client in clients:
        if not len(client.train):
            empty.append(client)
    if empty:
        first = empty[0]
        what = f"client {first.id} ({first.domain}) of {dataset.name} has no training examples"
        more = f"({len(first.test)} test examples only), as {len(empty)} of {len(clients)} clients"
        raise UsageError(
            f"partition: {what} {more}; use fewer clients, leave them out with data.without, or draw test examples "
            "from all rows, as with partition.test=0.25"
        )
    rows = _held_rows(clients)
    check_rows(dataset, rows)
    values, counts = np.unique(rows, return_counts=True)
    if counts.max() > 1:
        row = values[counts.argmax()]
        count = counts.max()
        raise UsageError(f"partition: row {row} of {dataset.name} is in {count} parts; expected each row in one")
    check_no_leakage(dataset, clients)


def _held_rows(clients: Sequence[ClientRows]) -> np.ndarray:
    """Return the rows of all parts of clients, one after the other."""
    parts: list[np.ndarray] = []
    for client in clients:
        parts += [client.train, client.val, client.test]
    return np.concatenate(parts)


def _check_inputs(dataset: Dataset, name: str) -> None:
    parts = {"images": Examples(dataset.images, dataset.labels)}
    if dataset.layout is None:
        for test in dataset.tests:
            parts[f"test set {test.domain}"] = test.examples
    for part, examples in parts.items():
        check_inputs(f"data.name={name}: {part}", examples)


def _tell_equal_images(dataset: Dataset) -> None:
    """Name each class of a domain whose images are all equal, which shows that something was lost."""
    if dataset.images.ndim < 3 or dataset.labels.ndim > 1:
        return
    groups = dataset.domain.astype(np.int64) * dataset.num_classes + dataset.labels
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order])) + 1
    for rows in np.split(order, starts):
        if len(rows) > 1 and _are_equal(dataset, rows):
            domain = dataset.domains[dataset.domain[rows[0]]]
            label = dataset.labels[rows[0]]
            note(f"{dataset.name}: all {len(rows)} images of class {label} of {domain} are equal")


def _are_equal(dataset: Dataset, rows: np.ndarray) -> bool:
    """Return whether the images of some rows are equal; they are read one by one."""
    first = dataset.images[rows[:1]]
    for place in range(1, len(rows)):
        other = dataset.images[rows[place : place + 1]]
        if not np.array_equal(first, other):
            return False
    return True


def client_table(dataset: Dataset, held_rows: Sequence[ClientRows]) -> ClientTable:
    """Return the clients of a partition, with their rows of the dataset copied into one array, client by client."""
    parts = []
    for client in held_rows:
        parts += [client.train, client.val, client.test]
    sizes = np.array([len(rows) for rows in parts], np.int64)
    pool = dataset.select(np.concatenate(parts))
    view = dataset.client_view
    if view:
        seen = []
        for client in held_rows:
            held = _held_rows([client])
            seen.append(view.images(client.id, dataset.images[held]))
        pool = dataclasses.replace(pool, x=np.concatenate(seen))
    source = PooledExamples(pool, np.append(0, np.cumsum(sizes)))
    domains = [dataset.client_domain(client) for client in held_rows]
    return ClientTable(source, sizes.reshape(-1, 3), domains)


def _lazy_test_set(test: TestSet, layout: Layout | None) -> TestSet:
    x = as_lazy_rows(test.examples.x)
    where = f"test set {test.domain}"
    if layout is not None:
        x = packed(where, x, layout)[0]
    elif not isinstance(x, LazyRows):
        x = model_inputs(where, x)
    examples = Examples(x, as_array(where, test.examples.y), layout)
    return dataclasses.replace(test, examples=examples)


def dataset_without_domain(dataset: Dataset, leave_out: str | Sequence[str]) -> Dataset:
    """Return `dataset` with the domains in `leave_out`, and no other domains, held by no client."""
    return dataclasses.replace(dataset, ood=_checked_domains(leave_out, dataset.domains, dataset.name))


def population_without_domain(population: Population, leave_out: str | Sequence[str] | None) -> Population:
    """Return `population` with the clients of the domains in `leave_out` as "ood" test sets; None: unchanged."""
    if leave_out is None:
        return population
    clients = population.clients
    tests = list(population.tests)
    domains = _checked_domains(leave_out, clients.domain_names(), population.name)
    for domain in domains:
        parts: list[Examples] = []
        for client in clients.select(clients.are_of(domain)):
            parts.extend(client.parts)
        tests.append(TestSet(domain, "ood", Examples.joined(parts)))
    are_left_out = [clients.are_of(domain) for domain in domains]
    remaining = clients.select(~np.logical_or.reduce(are_left_out)).renumbered()
    return dataclasses.replace(population, clients=remaining, tests=tuple(tests))


def population_without_clients(population: Population, names: Sequence[str]) -> Population:
    """Return `population` without the clients that `names` leave out, numbered anew from 0."""
    if not names:
        return population
    clients = population.clients
    domains = [clients.domain(place) for place in range(len(clients))]
    places = np.array(remaining(names, population.name, by_domain_or_number(domains)), "<i8")
    kept = clients.select(places).renumbered()
    if isinstance(kept.source, ListedClients):  # which has the others, too
        kept = ClientTable.of(list(kept))
    digest = population.partition_hash
    if digest is not None:
        digest = hashlib.blake2b(digest.encode() + places.tobytes(), digest_size=6).hexdigest()
    left_out = described(names, len(kept), len(clients))
    return dataclasses.replace(population, clients=kept, partition_hash=digest, left_out=left_out)


def check_rows(dataset: Dataset, rows: np.ndarray) -> None:
    """Raise UsageError if `rows`, which a partition gave to clients, include rows that no client may hold."""
    for row in np.setdiff1d(rows, dataset.rows())[:1]:
        expected = f"expected 0..{len(dataset) - 1}"
        if dataset.ood:
            expected += ", of no domain that is left out"
        raise UsageError(f"partition: gives clients row {row} of {dataset.name}; {expected}")


def _checked_domains(leave_out: str | Sequence[str], available: Iterable[str], name: str) -> tuple[str, ...]:
    """Return the domains in `leave_out`; UsageError if they are not among those `available`, or are all of them."""
    if isinstance(leave_out, str):
        leave_out = [leave_out]
    domains = tuple(dict.fromkeys(leave_out))
    known = list(available)
    for domain in domains:
        if domain not in known:
            raise UsageError(f"leave_out={domain}: no such domain in {name}; {suggestion(domain, known)}")
    if domains and set(domains) == set(known):
        raise UsageError(f"leave_out={', '.join(domains)}: leaves no domain of {name} to train on")
    return domains
