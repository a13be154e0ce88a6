"""What shows the rounds of trials beside the tables. The recorder calls it, so that no trial waits for it.

Every round of every trial passes through the recorder, so the axis has the true rounds, of single runs and of sweeps.
"""

import contextlib
import importlib.util
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, Protocol

from rayfed.core.errors import UsageError
from rayfed.core.paths import expanded
from rayfed.core.registry import resolve
from rayfed.records.storage import Storage, is_url
from rayfed.records.trials import flattened

_FLUSH_SECONDS = 5.0
_CLOSE_SECONDS = 120.0  # for slow trackers at the end of a command
_MOST_CALLS = 100_000  # that wait for a slow tracker
_LONGEST = 200  # characters of a failure
ValuesOfRound = tuple[int, Mapping[str, float]]
"""The number of a round, and its values by name; see `RoundReport`."""
NOT_IN_TAGS = re.compile(r"[^-/\w.]")


class Tracker(Protocol):
    """Shows the rounds of trials somewhere. Its exceptions end what it shows of a trial, and never the trial.

    A tracker may have `is_slow`, whether a thread calls it since it waits for a network, and `notes`, lines to print.
    It may have `holds(trial)`, which returns the last round that it has of a trial that goes on, -1 before the first,
    and None if the trial was left out. It is then given the recorded rounds that it lacks.

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


def _none_recorded(trial: str, first: int, last: int) -> Iterable[ValuesOfRound]:
    return ()


class Trackers:
    """Calls trackers. If one fails, its trial goes on without it.

    Trackers with `is_slow` are called by a thread of their own, so that the recorder waits for none.

    Args:
        makers: By the key of the option that switches it on, what makes a tracker that is not always there.
        recorded: Returns the recorded rounds of a trial from one round through another, with their values.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        makers: Mapping[str, Callable[[], Tracker]] | None = None,
        recorded: Callable[[str, int, int], Iterable[ValuesOfRound]] = _none_recorded,
    ):
        self._trackers = list(trackers)
        self._recorded = recorded
        self._makers = dict(makers or {})
        self._failed: set[tuple[str, str]] = set()  # trackers with a trial that they no longer show
        self._failures: dict[str, list[str]] = {}  # by line, the trials
        self._threads: dict[str, _Calls] = {}  # by the key of a slow tracker

    def add(self, tracker: Tracker) -> None:
        """Add a tracker before the first trial."""
        self._trackers.append(tracker)

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        """Open a trial; see `Tracker.begin`."""
        self.end(trial, "lost")  # an earlier attempt that did not end
        self._add_trackers(trial, values)
        for tracker in self._trackers:
            self._call(tracker, trial, partial(self._begin, tracker, trial, values, continues))

    def record(self, trial: str, round: int, values: Mapping[str, float]) -> None:
        """Show the values of a round; see `Tracker.record`."""
        for tracker in self._trackers:
            self._call(tracker, trial, partial(tracker.record, trial, round, values))

    def end(self, trial: str, status: str) -> None:
        """Close a trial; see `Tracker.end`."""
        for tracker in self._trackers:
            self._call(tracker, trial, partial(tracker.end, trial, status))

    def _begin(self, tracker: Tracker, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        self._failed.discard((tracker.key, trial))
        tracker.begin(trial, values, continues)
        holds = getattr(tracker, "holds", None)
        if continues is None or holds is None:
            return
        last = holds(trial)
        if last is not None:
            for round, missing in self._recorded(trial, last + 1, continues):
                tracker.record(trial, round, missing)

    def _add_trackers(self, trial: str, values: Mapping[str, Any]) -> None:
        """Make the trackers that the options of a trial name for the first time."""
        options = values.get("tracking") or {}
        wanted = [key for key in self._makers if options.get(key.removeprefix("tracking."))]
        for key in wanted:
            with self._left_out_on_error(key, trial):
                self._trackers.append(self._makers.pop(key)())
        for name in options.get("trackers") or []:
            key = f"tracking.trackers={name}"
            if all(tracker.key != key for tracker in self._trackers):
                with self._left_out_on_error(key, trial):
                    self._trackers.append(OwnTracker(name))

    def _call(self, tracker: Tracker, trial: str, call: Callable[[], None]) -> None:
        if not getattr(tracker, "is_slow", False):
            self._run(tracker, trial, call)
            return
        if tracker.key not in self._threads:
            self._threads[tracker.key] = _Calls()
        self._threads[tracker.key].put(partial(self._run, tracker, trial, call))

    def _run(self, tracker: Tracker, trial: str, call: Callable[[], None]) -> None:
        begins = getattr(call, "func", None) == self._begin
        if begins or (tracker.key, trial) not in self._failed:
            with self._left_out_on_error(tracker.key, trial):
                call()

    def failures(self) -> list[str]:
        """Return a line on each kind of failure, and the notes of trackers, once their calls have ended."""
        lines = [f"{key}: did not end in time" for key, calls in self._threads.items() if not calls.close()]
        for tracker in self._trackers:
            lines += getattr(tracker, "notes", [])
        for failure, trials in self._failures.items():
            who = trials[0]
            if len(trials) > 1:
                who += f" (and {len(trials) - 1} more)"
            lines.append(f"{who}: {failure}; the trial went on without it")
        return lines

    @contextlib.contextmanager
    def _left_out_on_error(self, key: str, trial: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a foreign package or a disk
            self._failed.add((key, trial))
            lines = str(error).strip().splitlines() or [""]
            words = lines[0][:_LONGEST]
            failure = f"{key} failed ({type(error).__name__}: {words})"
            self._failures.setdefault(failure, []).append(trial)


class _Calls:
    """A thread that makes calls, one after the other."""

    def __init__(self) -> None:
        self._queue: Queue[Callable[[], None] | None] = Queue(_MOST_CALLS)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Add a call, and wait if too many wait already."""
        self._queue.put(call)

    def close(self) -> bool:
        """Wait until all calls are made, and return whether they are."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                return
            call()


class OwnTracker:
    """A tracker of the user's own, from `tracking.trackers`; it is called by a thread.

    Args:
        name: The class as module:Name. It is called without arguments.
    """

    is_slow = True

    def __init__(self, name: str):
        self.key = f"tracking.trackers={name}"
        self._name = name
        self._made: Any = resolve(name, {}, where="tracking.trackers")()
        self._open: set[str] = set()

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        if self._name in ((values.get("tracking") or {}).get("trackers") or []):
            self._made.begin(trial, values, continues)
            self._open.add(trial)

    def holds(self, trial: str) -> int | None:
        ask = getattr(self._made, "holds", None)
        if ask is None or trial not in self._open:
            return None
        last: int = ask(trial)
        return last

    def record(self, trial: str, round: int, values: Mapping[str, float]) -> None:
        if trial in self._open:
            self._made.record(trial, round, values)

    def end(self, trial: str, status: str) -> None:
        if trial in self._open:
            self._open.discard(trial)
            self._made.end(trial, status)


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
            event.summary.value.add(tag=NOT_IN_TAGS.sub("_", name), simple_value=value)
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
    """Raise UsageError if a tracker cannot work; `options` are those of the group `tracking.*`."""
    for key in ("tensorboard", "wandb"):
        value = getattr(options, key)
        if value and options.folder is None and is_url(results):
            written = value
            if value is True:
                written = "true"
            raise UsageError(
                f"tracking.{key}={written}: needs a local folder, and results={results} is none; give tracking.folder"
            )
    for key in ("wandb", "mlflow"):
        if getattr(options, key) and importlib.util.find_spec(key) is None:
            raise UsageError(
                f"tracking.{key}={getattr(options, key)}: needs the package {key}, which is not installed; pip install "
                f"'rayfed-sim[{key}]'"
            )
    for name in options.trackers:
        made = resolve(name, {}, where="tracking.trackers")
        missing = [hook for hook in ("begin", "record", "end") if not callable(getattr(made, hook, None))]
        if missing:
            raise UsageError(f"tracking.trackers={name}: has no {missing[0]}; see rayfed.records.tracking.Tracker")
