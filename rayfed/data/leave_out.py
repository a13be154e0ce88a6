"""Leaving one domain out: no client holds it, and the server's model is scored on its examples as split "ood"."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.data.dataset import Dataset
from rayfed.data.domain_sampling import DomainSelection
from rayfed.data.population import Examples, Population, TestSet


def load_without_domain(data: Any, domain: str | None) -> Dataset:
    """Load a dataset so that no client may hold `domain`; None: load it as it is.

    If the dataset has the option `held_out`, it is set to [domain]: the domain then keeps all its examples, and a
    published split that does not allow this is refused.

    Raises:
        UsageError: The domain does not exist, or is the only one; also whatever `data.load` raises.
    """
    if domain is not None and isinstance(data, DomainSelection):
        _check(domain, replace(data, held_out=[]).selected_domains(), data.name)
        data, domain = replace(data, held_out=[domain]), None
    dataset = data.load()
    if not isinstance(dataset, Dataset):
        raise UsageError(f"data: {type(data).__name__}.load returned {type(dataset).__name__}, not a Dataset")
    return dataset if domain is None else dataset_without_domain(dataset, domain)


def dataset_without_domain(dataset: Dataset, domain: str) -> Dataset:
    """Return `dataset` with `domain` as its only held-out domain.

    Raises:
        UsageError: The domain does not exist, or is the only one.
    """
    _check(domain, dataset.domains, dataset.name)
    return replace(dataset, ood=(domain,))


def population_without_domain(population: Population, domain: str | None) -> Population:
    """Return `population` with the clients of `domain` turned into an "ood" test set; None: return it as it is.

    Raises:
        UsageError: The domain does not exist, is the only one, or has no examples.
    """
    if domain is None:
        return population
    _check(domain, dict.fromkeys(client.domain for client in population.clients), population.name)
    removed = [client for client in population.clients if client.domain == domain]
    parts = [part for client in removed for part in (client.train, client.val, client.test) if len(part)]
    if not parts:
        raise UsageError(f"leave_out={domain}: its clients have no examples to score")
    examples = Examples(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
    remaining = [client for client in population.clients if client.domain != domain]
    clients = tuple(replace(client, id=position) for position, client in enumerate(remaining))
    return replace(population, clients=clients, tests=(*population.tests, TestSet(domain, "ood", examples)))


def check_rows(dataset: Dataset, rows: np.ndarray) -> None:
    """Raise UsageError if `rows`, which a partition gave to clients, include rows that no client may hold."""
    forbidden = np.setdiff1d(rows, dataset.rows())
    if len(forbidden) and not 0 <= forbidden[0] <= forbidden[-1] < len(dataset):
        row = forbidden[0] if forbidden[0] < 0 else forbidden[-1]
        raise UsageError(f"partition: gives clients row {row} of {dataset.name}; expected 0..{len(dataset) - 1}")
    if len(forbidden):
        domain = dataset.domains[dataset.domain[forbidden[0]]]
        raise UsageError(
            f"partition: gives clients row {forbidden[0]} of {dataset.name}, of {domain}, which is left out"
        )


def _check(domain: str, available: Iterable[str], name: str) -> None:
    domains: Sequence[str] = list(available)
    if len(domains) < 2:
        raise UsageError(f"leave_out={domain}: {name} has only one domain; leave_out needs two or more")
    if domain not in domains:
        raise UsageError(f"leave_out={domain}: no such domain in {name}; {suggestion(domain, domains)}")
