"""Search with Optuna (`search.kind=optuna`): configurations that follow from the validation scores of earlier ones.

Every arm has a study with the same budget, by the tree-structured Parzen estimator (Bergstra et al. 2011), which
maximises the best validation score of a trial as a mean over the seeds.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial, TrialState
from ray.tune.search import Searcher

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

_LISTS = ("grid", "choice")  # spaces from which Optuna chooses positions, since values may be lists or mappings


class SweepSearcher(Searcher):
    """Gives Tune the trials of a sweep, and tells the study of each arm how its configurations scored.

    A resumed search chooses the configurations of `search.json` once more. The scores of their finished trials are read
    from the tables, and the missing trials run first.

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
        self._names: dict[str, str] = {}  # of trials by Tune's id
        self._best: dict[str, float] = {}  # by Tune's id
        self._scores: dict[str, float | None] = {}  # of the trials that have ended; None: it failed
        self._known: set[str] = set()
        self._open: list[tuple[int, Trial, list[str]]] = []  # configurations without a score: their arms and trials
        self._queue = deque[Job]()
        self._keys = [_key(arm, plan.space.search.seed) for arm in plan.space.adaptive]
        self._log: list[dict[str, Any]] = []
        self._done: dict[str, Selection] = {}
        if plan.configs[0].resume and SEARCH_LOG in self._home.files():
            entries = json.loads(self._home.read(SEARCH_LOG))
            self._log = [entry for entry in entries if entry["arm"] in self._keys]  # the other spaces have changed
            rows = read_trials(self._home.child("trials"))
            self._done = {row["trial"]: Selection.of(row) for row in rows if row["status"] == "done"}
        self._studies = list(map(self._study, range(len(self._keys))))
        for entry in self._log:
            self._choose(self._keys.index(entry["arm"]))
        self.finished = len(self._scores)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        while not self._queue:
            counts = [len(study.get_trials(deepcopy=False)) for study in self._studies]
            left = [arm for arm, samples in enumerate(self._plan.space.samples) if counts[arm] < samples]
            if not left:
                return Searcher.FINISHED
            arm = min(left, key=counts.__getitem__)
            self._log.append({"arm": self._keys[arm], "params": self._choose(arm)})
            with storage_errors(self._home.location):
                self._home.write(SEARCH_LOG, json.dumps(self._log, indent=1).encode())
        job = self._queue.popleft()
        self._names[trial_id] = job["trial"]
        return {"job": self._begun(job)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if (score := result.get(GAIN)) is not None:
            self._best[trial_id] = max(score, self._best.get(trial_id, score))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if trial_id in self._names:
            self.on_trial_result(trial_id, result or {})
            self._scores[self._names[trial_id]] = None if error else self._best.get(trial_id)
            self._tell()

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).touch()  # Tune moves the file, and a search is resumed from its log

    def restore(self, checkpoint_path: str) -> None: ...

    def _study(self, number: int) -> optuna.Study:
        earlier = [entry["params"] for entry in self._log if entry["arm"] == self._keys[number]]
        # With the seed of the first command, a resumed search would draw its first configurations once more.
        seed = stream_seed(self._plan.space.search.seed, "optuna", arm=number, number=len(earlier)) % 2**31
        startup = max(1, min(10, self._plan.space.samples[number] // 3))
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        for params in earlier:
            study.enqueue_trial(params)
        return study

    def _choose(self, number: int) -> dict[str, Any]:
        """Choose the next configuration of an arm, and put its trials into the queue unless they are known or done."""
        arm = self._plan.space.adaptive[number]
        chosen = self._studies[number].ask({key: _distribution(*space) for key, space in arm.spaces.items()})
        params = chosen.params
        lists = {key: bounds[params[key]] for key, (kind, bounds) in arm.spaces.items() if kind in _LISTS}
        unseeded, trials = Config.read(arm.filled(params | lists)), []
        for seed in self._plan.space.seeds:
            config = replace(unseeded, seed=seed)
            identity = identity_of(config, self._plan.given, self._populations)
            trials.append(trial := str(identity.get("trial", trial_name(config))))
            if trial in self._done:
                self._scores[trial] = best_validation(self._home, trial, self._done[trial])
            elif trial not in self._known:
                self._queue.append(Job(trial=trial, config=config, identity=identity))
            self._known.add(trial)
        self._open.append((number, chosen, trials))
        self._tell()
        return params

    def _tell(self) -> None:
        """Tell Optuna the mean over seeds of each configuration whose trials have ended, or that a trial failed."""
        for ended in [ended for ended in self._open if self._scores.keys() >= set(ended[2])]:
            self._open.remove(ended)
            number, chosen, trials = ended
            scores = [score for trial in trials if (score := self._scores[trial]) is not None]
            mean = sum(scores) / len(scores) if len(scores) == len(trials) else None
            self._studies[number].tell(chosen, mean, state=TrialState.FAIL if mean is None else None)


def _distribution(kind: str, bounds: Any) -> Any:
    if kind in _LISTS:
        return CategoricalDistribution(range(len(bounds)))
    low, high = bounds
    return IntDistribution(low, high) if kind == "randint" else FloatDistribution(low, high, log=kind == "loguniform")


def _key(arm: AdaptiveArm, seed: int) -> str:
    """Return a hash of an arm and the seed, which the entries of the arm in the log have."""
    tree = {key: value for key, value in arm.tree.items() if key not in ("resume", "results", "placement", "faults")}
    text = json.dumps([tree, list(arm.spaces.items()), seed], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
