"""Weights & Biases: a run per trial (`tracking.wandb=PROJECT`)."""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfed.core.paths import expanded
from rayfed.records.trials import flattened

_STATE = "rayfed.json"
_OFFLINE_RUNS = "wandb/offline-run-*"  # where W&B writes them


class WandbRuns:
    """Logs each trial as a run of W&B, with the round as its step.

    `FOLDER/wandb/TRIAL/rayfed.json` has the id of the run, so that a trial that goes on continues its run. Without a
    login, runs are written offline. W&B writes them in a process of its own, which loses the last rounds when it is
    killed. So a trial that goes on writes its offline run anew, and `holds` says which rounds W&B's server has.

    Args:
        home: The folder of the experiment, if it is on a disk.
        experiment: Its name, by which W&B groups the runs.
    """

    key = "tracking.wandb"
    is_slow = True

    def __init__(self, home: Path | None, experiment: str):
        self._home = home
        self._experiment = experiment
        self._runs: dict[str, Any] = {}  # of open trials
        self._last: dict[str, int] = {}  # their last rounds
        self.notes: list[str] = []

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        options = values.get("tracking") or {}
        project = options.get("wandb")
        if not project:
            return
        import wandb

        folder = Path(expanded(options.get("folder") or self._home or "")) / "wandb" / trial
        folder.mkdir(parents=True, exist_ok=True)
        earlier = list(folder.glob(_OFFLINE_RUNS))
        config = {key: value for key, value in flattened(values) if not key.startswith("tracking.")}
        run = wandb.init(
            project=project,
            group=self._experiment,
            name=trial,
            id=_id_of_run(folder / _STATE, goes_on=continues is not None),
            resume="allow",
            config=config,
            dir=str(folder),
            mode=self._mode(wandb, folder),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        for replaced in earlier:
            shutil.rmtree(replaced, ignore_errors=True)
        self._runs[trial] = run
        self._last[trial] = run.step - 1

    def holds(self, trial: str) -> int | None:
        return self._last.get(trial)

    def record(self, trial: str, round: int, values: Mapping[str, float]) -> None:
        if trial not in self._runs or round <= self._last[trial]:
            return
        self._runs[trial].log(dict(values), step=round)
        self._last[trial] = round

    def end(self, trial: str, status: str) -> None:
        run = self._runs.pop(trial, None)
        self._last.pop(trial, None)
        if run is not None:
            run.summary["status"] = status
            run.finish(exit_code=int(status in ("failed", "diverged")))

    def _mode(self, wandb: Any, folder: Path) -> Any:
        """Return "offline" where nobody is logged in; None leaves the choice to W&B's own settings."""
        if os.environ.get("WANDB_MODE"):
            return None
        if os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False):
            return None
        if not self.notes:
            self.notes.append(
                f"{self.key}: nobody is logged in, so runs are offline; `wandb sync {folder}` uploads them"
            )
        return "offline"


def _id_of_run(file: Path, *, goes_on: bool) -> str:
    """Return the id of a trial's run: that in `file` if the trial goes on, else a new one, which is written there."""
    if goes_on and file.exists():
        return str(json.loads(file.read_text())["id"])
    made = secrets.token_hex(6)
    file.write_text(json.dumps({"id": made}))
    return made
