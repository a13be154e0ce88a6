"""Weights & Biases: a run per trial (`tracking.wandb=PROJECT`)."""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfed.core.paths import expanded
from rayfed.records.trials import flattened

_STATE = "rayfed.json"


class WandbRuns:
    """Logs each trial as a run of W&B, with the round as its step.

    `FOLDER/wandb/TRIAL/rayfed.json` has the id of the run and the last round that it was given, so that a trial that
    goes on continues its run, and no round is logged twice. Without a login, runs are written offline.

    Args:
        home: The folder of the experiment, if it is on a disk.
        experiment: Its name, by which W&B groups the runs.
    """

    key = "tracking.wandb"
    is_slow = True

    def __init__(self, home: Path | None, experiment: str):
        self._home, self._experiment = home, experiment
        self._runs: dict[str, Any] = {}
        self._states: dict[str, dict[str, Any]] = {}  # of open trials
        self._files: dict[str, Path] = {}
        self.notes: list[str] = []

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        options = values.get("tracking") or {}
        project = options.get("wandb")
        if not project:
            return
        import wandb

        folder = Path(expanded(options.get("folder") or self._home or "")) / "wandb" / trial
        folder.mkdir(parents=True, exist_ok=True)
        self._files[trial] = folder / _STATE
        state: dict[str, Any] = {"id": secrets.token_hex(6), "last": -1}
        if continues is not None and self._files[trial].exists():
            state = json.loads(self._files[trial].read_text())
        self._states[trial] = state
        config = {key: value for key, value in flattened(values) if not key.startswith("tracking.")}
        self._runs[trial] = wandb.init(
            project=project,
            group=self._experiment,
            name=trial,
            id=state["id"],
            resume="allow",
            config=config,
            dir=str(folder),
            mode=self._mode(wandb, folder),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def record(self, trial: str, round: int, values: Mapping[str, float]) -> None:
        state = self._states.get(trial)
        if state is None or round <= state["last"]:
            return
        self._runs[trial].log(dict(values), step=round)
        state["last"] = round
        made = self._files[trial].with_suffix(".new")
        made.write_text(json.dumps(state))
        made.replace(self._files[trial])

    def end(self, trial: str, status: str) -> None:
        run = self._runs.pop(trial, None)
        self._states.pop(trial, None)
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
