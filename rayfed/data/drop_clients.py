"""Datasets that know whose each example is, and some of whose clients can be left out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class DropClients:
    """The option that leaves clients out."""

    drop_clients: list[int] = option([], help="clients to leave out, by their numbers in the files")

    def remaining_rows(self, client: np.ndarray, path: Path) -> np.ndarray:
        """The rows of all other clients, of the files at `path`.

        Raises:
            UsageError: a client that is not there, or none that is left.
        """
        known = np.unique(client)
        unknown = sorted(set(self.drop_clients) - set(known.tolist()))
        if unknown:
            raise UsageError(
                f"data.drop_clients={self.drop_clients}: {path} has no client {unknown[0]}; "
                f"it has {len(known)} clients, {known[0]}..{known[-1]}"
            )
        kept = np.flatnonzero(~np.isin(client, self.drop_clients))
        if not len(kept):
            raise UsageError(f"data.drop_clients={self.drop_clients}: leaves no client of {path}")
        return kept
