"""The folder of an experiment, which is made before anything starts."""

import tempfile
from pathlib import Path

from rayfed.core.errors import UsageError


def make_experiment_folder(results: str, experiment: str) -> None:
    """Make the folder of an experiment, and check that it can be written to.

    The check writes a file, because permissions alone do not tell: root has all of them, and cannot write into /proc.

    Raises:
        UsageError: the folder cannot be made or written to.
    """
    home = Path(results) / experiment
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        words = f"{home} cannot be written ({error.strerror or error}); give a folder that you may write to"
        raise UsageError(f"results={results}: {words}") from error
