"""Gauges of trials on Ray's metrics, which its dashboard and Grafana show (`docs/grafana.json`)."""

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Gauge

from rayfed.core.round_record import Selection

GAUGES = {
    "rayfed_round": "The last round of a trial",
    "rayfed_validation": "The mean validation score of the metric that chooses rounds",
    "rayfed_clients_per_second": "The clients that a trial trains per second",
    "rayfed_gpu_bytes": "The most GPU memory that a host of a trial has used in the last round",
}
"""The gauges by name, each with the tag `trial`. Ray puts `ray_` before the names."""


class Gauges:
    """A tracker that sets gauges."""

    key = "the gauges of Ray"

    def __init__(self) -> None:
        self._gauges = {name: Gauge(name, about, tag_keys=("trial",)) for name, about in GAUGES.items()}
        self._scores: dict[str, str] = {}  # the name of the validation score of open trials

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        selection = Selection.of(values)
        self._scores[trial] = f"{selection.point}/val/{selection.metric}"

    def record(self, trial: str, round: int, values: Mapping[str, float]) -> None:
        found = {
            "rayfed_round": float(round),
            "rayfed_validation": values.get(self._scores.get(trial, "")),
            "rayfed_clients_per_second": values.get("round/clients_per_second"),
            "rayfed_gpu_bytes": values.get("round/gpu_bytes"),
        }
        for name, value in found.items():
            if value is not None:
                self._gauges[name].set(value, tags={"trial": trial})

    def end(self, trial: str, status: str) -> None:
        self._scores.pop(trial, None)
