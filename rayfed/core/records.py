"""The records that travel from hosts and the server to the Parquet tables: scores, rounds, and maps.

The columns of the tables `metrics` and `rounds` are derived from these types; see `rayfed.records.schema`.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SERVER = -1
"""The value of `Score.client` in a score that belongs to the server and not to a client."""
SPLITS = ("train", "val", "test", "ood")
POINTS = ("global", "downloaded", "trained", "adapted")
STAGES = ("setup", "round", "final")
SECONDS = ("broadcast", "train", "upload", "aggregate", "evaluate", "total")
"""The parts of a round whose wall-clock seconds are measured."""
INT32: Mapping[str, str] = {"arrow": "int32"}
"""Field metadata: a 32-bit column in Parquet, where an integer would get 64 bits."""


@dataclass(frozen=True, kw_only=True, order=True)
class Score:
    """The value of one metric: of the model at `point`, on the `n` examples of one client's `split`.

    Attributes:
        client: the client's number in the partition, or `SERVER`.
        value: accuracies are fractions of 1.
        unseen: whether the client took no part in training.
        higher_is_better: as the metric declares it, or `select.mode` says; where neither does, as of scalars that an
            algorithm logs, by the words of the metric's name (`rayfed.records.metric_names`).
    """

    client: int = field(default=SERVER, metadata=INT32)
    domain: str = ""
    split: str
    point: str
    metric: str
    value: float
    n: int
    unseen: bool = False
    higher_is_better: bool = field(compare=False)


class MapPoint(NamedTuple):
    """One example in a map of representations: its client, domain and class, and its coordinates in the plane."""

    client: int
    domain: str
    label: int
    x: float
    y: float


class RepresentationMap(NamedTuple):
    """A map of the representations of a split, at one point's model and one layer; `name` is the metric's."""

    name: str
    point: str
    split: str
    layer: str
    points: list[MapPoint]


EVENTS = ("trial restarted", "checkpoint damaged", "rounds added")
"""What may happen to a trial and to its checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a trial, and what it cost.

    Attributes:
        time: When it was noticed, in seconds since the epoch.
        event: One of `EVENTS`.
        detail: What happened, in words.
        round: The round under way.
        redone: The number of client trainings that had to be done again.
        seconds: The wall-clock seconds that were lost.
    """

    time: float = field(default_factory=time.time)
    event: str
    detail: str = ""
    round: int = field(default=0, metadata=INT32)
    redone: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class Record:
    """What one round leaves: its scores, and what it cost.

    Rounds are numbered alike everywhere: 0 is the setup before the first round, 1 to R are the rounds, and R + 1 is the
    final stage after the last one.

    Attributes:
        stage: one of `STAGES`.
        cohort: the number of clients that took part.
        sampled: the number of clients that were sampled for a round, of which some may have dropped out or been late.
        simulated_seconds: the duration of a round on the simulated clock; None without one.
        seconds: wall-clock seconds by part of the round, see `SECONDS`.
        bytes_down, bytes_up: bytes on the wire by field of the payload, over all clients of the round.
        bytes_to_hosts, bytes_from_hosts: bytes of tensors that the processes of server and hosts exchanged, also to
            score models; 0 where all clients run in the server's process.
        bytes_formula: bytes both ways by the formula of the method's paper; None where it has none.
        epsilon: the differential privacy spent so far; None without privacy.
        privacy_unit: what `epsilon` protects: `client`, all data of one client; `representation`, one vector;
            `rescaled coordinate`, one coordinate of a vector that was rescaled to [0, 1], while its others stay (see
            `rayfed.algorithms.local_dp_adcol`).
        busy: the seconds that each host worked on the exchanges of the round.
        predicted: the seconds that each host was predicted to work; None where nothing was measured before.
        gpu_bytes: the most GPU memory that tensors of one host took, from the end of its last training before the round
            to that of its training in it; None on CPUs.
        vmap_clients: The number of clients that hosts train at once, if it was measured in this round; else None.
    """

    stage: str
    round: int
    cohort: int
    scores: list[Score] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECONDS, 0.0))
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_to_hosts: int = 0
    bytes_from_hosts: int = 0
    bytes_formula: float | None = None
    epsilon: float | None = None
    privacy_unit: str | None = None
    maps: list[RepresentationMap] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    predicted: list[float] | None = field(default_factory=list)
    sampled: int | None = None
    simulated_seconds: float | None = None
    gpu_bytes: int | None = None
    vmap_clients: int | None = None

    @property
    def balance(self) -> float | None:
        """The mean over hosts of the seconds that they worked, as a share of the busiest host's; None without work."""
        return sum(self.busy) / len(self.busy) / max(self.busy) if any(self.busy) else None

    @property
    def busy_share(self) -> float | None:
        """The mean over hosts of the seconds that they worked, as a share of the round's; None without work."""
        total = self.seconds["total"]
        return sum(self.busy) / len(self.busy) / total if any(self.busy) and total > 0 else None

    @property
    def clients_per_second(self) -> float | None:
        """The clients of the round by its seconds; None where it took none."""
        total = self.seconds["total"]
        return self.cohort / total if total > 0 else None

    def add_work(self, busy: Mapping[int, float], predicted: Mapping[int, float] | None) -> None:
        """Add the seconds of one exchange, by the position of the host. Hosts that join later have a later one."""
        hosts = range(max(busy, default=-1) + 1)
        self.busy = _added(self.busy, [busy.get(host, 0.0) for host in hosts])
        if predicted is None or self.predicted is None:
            self.predicted = None
        else:
            self.predicted = _added(self.predicted, [predicted.get(host, 0.0) for host in hosts])

    def means(self, metric: str, point: str) -> dict[str, float]:
        """Return the mean of `metric` at `point` by split, over the participants that have a value; NaN if none has.

        Where no client was scored on a split, the mean is over the server's test sets.
        """
        values: dict[tuple[str, bool], list[float]] = {}
        for score in self.scores:
            if score.metric == metric and score.point == point and not score.unseen:
                values.setdefault((score.split, score.client != SERVER), []).append(score.value)
        return {split: _mean(of_key) for (split, _), of_key in sorted(values.items())}  # clients sort last, so they win


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan


def _added(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in itertools.zip_longest(one, other, fillvalue=0.0)]
