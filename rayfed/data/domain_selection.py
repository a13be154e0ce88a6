"""Which domains of a dataset are used, and which of them nobody holds."""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.core.errors import UsageError
from rayfed.core.options import option, suggestion
from rayfed.data.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class DomainSelection:
    """The options of datasets that are made of several domains."""

    name: ClassVar[str]

    domains: list[str] = option([], help="which domains, in this order; empty: all")
    held_out: list[str] = option([], help='domains that nobody holds: the "ood" test sets')

    def load(self) -> Dataset:
        """The examples of the domains in use."""
        raise NotImplementedError

    def available_domains(self) -> tuple[str, ...]:
        """All domains that there are."""
        raise NotImplementedError

    def selected_domains(self) -> tuple[str, ...]:
        """The domains in use, those that nobody holds among them.

        Raises:
            UsageError: a name that is unknown or given twice; a domain that nobody holds and that is not in use, or
                nothing but such domains.
        """
        known = self.available_domains()
        for key in ("domains", "held_out"):
            given = getattr(self, key)
            for name in given:
                if name not in known:
                    raise UsageError(f"data.{key}={name}: no such domain; {suggestion(name, known)}")
            if len(set(given)) < len(given):
                raise UsageError(f"data.{key}={given}: a domain is named twice")
        used = tuple(self.domains) or known
        if not set(self.held_out) <= set(used):
            raise UsageError(f"data.held_out={self.held_out}: not all of them are in data.domains={list(used)}")
        if set(self.held_out) == set(used):
            raise UsageError(f"data.held_out={self.held_out}: leaves no domain of data.domains to train on")
        return used
