"""What a tracker is told about a trial."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rayfed.core.records import SERVER, Record

MOST_DOMAINS = 20
"""Domains that get a curve of their own; with more, only the mean over all clients has one."""


@dataclass(frozen=True, kw_only=True)
class About:
    """A trial that begins, or goes on.

    Attributes:
        config: The configuration, with dotted keys.
        folder: The local folder for a tracker's files.
        continues: The last round that is kept of an earlier attempt; None if the trial starts anew.
        known_as: What `begin` returned in that attempt; None if the trial starts anew.
    """

    experiment: str
    trial: str
    config: Mapping[str, Any]
    folder: Path
    continues: int | None = None
    known_as: str | None = None


class Tracker(Protocol):
    """One trial in one tracking tool. Every method may raise; the trial then goes on without the tracker."""

    def begin(self, about: About) -> str:
        """Open the trial, and return under which name the tool finds it again."""
        ...

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Add the values of a round; see `round_values`."""
        ...

    def end(self, status: str, error: str | None) -> None:
        """Close the trial; `status` is one of `rayfed.records.trials.STATUSES`."""
        ...


def round_values(record: Record) -> dict[str, float]:
    """Return what trackers show of a round, by name.

    `POINT/SPLIT/METRIC` is the mean over the participants, or over the server's test sets where no client has the
    split, and `POINT/SPLIT/METRIC.DOMAIN` the mean over those of a domain, if there are several. Unseen clients have
    names that begin with `unseen/`. `round/...` is what the round cost.
    """
    values: dict[str, list[float]] = defaultdict(list)
    domains: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with_clients = {(s.point, s.split, s.metric, s.unseen) for s in record.scores if s.client != SERVER}
    for score in record.scores:
        if score.client == SERVER and (score.point, score.split, score.metric, score.unseen) in with_clients:
            continue
        name = f"{'unseen/' if score.unseen else ''}{score.point}/{score.split}/{score.metric}"
        values[name].append(score.value)
        domains[name][score.domain].append(score.value)
    for name, by_domain in domains.items():
        if 1 < len(by_domain) <= MOST_DOMAINS:
            for domain, of_domain in by_domain.items():
                values[f"{name}.{domain}"] = of_domain
    return {name: sum(several) / len(several) for name, several in values.items()} | _costs(record)


def _costs(record: Record) -> dict[str, float]:
    costs: dict[str, float | None] = {
        "clients": float(record.cohort),
        "clients_per_second": record.clients_per_second,
        "bytes_down": float(sum(record.bytes_down.values())),
        "bytes_up": float(sum(record.bytes_up.values())),
        "bytes_to_hosts": record.bytes_to_hosts,
        "bytes_from_hosts": record.bytes_from_hosts,
        "epsilon": record.epsilon,
        "balance": record.balance,
        "gpu_bytes": record.gpu_bytes,
        "simulated_seconds": record.simulated_seconds,
        **{f"seconds/{part}": seconds for part, seconds in record.seconds.items()},
    }
    return {f"round/{name}": value for name, value in costs.items() if value is not None}


def plain_name(name: str) -> str:
    """Return `name` with the characters that every tool takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)
