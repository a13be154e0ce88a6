"""Makes sure of the folder of results before anything starts."""

import tempfile
from pathlib import Path

from rayfed.core.errors import UsageError


def make_place(results: str, experiment: str) -> None:
    """Makes the folder of an experiment and writes into it; raises `UsageError` where it cannot be.

    Only trying tells: root may write by every rule that can be looked up, and not into /proc.
    """
    home = Path(results) / experiment
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        words = f"{home} cannot be written ({error.strerror or error}); give a folder that you may write to"
        raise UsageError(f"results={results}: {words}") from error
