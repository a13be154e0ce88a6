"""Published values beside the results of a sweep: a file of the experiment, which reports read."""

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rayfed.records.storage import Storage

FILE = "published.json"


class PublishedValue(NamedTuple):
    """A value that somebody else published for the same method.

    Attributes:
        trials: The names of our trials of the method, one for each seed.
        column: The header of the column of our tables: AVG, worst or a domain.
        mean: As tables show it, so accuracies are in percent.
        sd: The standard deviation over their seeds; None if they have none.
    """

    trials: tuple[str, ...]
    column: str
    mean: float
    sd: float | None


@dataclass(frozen=True)
class Published:
    """Published values of a sweep.

    Attributes:
        source: Who published them.
        where: The file, the table or the page in which they stand.
        seeds: The number of their seeds.
        metric, split: What was measured, as in the table `metrics`.
        values: The values.
        changed: The keys of the command that make our configuration another one than the published.
    """

    source: str
    where: str
    seeds: int
    metric: str
    split: str
    values: tuple[PublishedValue, ...]
    changed: tuple[str, ...] = ()


def write_published(home: Storage, published: Published) -> None:
    """Write the values to the folder of an experiment."""
    content = asdict(published) | {"values": [value._asdict() for value in published.values]}
    home.write(FILE, json.dumps(content, indent=1).encode())


def read_published(home: Storage) -> Published | None:
    """Return the values of an experiment; None if it has none, or none that can be read."""
    try:
        content: dict[str, Any] = json.loads(home.read(FILE))
        values = [PublishedValue(**value | {"trials": tuple(value["trials"])}) for value in content.pop("values")]
        changed = tuple(content.pop("changed"))
        return Published(**content, values=tuple(values), changed=changed)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
