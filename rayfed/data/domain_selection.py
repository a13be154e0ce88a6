"""The options that select the domains of a dataset and hold some of them out."""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.core.errors import UsageError
from rayfed.core.options import option, suggestion
from rayfed.data.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class DomainSelection:
    """Options of datasets with several domains."""

    name: ClassVar[str]

    domains: list[str] = option([], help="domains to use, in this order; empty: all")
    held_out: list[str] = option([], help='domains that no client holds: the "ood" test sets')

    def load(self) -> Dataset:
        """Return the examples of the selected domains."""
        raise NotImplementedError

    def available_domains(self) -> tuple[str, ...]:
        """Return the names of all domains of the dataset."""
        raise NotImplementedError

    def selected_domains(self) -> tuple[str, ...]:
        """Return the domains in use, including those that are held out.

        Raises:
            UsageError: A name is unknown or repeated, a held-out domain is not in use, or all domains are held out.
        """
        available = self.available_domains()
        for key in ("domains", "held_out"):
            names = getattr(self, key)
            for name in names:
                if name not in available:
                    raise UsageError(f"data.{key}={name}: no such domain; {suggestion(name, available)}")
            if len(set(names)) < len(names):
                raise UsageError(f"data.{key}={names}: a domain is named twice")
        selected = tuple(self.domains) or available
        if not set(self.held_out) <= set(selected):
            raise UsageError(f"data.held_out={self.held_out}: not all of them are in data.domains={list(selected)}")
        if set(self.held_out) == set(selected):
            raise UsageError(f"data.held_out={self.held_out}: leaves no domain of data.domains to train on")
        return selected
