"""MLflow: a run per trial (`tracking.mlflow=URI`)."""

import os
import time
from collections.abc import Mapping
from typing import Any

from rayfed.records.tracking import NOT_IN_TAGS
from rayfed.records.trials import flattened

_TAG = "rayfed.trial"
_MOST_PARAMS = 100  # that MLflow takes at a time
_LONGEST = 500  # characters of a parameter
_STATUSES = {"done": "FINISHED", "stopped": "FINISHED", "failed": "FAILED", "diverged": "FAILED"}


class MlflowRuns:
    """Logs each trial as a run of MLflow, with the round as the step of its metrics.

    A trial that goes on continues its run. MLflow itself says which steps each metric has, so none is logged twice, and
    those that it lacks are logged. A trial that starts anew deletes its earlier run.

    Args:
        experiment: The name of the experiment, in MLflow as well.
    """

    key = "tracking.mlflow"
    is_slow = True

    def __init__(self, experiment: str):
        self._experiment = experiment
        self._clients: dict[str, Any] = {}  # by URI
        self._runs: dict[str, tuple[Any, str]] = {}  # the client and the run of open trials
        self._last: dict[str, dict[str, int]] = {}  # the last step of each metric of open trials
        self.notes: list[str] = []

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        uri = (values.get("tracking") or {}).get("mlflow")
        if not uri:
            return
        client = self._client(uri)
        known = client.get_experiment_by_name(self._experiment)
        if known is None:
            experiment = client.create_experiment(self._experiment)
        else:
            experiment = known.experiment_id
        earlier = client.search_runs(
            [experiment], f"tags.`{_TAG}` = '{trial}'", order_by=["attributes.start_time DESC"]
        )
        if continues is not None and earlier:
            run = earlier[0].info.run_id
            client.update_run(run, status="RUNNING")
            self._last[trial] = {}
            for name in earlier[0].data.metrics:
                history = client.get_metric_history(run, name)
                self._last[trial][name] = max(metric.step for metric in history)
        else:
            for one in earlier:
                client.delete_run(one.info.run_id)
            run = client.create_run(experiment, run_name=trial, tags={_TAG: trial}).info.run_id
            self._log_configuration(client, run, values)
            self._last[trial] = {}
        self._runs[trial] = client, run

    def holds(self, trial: str) -> int | None:
        if trial not in self._runs:
            return None
        return max(self._last[trial].values(), default=-1)

    def record(self, trial: str, round: int, values: Mapping[str, float]) -> None:
        if trial not in self._runs:
            return
        from mlflow.entities import Metric

        client, run = self._runs[trial]
        last = self._last[trial]
        now = int(time.time() * 1000)
        metrics = {}
        for name, value in values.items():
            name = NOT_IN_TAGS.sub("_", name)
            if last.get(name, -1) < round:
                metrics[name] = Metric(name, float(value), now, round)
        client.log_batch(run, metrics=list(metrics.values()))
        last.update(dict.fromkeys(metrics, round))

    def end(self, trial: str, status: str) -> None:
        self._last.pop(trial, None)
        client, run = self._runs.pop(trial, (None, ""))
        if client is not None:
            client.set_terminated(run, _STATUSES.get(status, "KILLED"))

    def _client(self, uri: str) -> Any:
        if uri not in self._clients:
            from mlflow import MlflowClient

            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # for folders, which MLflow no longer favours
            self._clients[uri] = MlflowClient(uri)
        return self._clients[uri]

    def _log_configuration(self, client: Any, run: str, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = []
        for key, value in flattened(values):
            if not key.startswith("tracking."):
                params.append(Param(NOT_IN_TAGS.sub("_", key), str(value)[:_LONGEST]))
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run, params=params[first : first + _MOST_PARAMS])
