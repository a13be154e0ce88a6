"""Search with an algorithm of Ray Tune that was given in Python (`search.kind=tune`)."""

from collections.abc import Sequence
from typing import Any

from ray import tune
from ray.tune.search import Searcher

from rayfed.core.errors import UsageError, error_line
from rayfed.distributed.server_trials import BEST
from rayfed.distributed.tune_server import sent
from rayfed.experiments.config import Config
from rayfed.experiments.sweep import Job, Populations, SweepPlan, shown_values


def domain(kind: str, bounds: Sequence[Any]) -> Any:
    """Return Tune's domain for a space of a search space of rayfed's."""
    if kind in ("grid", "choice"):
        return tune.choice(list(bounds))
    low, high = bounds
    if kind == "randint":
        return tune.randint(low, high + 1)
    return getattr(tune, kind)(low, high)


class GivenSearcher(Searcher):
    """Gives Tune the configurations that a search algorithm chooses, each with all seeds.

    The algorithm is told the mean over the seeds of the best validation score of a trial, as a gain, and that a
    configuration failed if one of its trials did. A configuration that it chooses twice runs once.

    Args:
        plan: The sweep, with `search.kind=tune`.

    Raises:
        UsageError: The algorithm cannot search the space.
    """

    def __init__(self, plan: SweepPlan):
        super().__init__(metric=BEST, mode="max")
        self._plan = plan
        self._populations = Populations(keep_all=True)
        self._shown = plan.varied
        (self._arm,) = plan.space.adaptive
        (self._samples,) = plan.space.samples
        self._inner: Any = plan.tuning.search_alg
        self._queue = list[Job]()
        self._chosen = dict[str, list[str]]()  # the trials of the configurations that are not told yet
        self._names = dict[str, str]()  # of trials by Tune's id
        self._scores = dict[str, float | None]()
        self._known = set[str]()
        self._count = 0
        name = type(self._inner).__name__
        space = {key: domain(*values) for key, values in self._arm.spaces.items()}
        try:
            is_taken = self._inner.set_search_properties(BEST, "max", space)
        except Exception as error:  # of a foreign package
            raise UsageError(f"search_alg: {name} cannot search this space ({error_line(error)})") from error
        if not is_taken:
            raise UsageError(
                f"search_alg: this {name} has a space or a metric of its own; make it without them, as the sweep gives "
                "both"
            )

    def suggest(self, trial_id: str) -> Any:
        while not self._queue:
            if self._count == self._samples:
                return Searcher.FINISHED
            key = f"configuration{self._count}"
            values = self._inner.suggest(key)
            if values is None or values == Searcher.FINISHED:
                return values
            self._count += 1
            self._choose(key, values)
        job = self._queue.pop(0)
        self._names[trial_id] = job["trial"]
        return sent(job, shown_values(job["config"], self._shown))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        score = None
        if result is not None and not error:
            score = result.get(BEST)
        self._scores[self._names[trial_id]] = score
        self._tell()

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a sweep does not restore a search algorithm."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""

    def _choose(self, key: str, values: dict[str, Any]) -> None:
        """Put the trials of a configuration into the queue, unless they are known."""
        config = Config.read(self._arm.filled(values))
        trials = []
        for job in self._plan.jobs_of(config, self._populations):
            trials.append(job["trial"])
            if job["trial"] not in self._known:
                self._queue.append(job)
        self._known.update(trials)
        self._chosen[key] = trials
        self._tell()

    def _tell(self) -> None:
        """Tell the algorithm about the configurations whose trials have all ended."""
        for key, names in list(self._chosen.items()):
            if not self._scores.keys() >= set(names):
                continue
            del self._chosen[key]
            scores = [self._scores[name] for name in names]
            known = [score for score in scores if score is not None]
            if len(known) < len(scores):
                self._inner.on_trial_complete(key, error=True)
            else:
                self._inner.on_trial_complete(key, result={BEST: sum(known) / len(known)})
