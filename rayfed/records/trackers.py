"""The tracking tools: TensorBoard, Weights & Biases and MLflow, and what must be there before they start."""

import importlib.util
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from rayfed.core.errors import UsageError
from rayfed.records.storage import is_url

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
_CONNECT_SECONDS = 5
_FLUSH_SECONDS = 5  # of TensorBoard's files
_MOST_PARAMS = 100  # that MLflow takes in one call
_LONGEST_PARAM = 500
# MLflow's own defaults try for minutes, longer than the end of a run waits for its trackers.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_MLFLOW_STATUS = {"done": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}


@dataclass(frozen=True)
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
        """Open the trial, and return the name by which the tool finds it again."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Add the values of a round; see `rayfed.records.tracking.round_values`."""

    def end(self, status: str, error: str | None) -> None:
        """Close the trial; `status` is one of `rayfed.records.trials.STATUSES`."""


class TensorBoard:
    """Writes `FOLDER/tensorboard/TRIAL/events...`, and the hyperparameters with the last values at the end."""

    def begin(self, about: About) -> str:
        from tensorboardX import SummaryWriter

        folder = about.folder / "tensorboard" / about.trial
        if about.continues is None and folder.exists():
            shutil.rmtree(folder)  # an earlier attempt, whose rows in the tables are replaced, too
        purge = None if about.continues is None else about.continues + 1  # rounds that the trial repeats
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=_FLUSH_SECONDS)
        self._config = about.config
        self._last: dict[str, float] = {}
        return about.trial

    def log(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._last |= {name: value for name, value in values.items() if not name.startswith("round/")}

    def end(self, status: str, error: str | None) -> None:
        from tensorboardX.summary import hparams

        shown = {key: value for key, value in self._config.items() if isinstance(value, (bool, int, float, str))}
        finite = {name: value for name, value in self._last.items() if math.isfinite(value)}
        for summary in hparams({**shown, "status": status}, finite):
            self._writer.file_writer.add_summary(summary)
        self._writer.close()


class WeightsAndBiases:
    """Logs to a project of Weights & Biases, or, with WANDB_MODE=offline, to `FOLDER/wandb`."""

    def __init__(self, project: str):
        self._project = project

    def begin(self, about: About) -> str:
        import wandb

        about.folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=self._project,
            group=about.experiment,
            name=about.trial,
            config=dict(about.config),
            dir=str(about.folder),
            id=about.known_as,
            resume="allow" if about.known_as else None,
            reinit="create_new",  # trials of a sweep run at the same time, and the user may have a run of their own
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
        )
        # W&B's own steps only grow, and a trial that goes back to a checkpoint repeats rounds.
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")
        return str(self._run.id)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log({"round": round, **values})

    def end(self, status: str, error: str | None) -> None:
        self._run.summary.update({"status": status, **({"error": error} if error else {})})
        self._run.finish(exit_code=0 if status in ("done", "stopped") else 1)


class MLflow:
    """Logs to MLflow's tracking server, database or folder.

    Args:
        uri: MLflow's tracking URI, such as http://server:5000 or sqlite:///runs.db, or a folder.
        here: The folder to which a relative folder belongs.
    """

    def __init__(self, uri: str, here: Path):
        self._uri = store_uri(uri, here)

    def begin(self, about: About) -> str:
        if self._uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else MLflow refuses folders
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
        params = [Param(_plain_name(key), str(value)[:_LONGEST_PARAM]) for key, value in about.config.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _MOST_PARAMS])
        return self._run

    def log(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        metrics = [Metric(_plain_name(name), value, now, round) for name, value in finite.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, status: str, error: str | None) -> None:
        self._client.set_tag(self._run, "status", status)
        if error:
            self._client.set_tag(self._run, "error", error)
        self._client.set_terminated(self._run, _MLFLOW_STATUS.get(status, "FAILED"))

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


def _plain_name(name: str) -> str:
    """Return `name` with _ in place of characters that MLflow does not take."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def check_trackers(options: Mapping[str, Any], results: str) -> None:
    """Raise UsageError if a tracker of the group `tracking.*` lacks its package, its login, its server or a folder."""
    for key, package in _PACKAGES.items():
        if options[key] and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"tracking.{key}={_shown(options[key])}: the package {package} is not installed; "
                "pip install 'rayfed-sim[tracking]'"
            )
    for key in ("tensorboard", "wandb"):
        if options[key] and options["folder"] is None and is_url(results):
            raise UsageError(
                f"tracking.{key}={_shown(options[key])}: needs a local folder, and results={results} is none; give "
                "tracking.folder"
            )
    if options["wandb"]:
        _check_login(options["wandb"])
    if options["mlflow"]:
        _check_server(options["mlflow"])


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_login(project: str) -> None:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return
    import wandb

    if not wandb.setup().settings.api_key and not wandb.api.api_key:
        raise UsageError(
            f"tracking.wandb={project}: not logged in to Weights & Biases; run wandb login, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline and upload later with wandb sync"
        )


def _check_server(uri: str) -> None:
    """Raise UsageError if nothing listens at the address of a server, where MLflow itself would try for minutes."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        reason = f"no server answers at {parts.hostname}:{port} ({error.strerror or error})"
        raise UsageError(f"tracking.mlflow={uri}: {reason}; start it, or give a folder") from error
