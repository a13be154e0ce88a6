"""The records that travel from hosts and the server to the Parquet tables, and the rule by which a round is best.

The columns of the tables `metrics` and `rounds` are derived from these types; see `rayfed.records.files`.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

SERVER = -1
"""The value of `Score.client` in a score that belongs to the server and not to a client."""
SPLITS = ("train", "val", "test", "ood")
POINTS = ("global", "downloaded", "trained", "adapted")
STAGES = ("setup", "round", "final")
SECONDS = ("broadcast", "train", "upload", "aggregate", "evaluate", "total")
"""The parts of a round whose wall-clock seconds are measured."""
_LOWER_IS_BETTER = frozenset(
    {"loss", "error", "nll", "mse", "mae", "rmse", "ece", "brier", "perplexity", "mdl", "fid", "frechet", "entropy"}
    | {"divergence", "drift", "gradient"}
)
_FRACTIONS = frozenset({"accuracy", "acc", "auroc", "f1", "ece", "dice", "iou", "precision", "success"})
INT32: Mapping[str, str] = {"arrow": "int32"}
"""Field metadata: a 32-bit column in Parquet, where an integer would get 64 bits."""


@dataclass(frozen=True, kw_only=True, order=True)
class Score:
    """The value of one metric of the model at `point`, on the `n` examples of a client's `split`: a row of `metrics`.

    Attributes:
        client: The client's number in the partition, or `SERVER`.
        value: Accuracies are fractions of 1.
        unseen: Whether the client took no part in training.
        higher_is_better: What the metric declares, or else `select.mode`. The words of the metric's name decide where
            there is neither (`lower_is_better_by_name`): for a scalar that an algorithm logs, for example.
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


class Predictions(NamedTuple):
    """The outputs of the model at `point` for each example of a part, and its labels: a row of `predictions`.

    Attributes:
        client: The client's number in the partition, or `SERVER`.
        kind: What the outputs stand for; see `rayfed.core.outputs`.
        outputs: As metrics take them: a row per example, float32 [n, k].
        labels: Classes [n], or labels or numbers [n, k].
    """

    client: int
    domain: str
    split: str
    point: str
    kind: str
    outputs: "np.ndarray"
    labels: "np.ndarray"


class MapPoint(NamedTuple):
    """An example in a map of representations: its client, domain, class, coordinates, and the point of its model."""

    client: int
    domain: str
    label: int
    x: float
    y: float
    point: str = ""


class RepresentationMap(NamedTuple):
    """A map of the representations of a split at one layer of the model at `point`; `name` is that of the metric."""

    name: str
    point: str
    split: str
    layer: str
    points: list[MapPoint]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a trial, and what it cost.

    Attributes:
        time: When the trial went on, in seconds since the epoch.
        event: "trial restarted", "checkpoint damaged", "rounds added" or "hyperparameters changed".
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
    """The scores and the costs of a round.

    Rounds have the same numbers everywhere. 0 is the setup before the first round, and 1 to R are the rounds. R + 1 is
    the final stage after the last round.

    Attributes:
        stage: One of `STAGES`.
        cohort: The number of clients that took part.
        sampled: The number of clients that were sampled for a round; some may have dropped out or been late.
        simulated_seconds: The duration of a round on the simulated clock; None without one.
        clock_seconds: The time on the simulated clock at the end of the round.
        staleness_mean, staleness_max: How many updates the server made between the start of a client of the round and
            the round, as mean and maximum over clients; None in synchronous rounds.
        waiting: The number of clients that still train when an asynchronous round ends.
        seconds: Wall-clock seconds by part of the round, see `SECONDS`.
        bytes_down, bytes_up: Bytes on the wire by field of the payload, over all clients of the round.
        bytes_to_hosts, bytes_from_hosts: Bytes of tensors that the server's process sent to hosts and received from
            them, scoring included; 0 where all clients run in the server's process.
        bytes_formula: Bytes both ways by the formula of the method's paper; None where the paper has none.
        epsilon: The differential privacy spent so far; None without privacy.
        privacy_unit: What `epsilon` protects: `client`, all data of one client; `record`, one record of one client, and
            the most that any client has spent; `representation`, one vector;
            `rescaled coordinate`, one coordinate of a vector rescaled to [0, 1] (see `rayfed.algorithms.dp_adcol`).
        delta, accountant, neighbours: δ, how `epsilon` was computed, and which data sets nobody can tell apart; None
            where the method does not say.
        busy: The seconds that each host worked on the exchanges of the round.
        predicted: The seconds that each host was predicted to work; None where nothing was measured before.
        gpu_bytes: The most GPU memory that tensors of one host took since its training in the round before; None on
            CPUs.
        vmap_clients: The number of clients that hosts train at once, if the round measured it; else None.
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
    delta: float | None = None
    accountant: str | None = None
    neighbours: str | None = None
    maps: list[RepresentationMap] = field(default_factory=list)
    predictions: list[Predictions] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    predicted: list[float] | None = field(default_factory=list)
    sampled: int | None = None
    simulated_seconds: float | None = None
    clock_seconds: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    waiting: int | None = None
    gpu_bytes: int | None = None
    vmap_clients: int | None = None

    @property
    def balance(self) -> float | None:
        """The mean over hosts of their seconds of work, as a share of the busiest host's; None without work."""
        if any(self.busy):
            return sum(self.busy) / len(self.busy) / max(self.busy)
        return None

    @property
    def clients_per_second(self) -> float | None:
        """The clients of the round divided by its seconds; None if it took no time."""
        if self.seconds["total"] > 0:
            return self.cohort / self.seconds["total"]
        return None

    def add_work(self, busy: Mapping[int, float], predicted: Mapping[int, float] | None) -> None:
        """Add the seconds of one exchange, by the position of the host."""
        hosts = range(max(busy, default=-1) + 1)
        seconds = []
        for host in hosts:
            seconds.append(busy.get(host, 0.0))
        self.busy = _added(self.busy, seconds)
        if predicted is None or self.predicted is None:
            self.predicted = None
        else:
            expected = [predicted.get(host, 0.0) for host in hosts]
            self.predicted = _added(self.predicted, expected)

    def means(self, metric: str, point: str) -> dict[str, float]:
        """Return the mean of `metric` at `point` by split, over the participants that have a value; NaN if none has.

        Where no client was scored on a split, the mean is over the server's test sets.
        """
        values: dict[tuple[str, bool], list[float]] = {}
        for score in self.scores:
            if score.metric == metric and score.point == point and not score.unseen:
                key = (score.split, score.client != SERVER)
                values.setdefault(key, []).append(score.value)
        # of equal splits the last one stays, that of the clients
        in_order = sorted(values.items())
        return {split: _mean(of_key) for (split, _), of_key in in_order}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The metric that chooses rounds, hyperparameters and models (`select.*`).

    Attributes:
        metric: Its name in the table `metrics`.
        higher_is_better: Whether the highest value is the best one.
        point: Which model is scored, one of `POINTS`.
    """

    metric: str = "accuracy"
    higher_is_better: bool = True
    point: str = "global"

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Selection":
        """Return the selection that `values` wrote to a row of the table `trials`."""
        metric = row.get("selection_metric") or "accuracy"
        lower = row.get("selection_mode") == "min"
        return cls(metric=metric, higher_is_better=not lower, point=str(row["default_eval_point"]))

    def values(self) -> dict[str, Any]:
        """Return the columns of the table `trials` that hold the selection."""
        mode = "min"
        if self.higher_is_better:
            mode = "max"
        return {"default_eval_point": self.point, "selection_metric": self.metric, "selection_mode": mode}

    def score(self, record: Record) -> float | None:
        """Return the mean over the participants' validation data; None if the round was not scored on them."""
        return record.means(self.metric, self.point).get("val")

    def gain(self, score: float) -> float:
        """Return the value to maximise: `score`, or its negative where lower is better."""
        if self.higher_is_better:
            return score
        return -score


@dataclass
class BestRound:
    """Finds the round that the rule `selected` of reports picks, while a trial runs.

    As in reports, values count to twelve significant digits, and the earliest round wins a tie.

    Attributes:
        score, round: The best score so far, as a gain, and its round; None before the first one.
    """

    selection: Selection
    score: float | None = None
    round: int | None = None

    def add(self, record: Record) -> None:
        """Compare the score of a round, if it has one, with the best so far."""
        score = self.selection.score(record)
        if score is None or math.isnan(score):
            return
        gain = float(f"{self.selection.gain(score):.11e}")
        if self.score is None or gain > self.score:
            self.score = gain
            self.round = record.round

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return {"score": self.score, "round": self.round}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        vars(self).update(state)


def lower_is_better_by_name(metric: str) -> bool:
    """Return whether the name of a metric that declares nothing says that lower is better (`test_loss`)."""
    return not _LOWER_IS_BETTER.isdisjoint(_words(metric))


def is_fraction(metric: str) -> bool:
    """Return whether `metric` is a fraction of 1, shown in percent (`accuracy_class_3`, `mean_iou`, …)."""
    return not _FRACTIONS.isdisjoint(_words(metric))


def _words(metric: str) -> list[str]:
    """Return the words of a metric's name, which `_` joins, without the layer after `@` (`mdl@logits`)."""
    name, _, _ = metric.lower().partition("@")
    return name.replace("-", "_").split("_")


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN."""
    defined = []
    for value in values:
        if not math.isnan(value):
            defined.append(value)
    if defined:
        return math.fsum(defined) / len(defined)
    return math.nan


def _added(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in itertools.zip_longest(one, other, fillvalue=0.0)]
