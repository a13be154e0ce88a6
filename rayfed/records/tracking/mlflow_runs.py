"""MLflow: a run per trial, in an MLflow experiment with the name of the experiment."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfed.records.tracking.base import About, plain_name

_MOST_PARAMS = 100  # that MLflow takes in one call
_LONGEST_PARAM = 500
# MLflow's own defaults try for minutes, longer than the end of a run waits for its trackers.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_STATUS = {"done": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}


class MLflow:
    """Logs to MLflow's tracking server, database or folder.

    Args:
        uri: As MLflow has it, such as http://server:5000 or sqlite:///runs.db, or a folder.
        here: The folder to which a relative folder belongs.
    """

    def __init__(self, uri: str, here: Path):
        self._uri = store_uri(uri, here)

    def begin(self, about: About) -> str:
        if self._uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow prefers databases, and asks
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.entities import Param

        self._client: Any = mlflow.MlflowClient(tracking_uri=self._uri)
        experiment = self._client.get_experiment_by_name(about.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(about.experiment)
        if about.known_as is not None and self._continued(about.known_as):
            self._run = about.known_as
            return self._run
        tags = {"trial": about.trial, "mlflow.source.name": "rayfed"}
        self._run = self._client.create_run(number, run_name=about.trial, tags=tags).info.run_id
        params = [Param(plain_name(key), str(value)[:_LONGEST_PARAM]) for key, value in about.config.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _MOST_PARAMS])
        return self._run

    def log(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        metrics = [Metric(plain_name(name), value, now, round) for name, value in finite.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, status: str, error: str | None) -> None:
        self._client.set_tag(self._run, "status", status)
        if error:
            self._client.set_tag(self._run, "error", error)
        self._client.set_terminated(self._run, _STATUS.get(status, "FAILED"))

    def _continued(self, run: str) -> bool:
        """Open an earlier run again; return False if this store does not have it."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run, status="RUNNING")
        except MlflowException:
            return False
        return True


def store_uri(uri: str, here: Path) -> str:
    """Return `uri` for MLflow, where a plain path means a folder."""
    return uri if "://" in uri or uri.startswith("databricks") else (here / uri).resolve().as_uri()
