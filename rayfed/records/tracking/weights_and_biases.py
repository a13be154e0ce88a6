"""Weights & Biases: a run per trial, in one group per experiment."""

from collections.abc import Mapping
from typing import Any

from rayfed.records.tracking.base import About


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
