"""The folder of an experiment, which is made before anything starts."""

import uuid

from rayfed.core.errors import UsageError
from rayfed.records.storage import one_line, open_storage


def make_experiment_folder(results: str, experiment: str) -> None:
    """Make the folder of an experiment, and check that it can be written to.

    The check writes a file, because permissions alone do not tell: root has all of them, and cannot write into /proc.

    Args:
        results: A path or URL; see `rayfed.records.storage.open_storage`.

    Raises:
        UsageError: the folder cannot be made or written to, or the object store cannot be reached.
    """
    home, name = open_storage(results).child(experiment), f".writable-{uuid.uuid4().hex}"
    try:
        home.write(name, b"")
        home.delete(name)
    except OSError as error:
        words = f"{home.location} cannot be written ({error.strerror or one_line(error)})"
        raise UsageError(f"results={results}: {words}; give a folder that you may write to") from error


def join(results: str, *names: str) -> str:
    """Return the path or URL of a file or folder of results."""
    return "/".join([results.rstrip("/"), *names])
