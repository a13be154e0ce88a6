"""One domain left out: nobody holds it, and the server's model is scored on all of its examples, split "ood"."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.data.dataset import Dataset
from rayfed.data.domain_selection import DomainSelection
from rayfed.data.population import Examples, Population, TestSet


def load_without_domain(data: Any, domain: str | None) -> Dataset:
    """What `data` loads, with `domain` held by nobody; None: as it is.

    Where the dataset has an option `held_out`, that is [domain]: so the domain is kept whole, and a published split
    that does not allow it is refused.

    Raises:
        UsageError: there is no such domain, or no other; whatever `data.load` raises.
    """
    if domain is None:
        return data.load()
    if isinstance(data, DomainSelection):
        _check(domain, replace(data, held_out=[]).selected_domains(), data.name)
        return replace(data, held_out=[domain]).load()
    return dataset_without_domain(data.load(), domain)


def dataset_without_domain(dataset: Dataset, domain: str) -> Dataset:
    """`dataset` with `domain` held by nobody, in place of the domains that it leaves out by itself.

    Raises:
        UsageError: there is no such domain, or no other.
    """
    _check(domain, dataset.domains, dataset.name)
    return replace(dataset, ood=(domain,))


def population_without_domain(population: Population, domain: str | None) -> Population:
    """The same for a population of the user's own: the clients of `domain` become an "ood" test set."""
    if domain is None:
        return population
    _check(domain, dict.fromkeys(client.domain for client in population.clients), population.name)
    gone = [client for client in population.clients if client.domain == domain]
    parts = [part for client in gone for part in (client.train, client.val, client.test)]
    held = Examples(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
    left = [client for client in population.clients if client.domain != domain]
    clients = tuple(replace(client, id=place) for place, client in enumerate(left))
    return replace(population, clients=clients, tests=(*population.tests, TestSet(domain, "ood", held)))


def check_rows(dataset: Dataset, rows: np.ndarray) -> None:
    """Raises UsageError where a partition gave clients rows of a domain that nobody may hold."""
    strange = np.setdiff1d(rows, dataset.rows())
    if len(strange) and not 0 <= strange[0] <= strange[-1] < len(dataset):
        found = strange[0] if strange[0] < 0 else strange[-1]
        raise UsageError(f"partition: gives clients row {found} of {dataset.name}; expected 0..{len(dataset) - 1}")
    if len(strange):
        domain = dataset.domains[dataset.domain[strange[0]]]
        raise UsageError(f"partition: gives clients row {strange[0]} of {dataset.name}, of {domain}, which is left out")


def _check(domain: str, known: Iterable[str], name: str) -> None:
    domains: Sequence[str] = list(known)
    if len(domains) < 2:
        raise UsageError(f"leave_out={domain}: {name} has one domain alone; leave_out needs two or more")
    if domain not in domains:
        raise UsageError(f"leave_out={domain}: no such domain in {name}; {suggestion(domain, domains)}")
