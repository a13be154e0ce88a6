"""Search with Optuna (`search.kind=optuna`): configurations that follow from the validation scores of earlier ones.

Every arm has an `OptunaSearch` of Ray Tune with the same budget, by the tree-structured Parzen estimator (Bergstra et
al. 2011). It maximises the best validation score of a trial, as a mean over the seeds.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from rayfed.core.errors import StorageError
from rayfed.core.records import Selection
from rayfed.core.rng import stream_seed
from rayfed.distributed.server_actor import SentJob
from rayfed.distributed.trial import GAIN
from rayfed.experiments.config import Config
from rayfed.experiments.plan import trial_name
from rayfed.experiments.space import AdaptiveArm
from rayfed.experiments.sweep import SEARCH_LOG, Job, Populations, SweepPlan, identity_of
from rayfed.records.files import best_validation
from rayfed.records.storage import open_storage, storage_errors
from rayfed.records.trials import read_trials


class _Configuration(NamedTuple):
    """A configuration whose trials have not all ended. One from an earlier command has no `id` of `OptunaSearch`."""

    arm: int
    id: str | None
    params: Mapping[str, Any]
    trials: list[str]


class SweepSearcher(Searcher):
    """Gives Tune the trials of a sweep, and tells the `OptunaSearch` of each arm how its configurations scored.

    A resumed search reads its configurations from `search.json`. Those whose trials are done become evaluated points;
    the missing trials run first.

    Args:
        plan: The sweep, with `search.kind=optuna`.
        begun: Called with each job; returns what Tune is given.

    Attributes:
        finished: The number of trials that earlier commands have finished.
    """

    def __init__(self, plan: SweepPlan, begun: Callable[[Job], SentJob]):
        super().__init__()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._plan, self._begun, self._populations = plan, begun, Populations(keep_all=True)
        self._home = open_storage(plan.results).child(plan.experiment)
        self._trials: dict[str, str] = {}  # by Tune's id
        self._best: dict[str, float] = {}  # by Tune's id
        self._scores: dict[str, float | None] = {}  # of the trials that have ended; None: it failed
        self._known: set[str] = set()
        self._open: list[_Configuration] = []
        self._queue = deque[Job]()
        self._counts = [0] * len(plan.space.adaptive)
        self._keys = [_key(arm, plan.space.search.seed) for arm in plan.space.adaptive]
        resume = bool(plan.configs[0].resume)
        self._log = self._logged() if resume else []
        rows = read_trials(self._home.child("trials")) if resume else []
        self._done = {row["trial"]: Selection.of(row) for row in rows if row["status"] == "done"}
        self._searches = [self._search(number, arm) for number, arm in enumerate(plan.space.adaptive)]
        for entry in self._log:
            self._add(self._keys.index(entry["arm"]), None, entry["params"])
        self.finished = len(self._scores)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        samples = self._plan.space.samples
        while not self._queue and (left := [arm for arm, count in enumerate(self._counts) if count < samples[arm]]):
            arm = min(left, key=lambda arm: self._counts[arm])
            search, id = self._searches[arm], f"{arm}-{self._counts[arm]}"
            params: dict[str, Any] = (search.suggest(id) or {}) if search is not None else {}
            self._log.append({"arm": self._keys[arm], "params": params})
            with storage_errors(self._home.location):
                self._home.write(SEARCH_LOG, json.dumps(self._log, indent=1).encode())
            self._add(arm, id, params)
        if not self._queue:
            return Searcher.FINISHED
        job = self._queue.popleft()
        self._trials[trial_id] = job["trial"]
        return {"job": self._begun(job)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if (score := result.get(GAIN)) is not None:
            self._best[trial_id] = max(score, self._best.get(trial_id, score))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if trial_id in self._trials:
            self.on_trial_result(trial_id, result or {})
            self._scores[self._trials[trial_id]] = None if error else self._best.get(trial_id)
            self._tell()

    def save(self, checkpoint_path: str) -> None:
        """Make the file that Tune moves; a search is resumed from its log."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""

    def _search(self, number: int, arm: AdaptiveArm) -> OptunaSearch | None:
        """Return the search of an arm; None without spaces, since the arm then has one configuration."""
        if not arm.spaces:
            return None
        # With the seed of the first command, a resumed search would draw its first configurations once more.
        earlier = sum(entry["arm"] == self._keys[number] for entry in self._log)
        seed = stream_seed(self._plan.space.search.seed, "optuna", arm=number, number=earlier) % 2**31
        startup = max(1, min(10, self._plan.space.samples[number] // 3))
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
        space = {key: _distribution(kind, bounds) for key, (kind, bounds) in arm.spaces.items()}
        return OptunaSearch(space, metric=GAIN, mode="max", sampler=sampler)

    def _add(self, number: int, id: str | None, params: Mapping[str, Any]) -> None:
        """Put the trials of a configuration into the queue, unless they are known or done."""
        self._counts[number] += 1
        arm, trials = self._plan.space.adaptive[number], []
        values = dict(params) | {
            key: bounds[params[key]] for key, (kind, bounds) in arm.spaces.items() if _is_list(kind)
        }
        unseeded = Config.read(arm.filled(values))
        for seed in self._plan.space.seeds:
            config = replace(unseeded, seed=seed)
            identity = identity_of(config, self._plan.given, self._populations)
            trials.append(trial := str(identity.get("trial", trial_name(config))))
            if trial in self._done:
                self._scores[trial] = best_validation(self._home, trial, self._done[trial])
            elif trial not in self._known:
                self._queue.append(Job(trial=trial, config=config, identity=identity))
            self._known.add(trial)
        self._open.append(_Configuration(number, id, params, trials))
        self._tell()

    def _tell(self) -> None:
        """Tell Optuna the mean over seeds of each configuration whose trials have ended, or that a trial failed."""
        for ended in [ended for ended in self._open if self._scores.keys() >= set(ended.trials)]:
            self._open.remove(ended)
            scores = [score for trial in ended.trials if (score := self._scores[trial]) is not None]
            mean = sum(scores) / len(scores) if len(scores) == len(ended.trials) else None
            if (search := self._searches[ended.arm]) is None:
                continue
            if ended.id is not None:
                search.on_trial_complete(ended.id, {GAIN: mean}, error=mean is None)
            elif mean is not None:
                search.add_evaluated_point(dict(ended.params), mean)

    def _logged(self) -> list[dict[str, Any]]:
        """Return the configurations that earlier commands chose in these arms."""
        try:
            entries = json.loads(self._home.read(SEARCH_LOG))
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise StorageError(f"{self._home.location}/{SEARCH_LOG}: damaged; delete it to search anew") from error
        return [entry for entry in entries if entry["arm"] in self._keys]  # otherwise the space has changed


def _is_list(kind: str) -> bool:
    return kind in ("grid", "choice")


def _distribution(kind: str, bounds: Any) -> Any:
    if _is_list(kind):
        return CategoricalDistribution(range(len(bounds)))  # the values may be lists or mappings
    low, high = bounds
    return IntDistribution(low, high) if kind == "randint" else FloatDistribution(low, high, log=kind == "loguniform")


def _key(arm: AdaptiveArm, seed: int) -> str:
    """Return a hash of an arm and the seed, which the entries of the arm in the log have."""
    tree = {key: value for key, value in arm.tree.items() if key not in ("resume", "results", "placement", "faults")}
    text = json.dumps([tree, list(arm.spaces.items()), seed], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
