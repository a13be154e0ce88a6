"""TensorBoard's event files, one folder per trial."""

import math
import shutil
from collections.abc import Mapping
from typing import Any

from rayfed.records.tracking.base import About

_FLUSH_SECONDS = 5


class TensorBoard:
    """Writes `FOLDER/tensorboard/TRIAL/events...`, and the hyperparameters with the last values at the end."""

    def begin(self, about: About) -> str:
        from tensorboardX import SummaryWriter

        folder = about.folder / "tensorboard" / about.trial
        if about.continues is None and folder.exists():
            shutil.rmtree(folder)  # of an earlier attempt, whose rows in the tables are replaced, too
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
