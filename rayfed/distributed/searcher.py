"""Search with Optuna (`search.kind=optuna`): configurations that follow from the validation scores of earlier ones.

Every arm has a study with the same budget, by the tree-structured Parzen estimator (Bergstra et al. 2011), which
maximises the best validation score of a trial as a mean over the seeds. Tune's own `OptunaSearch` knows no seeds.
"""

import json
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import TrialState
from ray.tune.search import Searcher

from rayfed.core.errors import UsageError
from rayfed.core.rng import stream_seed
from rayfed.distributed.server_trials import BEST
from rayfed.distributed.tune_server import sent
from rayfed.experiments.config import Config
from rayfed.experiments.plan_identity import trial_name
from rayfed.experiments.sweep import SEARCH_LOG, Job, Populations, SweepPlan, shown_values
from rayfed.records.storage import open_storage, storage_errors
from rayfed.records.trials import read_trials


class SweepSearcher(Searcher):
    """Gives Tune the trials of a sweep, and tells the study of each arm how its configurations scored.

    A resumed search first chooses the configurations of `search.json` again, and runs their trials without a score.

    Args:
        plan: The sweep, with `search.kind=optuna`.

    Attributes:
        finished: The number of trials that earlier commands have finished.
    """

    def __init__(self, plan: SweepPlan):
        super().__init__()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._plan = plan
        self._populations = Populations(keep_all=True)
        self._shown = plan.varied
        self._home = open_storage(plan.results).child(plan.experiment)
        self._studies = list[optuna.Study]()
        self._queue = list[Job]()
        self._names = dict[str, str]()  # of trials by Tune's id
        self._known = set[str]()  # the names of all chosen trials
        goes_on = plan.configs[0].resume and SEARCH_LOG in self._home.files()
        log: Any = {"chosen": {}, "scores": {}}
        if goes_on:
            log = json.loads(self._home.read(SEARCH_LOG))
        if not isinstance(log, dict):
            raise UsageError(f"{SEARCH_LOG}: was written by an older version; use another experiment, or resume=false")
        kept = set()
        if goes_on:
            kept = {row["trial"] for row in read_trials(self._home.child("trials"))}  # rows may go
        scores = log["scores"]
        self._scores = {name: score for name, score in scores.items() if name in kept and score is not None}
        for number, arm in enumerate(plan.space.adaptive):
            corner = Config.read(next(arm.corners()))
            spaces = list(arm.spaces.items())
            key = json.dumps([trial_name(corner), corner.rounds, spaces])
            self._begin_study(number, key, log["chosen"].get(key, []))
        self.finished = len(self._known & self._scores.keys())
        self._tell()

    def _begin_study(self, number: int, key: str, earlier: Sequence[dict[str, Any]]) -> None:
        """Begin to draw configurations of an arm, and choose the `earlier` ones once more."""
        search = self._plan.space
        # With the seed of the first command, a resumed search would draw its first configurations once more.
        stream = stream_seed(search.search.seed, "optuna", arm=number, number=len(earlier))
        startup = max(1, min(10, search.samples[number] // 3))
        sampler = optuna.samplers.TPESampler(seed=stream % 2**31, n_startup_trials=startup, constant_liar=True)
        study = optuna.create_study(sampler=sampler, direction="maximize", study_name=key)
        self._studies.append(study)
        for params in earlier:
            study.enqueue_trial(params)
            self._choose(number)

    def suggest(self, trial_id: str) -> Any:
        while not self._queue:
            counts = []
            for study in self._studies:
                counts.append(len(study.get_trials(deepcopy=False)))
            left = []
            for arm, samples in enumerate(self._plan.space.samples):
                if counts[arm] < samples:
                    left.append(arm)
            if not left:
                return Searcher.FINISHED
            self._choose(min(left, key=counts.__getitem__))
            self._tell()
        job = self._queue.pop(0)
        self._names[trial_id] = job["trial"]
        return sent(job, shown_values(job["config"], self._shown))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if error or result is None:
            self._scores[self._names[trial_id]] = None
        else:
            self._scores[self._names[trial_id]] = result.get(BEST)
        self._tell()

    def _choose(self, number: int) -> None:
        """Choose the next configuration of an arm, and put its trials into the queue unless they are known or done."""
        arm = self._plan.space.adaptive[number]
        chosen = self._studies[number].ask()
        values = {}
        for key, space in arm.spaces.items():
            values[key] = _suggested(chosen, key, *space)
        config = Config.read(arm.filled(values))
        trials = []
        for job in self._plan.jobs_of(config, self._populations):
            trials.append(job["trial"])
            if job["trial"] not in self._known and job["trial"] not in self._scores:
                self._queue.append(job)
        self._known.update(trials)
        chosen.set_user_attr("trials", trials)

    def _tell(self) -> None:
        """Tell Optuna the mean over seeds of each configuration whose trials have ended, and write `search.json`."""
        for study in self._studies:
            for chosen in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
                names = chosen.user_attrs["trials"]
                if self._scores.keys() >= set(names):
                    scores = [self._scores[name] for name in names]
                    mean = None
                    if None not in scores:
                        mean = sum(scores) / len(scores)
                    state = None
                    if mean is None:
                        state = TrialState.FAIL
                    study.tell(chosen.number, mean, state=state)
        params = {}
        for study in self._studies:
            params[study.study_name] = [trial.params for trial in study.trials]
        with storage_errors(self._home.location):
            log = {"chosen": params, "scores": self._scores}
            self._home.write(SEARCH_LOG, json.dumps(log, indent=1).encode())


def _suggested(trial: optuna.Trial, key: str, kind: str, bounds: Any) -> Any:
    """Return a value from the space of a key; from a list Optuna chooses the position, as values may be mappings."""
    if kind == "randint":
        return trial.suggest_int(key, *bounds)
    if kind in ("uniform", "loguniform"):
        return trial.suggest_float(key, *bounds, log=kind == "loguniform")
    return bounds[trial.suggest_categorical(key, range(len(bounds)))]
