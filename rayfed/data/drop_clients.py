"""The option that drops clients of a dataset whose examples belong to clients."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class DropClients:
    """Option to drop clients."""

    drop_clients: list[int] = option([], help="clients to drop, by their numbers in the files")

    def remaining_rows(self, client: np.ndarray, path: Path) -> np.ndarray:
        """Return the rows of the clients that are not dropped; `path` is for error messages.

        Raises:
            UsageError: A client to drop does not exist, or no client would be left.
        """
        present = np.unique(client)
        unknown = sorted(set(self.drop_clients) - set(present.tolist()))
        if unknown:
            raise UsageError(
                f"data.drop_clients={self.drop_clients}: {path} has no client {unknown[0]}; "
                f"it has {len(present)} clients, {present[0]}..{present[-1]}"
            )
        return np.flatnonzero(~np.isin(client, self.drop_clients))
