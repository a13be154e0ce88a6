"""Gauges of trials for Ray's dashboard and Prometheus, through `ray.util.metrics`."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.util.metrics import Gauge

from rayfed.core.records import Record
from rayfed.core.working_folder import enter
from rayfed.records.holdings import Holding
from rayfed.records.recorder import Recorder

_TRIAL = ("experiment", "trial", "algorithm")
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "running": ("1 while the trial runs, 0 afterwards", ()),
    "round": ("last finished round", ()),
    "rounds": ("rounds that the trial is going to have", ()),
    "score": ("the metric that chooses, at the trial's default point, mean over clients", ("metric", "split")),
    "clients_per_second": ("clients of the last round by its seconds", ()),
    "round_bytes": ("bytes on the wire in the last round, over all clients", ("direction",)),
    "round_seconds": ("seconds of the last round by part, as in the table rounds", ("part",)),
    "host_busy_seconds": ("seconds that a host worked on the exchanges of the last round", ("host",)),
    "epsilon": ("differential privacy spent so far", ()),
}
"""The description of each gauge, and its tags beside those of a trial; its name has the prefix `rayfed_` besides."""


class RecorderWithGauges(Recorder):
    """A recorder in a process of Ray, which shows as gauges what it records.

    All rounds of all trials pass through it, so neither hosts nor servers spend time on gauges.

    Args:
        folder, experiment, options: As for `Recorder`.
        here: The folder in which the command was given.
        variables: Environment variables of the command that trackers read. A process of a cluster that was there
            before has those of the cluster's start.
    """

    def __init__(
        self,
        folder: str,
        experiment: str,
        *,
        here: Path | None = None,
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ):
        if here is not None:
            enter(here)
        os.environ.update(variables or {})
        super().__init__(folder, experiment, **options)
        self._gauges = {
            name: Gauge(f"rayfed_{name}", description, (*_TRIAL, *tags)) for name, (description, tags) in GAUGES.items()
        }
        self._tags: dict[str, dict[str, str]] = {}  # by trial
        self._scored: dict[str, tuple[str, str]] = {}  # the metric that chooses and the point of each trial
        self._hosts: dict[str, int] = {}  # the number of hosts of each trial that have a gauge

    def begin(
        self,
        trial: str,
        values: Mapping[str, Any],
        rounds: int,
        keep_through_round: int | None,
        holdings: Sequence[Holding] = (),
    ) -> None:
        super().begin(trial, values, rounds, keep_through_round, holdings)
        algorithm = str(values["algorithm"]["name"])
        self._tags[trial] = {"experiment": self.experiment, "trial": trial, "algorithm": algorithm}
        self._scored[trial] = str(values["selection_metric"]), str(values["default_eval_point"])
        self._set(trial, "running", 1)
        self._set(trial, "rounds", rounds)
        self._set(trial, "round", keep_through_round or 0)

    def record(self, trial: str, record: Record) -> int | None:
        written = super().record(trial, record)
        self._set(trial, "round", record.round)
        metric, point = self._scored[trial]
        for split, value in record.means(metric, point).items():
            self._set(trial, "score", value, metric=metric, split=split)
        if (pace := record.clients_per_second) is not None:
            self._set(trial, "clients_per_second", pace)
        for direction, fields in (("down", record.bytes_down), ("up", record.bytes_up)):
            self._set(trial, "round_bytes", sum(fields.values()), direction=direction)
        for part, seconds in record.seconds.items():
            self._set(trial, "round_seconds", seconds, part=part)
        hosts = self._hosts[trial] = max(len(record.busy), self._hosts.get(trial, 0))
        for host in range(hosts):
            busy = record.busy[host] if host < len(record.busy) else 0.0  # an idle or lost host shows 0
            self._set(trial, "host_busy_seconds", busy, host=str(host))
        if record.epsilon is not None:
            self._set(trial, "epsilon", record.epsilon)
        return written

    def end(self, trial: str, values: Mapping[str, Any], *, begun: bool = False) -> None:
        super().end(trial, values, begun=begun)
        if trial in self._tags:
            self._set(trial, "running", 0)

    def _set(self, trial: str, name: str, value: float, **tags: str) -> None:
        self._gauges[name].set(value, self._tags[trial] | tags)
