"""`data.without`: clients that are left out of the data by name. Imported without torch and NumPy, to check the key."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.core.options import checked, is_near, suggestion
from rayfed.core.words import first_few

KEY = "without"
HELP = "clients that are left out, by name, domain or number (client-3); the others keep their examples"
MOST_NAMES = 12
"""The most names of clients in a message."""


def names_in(options: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names in `data.without`, each once and sorted, so that their order changes no trial."""
    value = (options or {}).get(KEY)
    given: Any = checked(value, str | list[str] | None, {}, where=f"data.{KEY}")
    if given is None:
        return ()
    if isinstance(given, str):
        given = [given]
    return tuple(sorted(set(given)))


def other_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of the dataset's own class."""
    others = dict(options or {})
    others.pop(KEY, None)
    return others


def by_domain_or_number(domains: Sequence[str]) -> list[Sequence[str]]:
    """Return the names of clients that have no names of their own, for `remaining`: domains, then numbers."""
    numbered = [f"client-{number}" for number in range(len(domains))]
    return [domains, numbered]


def remaining(names: Sequence[str], data: str, columns: Sequence[Sequence[str]]) -> list[int]:
    """Return the places of the clients that stay.

    Args:
        names: The names in `data.without`.
        data: The name of the dataset, for messages.
        columns: What the N clients are called, [N] each. A name counts in the first column that has it.

    Raises:
        UsageError: No client has such a name, or all clients are left out.
    """
    everyone = set(range(len(columns[0])))
    left_out: set[int] = set()
    for name in names:
        left_out.update(_places(name, data, columns))
    if left_out == everyone:
        raise UsageError(f"data.{KEY}={', '.join(names)}: leaves no client of {data} to train on")
    return sorted(everyone - left_out)


def _places(name: str, data: str, columns: Sequence[Sequence[str]]) -> list[int]:
    """Return the places of the clients with a name in the first of `columns` that has it."""
    for column in columns:
        if name in column:
            return [place for place, known in enumerate(column) if known == name]
    raise UsageError(f"data.{KEY}={name}: no such client in {data}; {_known(name, columns)}")


def _known(name: str, columns: Sequence[Sequence[str]]) -> str:
    """Return the names that clients have; of many, the one that may be meant, or the first ones."""
    known = list(dict.fromkeys(columns[0]))
    if len(known) == 1:
        known = list(columns[-1])
    if len(known) <= MOST_NAMES:
        return f"known: {', '.join(known)}"
    everything = list(chain(*columns))
    if is_near(name, everything):
        return suggestion(name, everything)
    return f"known: {', '.join(known[:MOST_NAMES])}, … ({len(known):,} in all)"


def described(names: Sequence[str], kept: int, clients: int) -> str:
    """Return who is left out, such as "1 of 4 clients (va)"; empty without names."""
    if not names:
        return ""
    return f"{clients - kept:,} of {clients:,} clients ({first_few(names, MOST_NAMES)})"
