"""What a trial records when an error ends it, what a sweep says of it, and when a sweep is doomed."""

import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from rayfed.core import errors
from rayfed.core.errors import error_line
from rayfed.experiments.jobs import Job
from rayfed.records.recorder import Progress, traceback_file

_LEAST = 3  # trials that fail alike before a sweep is doomed
_PLACE = re.compile(r"\([^()]*, line \d+, in [^()]*\)")


def failure(error: BaseException) -> dict[str, Any]:
    """Return the columns `status`, `error` and `traceback` of a trial that `error` ended."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, errors.Diverged):
        return {"status": "diverged", "error": str(error).strip().splitlines()[0], "traceback": trace}
    is_explained = type(error).__module__ == errors.__name__  # its message says what is wrong and where
    text = f"{type(error).__name__}: {error}" if is_explained else error_line(error)
    return {"status": "failed", "error": text, "traceback": trace}


class Failures:
    """The failed trials of a sweep while it runs: each error is said once, and the sweep stops if it is doomed.

    It is doomed if the first finished trials of every arm, at least three in all, failed with the same error. Errors
    are the same if they have the same type and place, or, where the place is not known, the same text but for numbers.

    Args:
        results, experiment: Where the tables are.
        arms: The positions of the arms that have trials to run.
        stop_early: Whether the sweep stops if it is doomed.
        say: Called with a line for the terminal.

    Attributes:
        doom: Why the sweep stops; empty if it goes on.
    """

    def __init__(
        self, results: str, experiment: str, arms: Iterable[int], *, stop_early: bool, say: Callable[[str], None]
    ):
        self._results, self._experiment, self._say = results, experiment, say
        self._arms, self._stop_early = set(arms), stop_early
        self._arm_of: dict[str, int] = {}
        self._said: set[str] = set()
        self.doom = ""

    def begin(self, job: Job) -> None:
        """Note the arm of a trial."""
        self._arm_of[job["trial"]] = job["arm"]

    def look(self, trials: Iterable[Progress]) -> None:
        """Say the errors that are new among `trials`, and set `doom`."""
        ended = [trial for trial in trials if trial.status != "running" and trial.trial in self._arm_of]
        failed = {trial.trial: _kind(trial.error or "") for trial in ended if trial.status == "failed"}
        for trial in ended:
            if trial.trial in failed and failed[trial.trial] not in self._said:
                self._said.add(failed[trial.trial])
                file = traceback_file(self._results, self._experiment, trial.trial)
                where = f"; the full traceback is in {file}" if trial.has_traceback else ""
                self._say(f"{trial.trial} failed: {trial.error}{where}")
        arms = {self._arm_of[trial] for trial in failed}
        if not self._stop_early or len(failed) < max(_LEAST, len(ended)) or arms < self._arms:
            return
        if len(set(failed.values())) == 1 and not self.doom:
            self.doom = (
                f"stopped, since the first {len(failed)} trials, with all arms among them, failed with the same error; "
                "the same command with resume=true runs those that are left, and faults.stop_early=false never stops"
            )


def _kind(error: str) -> str:
    """Return what is the same in the texts of errors that count as the same."""
    if place := _PLACE.search(error):
        return f"{error.partition(':')[0]} {place[0]}"
    return re.sub(r"\d+", "0", error)
