"""Search with Optuna (`search.kind=optuna`): configurations that follow from the validation scores of earlier ones.

Every arm has a study of its own with the same budget, by the tree-structured Parzen estimator (Bergstra et al. 2011).
The sampler is seeded anew for each suggestion, by the seed of the search, the arm and the number of the suggestion. So
a sweep that is resumed goes on as it would have without the interruption, as far as trials end in the same order.
"""

import hashlib
import importlib.util
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rayfed.core.best_round import Selection
from rayfed.core.errors import StorageError, UsageError
from rayfed.core.rng import stream_seed
from rayfed.experiments.config import Config
from rayfed.experiments.jobs import Job
from rayfed.experiments.naming import trial_name
from rayfed.experiments.space import AdaptiveArm, Space
from rayfed.records.storage import Storage, storage_errors
from rayfed.records.trials import read_trials
from rayfed.records.validation import best_validation

LOG_FILE = "search.json"
Identify = Callable[[Config], Mapping[str, Any]]
"""identify(config): the `identity` of the job of a configuration."""


def check_search(space: Space) -> None:
    """Raise UsageError if the package for the search is missing."""
    if space.search.kind == "optuna" and importlib.util.find_spec("optuna") is None:
        raise UsageError(
            "search.kind=optuna: the package optuna is not installed; pip install 'rayfed-sim[search]', or use "
            "search.kind=random"
        )


@dataclass
class _Suggestion:
    """One configuration: the trial of Optuna, and its trials with all seeds."""

    arm: int
    trial: Any
    waiting: set[str]
    scores: list[float] = field(default_factory=list)
    has_failed: bool = False


class Study:
    """Suggests the jobs of a sweep one by one, and learns from those that have ended.

    Args:
        space: The space, of the kind `optuna`.
        home: The folder of the experiment. `search.json` in it has every suggestion.
        resume: Whether suggestions of an earlier command are taken up again.
        identify: Returns the identity of a job, where something was given in Python.
    """

    def __init__(self, space: Space, home: Storage, *, resume: bool, identify: Identify | None = None):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._space, self._home = optuna, space, home
        self._identify = identify or (lambda config: {})
        self._studies = [optuna.create_study(direction="maximize") for _ in space.adaptive]
        self._keys = [_key(arm, space.search.seed) for arm in space.adaptive]
        self._counts = [0] * len(space.adaptive)
        self._suggestions: list[_Suggestion] = []
        self._queue: deque[Job] = deque()
        self._known: set[str] = set()
        self._scores: dict[str, float | None] = {}  # scores of the trials that have ended
        self._log: list[dict[str, Any]] = []
        if resume:
            self._replay()
        self._finished_before = len(self._scores)

    @property
    def total(self) -> int:
        """The trials that the sweep is going to have."""
        return sum(self._samples(arm) for arm in self._space.adaptive) * len(self._space.seeds)

    @property
    def finished_before(self) -> int:
        """The trials that an earlier command has finished."""
        return self._finished_before

    def next_job(self) -> Job | None:
        """Return the next trial to run; None if there is none left."""
        while not self._queue:
            open_arms = [n for n, arm in enumerate(self._space.adaptive) if self._counts[n] < self._samples(arm)]
            if not open_arms:
                return None
            self._suggest(min(open_arms, key=lambda n: (self._counts[n], n)), None)
        return self._queue.popleft()

    def ended(self, name: str, best: float | None = None) -> None:
        """Learn from a trial that has ended, and of which `best` is the best validation score that is known here."""
        if name in self._scores:
            return
        recorded = self._recorded(self._rows().get(name))
        known = [score for score in (best, recorded) if score is not None]
        self._take(name, max(known) if known else None)

    def _samples(self, arm: AdaptiveArm) -> int:
        return (self._space.search.samples or 1) if arm.spaces else 1

    def _suggest(self, number: int, params: Mapping[str, Any] | None) -> None:
        """Add a configuration of an arm: the one with `params`, or the one that Optuna suggests."""
        arm, study, search = self._space.adaptive[number], self._studies[number], self._space.search
        startup = max(1, min(10, self._samples(arm) // 3))
        seed = stream_seed(search.seed, "optuna", arm=number, number=self._counts[number]) % 2**31
        study.sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
        if params is not None:
            study.enqueue_trial(dict(params))
        trial = study.ask()
        chosen = {key: _asked(trial, key, kind, bounds) for key, (kind, bounds) in arm.spaces.items()}
        self._counts[number] += 1
        self._log.append({"arm": self._keys[number], "params": dict(trial.params)})
        if params is None:
            with storage_errors(self._home.location):
                self._home.write(LOG_FILE, json.dumps(self._log, indent=1).encode())
        config = Config.read(arm.filled(chosen))
        names = [self._job(replace(config, seed=seed), number) for seed in self._space.seeds]
        suggestion = _Suggestion(number, trial, {name for name in names if name not in self._scores})
        for name in names:
            if name in self._scores:
                _note_score(suggestion, self._scores[name])
        self._suggestions.append(suggestion)
        self._tell(suggestion)

    def _job(self, config: Config, arm: int) -> str:
        """Put the trial of a configuration into the queue, unless it is known, and return its name."""
        identity = self._identify(config)
        name = str(identity.get("trial", trial_name(config)))
        if name not in self._known:
            self._known.add(name)
            self._queue.append(Job(trial=name, config=replace(config), identity=identity, arm=arm))
        return name

    def _take(self, name: str, score: float | None) -> None:
        self._scores[name] = score
        for suggestion in self._suggestions:
            if name in suggestion.waiting:
                suggestion.waiting.discard(name)
                _note_score(suggestion, score)
                self._tell(suggestion)

    def _tell(self, suggestion: _Suggestion) -> None:
        """Tell Optuna the mean over seeds once all have ended, or that a trial failed."""
        if suggestion.waiting:
            return
        study, state = self._studies[suggestion.arm], self._optuna.trial.TrialState
        if suggestion.has_failed:
            study.tell(suggestion.trial, state=state.FAIL)
        else:
            study.tell(suggestion.trial, sum(suggestion.scores) / len(suggestion.scores))

    def _replay(self) -> None:
        """Take the suggestions of an earlier command up again; trials that are not done are queued."""
        for number, params in self._logged():
            if self._counts[number] < self._samples(self._space.adaptive[number]):
                self._suggest(number, params)
        rows = self._rows()
        queued, self._queue = self._queue, deque()
        for job in queued:
            row = rows.get(job["trial"])
            if row is not None and row["status"] == "done":
                self._take(job["trial"], self._recorded(row))
            else:
                self._queue.append(job)

    def _logged(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        try:
            entries = json.loads(self._home.read(LOG_FILE))
        except FileNotFoundError:
            return
        except ValueError as error:
            raise StorageError(f"{self._home.location}/{LOG_FILE}: damaged; delete it to search anew") from error
        for entry in entries:
            if entry["arm"] in self._keys:  # otherwise the space has changed
                yield self._keys.index(entry["arm"]), entry["params"]

    def _rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows of the table `trials` by trial."""
        return {row["trial"]: row for row in read_trials(self._home.child("trials"))}

    def _recorded(self, row: Mapping[str, Any] | None) -> float | None:
        """Return the validation score of a trial that has ended, from its row."""
        if row is None or row["status"] not in ("done", "stopped"):
            return None
        return best_validation(self._home, row["trial"], Selection.of(row))


def _note_score(suggestion: _Suggestion, score: float | None) -> None:
    if score is None:
        suggestion.has_failed = True
    else:
        suggestion.scores.append(score)


def _asked(trial: Any, key: str, kind: str, bounds: Any) -> Any:
    """Return the value that a trial of Optuna has for a key."""
    if kind in ("grid", "choice"):
        return bounds[trial.suggest_categorical(key, list(range(len(bounds))))]  # values may be lists or mappings
    low, high = bounds
    if kind == "randint":
        return trial.suggest_int(key, low, high)
    return trial.suggest_float(key, low, high, log=kind == "loguniform")


def _key(arm: AdaptiveArm, seed: int) -> str:
    """Return a hash of an arm and the seed, by which a log is known to belong to it."""
    tree = {key: value for key, value in arm.tree.items() if key not in ("resume", "results", "placement", "faults")}
    text = json.dumps([tree, list(arm.spaces.items()), seed], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
