"""Checkpoints without the tables of a trial."""

from rayfed.records.recorder import Recorder
from rayfed.records.storage import storage_errors


class CheckpointRecorder(Recorder):
    """A recorder of the checkpoints of trials that were not begun, so that there are no rows to write before."""

    def begin_checkpoint(self, trial: str) -> int:
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).begin()
