"""Whether files are those that their authors published, by the checksums that torchvision carries."""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

_compared: set[Path] = set()  # a process says it once, though several data sets read the same file


def compare(paths: Iterable[Path], name: str) -> None:
    """Prints a line for each file whose md5 is not that of torchvision's class `name`; files unknown there pass.

    No error: a copy that was packed anew, or put into another order, may be what the user wants. To be called where
    files are read for the cache, not at every start.
    """
    known = published(name)
    for path in paths:
        wanted = known.get(path.name)
        if wanted is None or path in _compared:
            continue
        _compared.add(path)
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != wanted:
            print(
                f"rayfed: {path}: md5 {found}, but the published file has {wanted}; packed anew, changed or damaged",
                file=sys.stderr,
            )


def published(name: str) -> dict[str, str]:
    """The md5 of each file that torchvision's class `name` reads."""
    from rayfed.core import torchvision_cpu  # late: half a second and more to import

    torchvision_cpu.prepare()
    import torchvision

    owner = getattr(torchvision.datasets, name, None)
    lists = [getattr(owner, kind, ()) for kind in ("resources", "train_list", "test_list")]
    found = {file: md5 for entries in lists for file, md5 in entries}
    return found | {file: md5 for _, file, md5 in getattr(owner, "split_list", {}).values()}
