"""What shows the rounds of trials beside the tables. The recorder calls it, so that no trial waits for it.

Every round of every trial passes through the recorder, so the axis has the true rounds, of single runs and of sweeps.
"""

import contextlib
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rayfed.core.errors import UsageError
from rayfed.core.paths import expanded
from rayfed.records.storage import Storage, is_url
from rayfed.records.trials import flattened

_FLUSH_SECONDS = 5.0
_LONGEST = 200  # characters of a failure
_NOT_IN_TAGS = re.compile(r"[^-/\w.]")


class Tracker(Protocol):
    """Shows the rounds of trials somewhere. Its exceptions end what it shows of a trial, and never the trial.

    Attributes:
        key: The option that switches it on, for messages.
    """

    key: str

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        """Open a trial, or leave it out.

        Args:
            values: The trial's columns in `trials`; `rayfed.records.trials.flattened` gives their dotted names.
            continues: The round after which the trial goes on, whose later rounds are repeated; None: it starts anew.
        """

    def record(self, trial: str, round: int, values: Mapping[str, float]) -> None:
        """Show the values of a round by name (see `RoundReport`), if the trial was not left out."""

    def end(self, trial: str, status: str) -> None:
        """Close a trial that may be open; `status` is one of `rayfed.records.trials.STATUSES`."""


class Trackers:
    """Calls trackers. If one fails, its trial goes on without it."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = trackers
        self._failed: set[tuple[str, str]] = set()  # trackers with a trial that they no longer show
        self._failures: dict[str, list[str]] = {}  # by line, the trials

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        """Open a trial; see `Tracker.begin`."""
        self.end(trial, "lost")  # an earlier attempt that did not end
        for tracker in self._trackers:
            self._failed.discard((tracker.key, trial))
            with self._left_out_on_error(tracker, trial):
                tracker.begin(trial, values, continues)

    def record(self, trial: str, round: int, values: Mapping[str, float]) -> None:
        """Show the values of a round; see `Tracker.record`."""
        for tracker in self._trackers:
            if (tracker.key, trial) not in self._failed:
                with self._left_out_on_error(tracker, trial):
                    tracker.record(trial, round, values)

    def end(self, trial: str, status: str) -> None:
        """Close a trial; see `Tracker.end`."""
        for tracker in self._trackers:
            if (tracker.key, trial) not in self._failed:
                with self._left_out_on_error(tracker, trial):
                    tracker.end(trial, status)

    def failures(self) -> list[str]:
        """Return a line on each kind of failure."""
        lines = []
        for failure, trials in self._failures.items():
            who = trials[0]
            if len(trials) > 1:
                who += f" (and {len(trials) - 1} more)"
            lines.append(f"{who}: {failure}; the trial went on without it")
        return lines

    @contextlib.contextmanager
    def _left_out_on_error(self, tracker: Tracker, trial: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a foreign package or a disk
            self._failed.add((tracker.key, trial))
            lines = str(error).strip().splitlines() or [""]
            words = lines[0][:_LONGEST]
            failure = f"{tracker.key} failed ({type(error).__name__}: {words})"
            self._failures.setdefault(failure, []).append(trial)


class TensorBoard:
    """Writes `FOLDER/tensorboard/TRIAL/events...`, and at the end the hyperparameters with the last values.

    A round is one event with all of its values, written without a thread: a recorder may have hundreds of open trials.

    Args:
        home: The folder of the experiment.
        here: The folder to which a relative `tracking.folder` belongs.
        in_sweep: Whether the trials belong to a sweep, which writes the files unless they are declined.
    """

    key = "tracking.tensorboard"

    def __init__(self, home: Storage, here: Path, *, in_sweep: bool = False):
        self._home = home
        self._here = here
        self._in_sweep = in_sweep
        self._writers: dict[str, Any] = {}  # of open trials
        self._configs: dict[str, dict[str, Any]] = {}
        self._last: dict[str, dict[str, float]] = {}  # the last values of open trials
        self._flushed = time.monotonic()

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        options = values.get("tracking") or {}
        place = options.get("folder") or self._home.local
        wanted = options.get("tensorboard")
        if wanted is None:
            wanted = bool(options) and self._in_sweep and place is not None
        if not wanted:
            return
        from tensorboardX.event_file_writer import EventsWriter

        folder = self._here / expanded(place or "") / "tensorboard" / trial
        if continues is None and folder.exists():
            shutil.rmtree(folder)  # of an earlier attempt, whose rows in the tables are dropped, too
        os.makedirs(folder, exist_ok=True)
        files = len(list(folder.glob("events.*")))
        names_of_files = f".{files:04d}"  # names have seconds only
        self._writers[trial] = EventsWriter(str(folder / "events"), names_of_files)
        self._last[trial] = {}
        self._configs[trial] = {}
        for key, value in flattened(values):
            if isinstance(value, (bool, int, float, str)) and not key.startswith("tracking."):
                self._configs[trial][key] = value
        if continues is not None:
            self._replace_after(trial, continues)

    def record(self, trial: str, round: int, values: Mapping[str, float]) -> None:
        if trial not in self._writers:
            return
        from tensorboardX.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=round)
        for name, value in values.items():
            event.summary.value.add(tag=_NOT_IN_TAGS.sub("_", name), simple_value=value)
            if not name.startswith("round/"):
                self._last[trial][name] = value
        self._write(trial, event)

    def end(self, trial: str, status: str) -> None:
        writer = self._writers.pop(trial, None)
        if writer is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import hparams

        config = self._configs.pop(trial) | {"status": status}
        last = self._last.pop(trial)
        finite = {}
        for name, value in last.items():
            if math.isfinite(value):
                finite[name] = value
        for summary in hparams(config, finite):
            writer.write_event(Event(wall_time=time.time(), summary=summary))
        writer.close()

    def _replace_after(self, trial: str, round: int) -> None:
        """Have TensorBoard drop what an earlier attempt has written of the rounds after `round`."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        event = Event(wall_time=time.time(), step=round + 1, session_log=start)
        self._write(trial, event)

    def _write(self, trial: str, event: Any) -> None:
        self._writers[trial].write_event(event)
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            for writer in self._writers.values():
                writer.flush()
            self._flushed = time.monotonic()


def check_tracking(options: Any, results: str) -> None:
    """Raise UsageError if TensorBoard's files have no local folder; `options` are those of the group `tracking.*`."""
    if options.tensorboard and options.folder is None and is_url(results):
        raise UsageError(
            f"tracking.tensorboard=true: needs a local folder, and results={results} is none; give tracking.folder"
        )
