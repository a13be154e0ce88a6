"""Gauges of the trials that run, among the metrics of Ray, which Prometheus collects and Grafana draws."""

from ray.util.metrics import Gauge

from rayfed.core.records import Record
from rayfed.records.recorder import Progress

_GAUGES = {
    "round": "The last round of the trial that was recorded",
    "score": "The last value of the metric that selects rounds: on validation examples; without any, on test examples",
    "busy": "The share of the last round during which its hosts trained clients, the mean over hosts",
}


class Gauges:
    """What Ray's metrics show of each trial, as `ray_rayfed_round`, `ray_rayfed_score` and `ray_rayfed_busy`."""

    def __init__(self) -> None:
        tags = {"score": ("trial", "metric", "split")}
        self._gauges = {
            name: Gauge(f"rayfed_{name}", text, tags.get(name, ("trial",))) for name, text in _GAUGES.items()
        }

    def show(self, progress: Progress, record: Record) -> None:
        """Show a round of a trial."""
        trial = {"trial": progress.trial}
        self._gauges["round"].set(record.round, trial)
        if (share := record.busy_share) is not None:
            self._gauges["busy"].set(share, trial)
        split, score = ("test", progress.test) if progress.val is None else ("val", progress.val)
        if score is not None:
            self._gauges["score"].set(score, trial | {"metric": progress.selection.metric, "split": split})
