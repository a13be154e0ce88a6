"""Asynchronous successive halving (Li et al. 2020, "A system for massively parallel hyperparameter tuning", Alg. 2).

Tune's own ASHA compares trials of all seeds. Where the validation data of one seed are harder than those of another, it
stops the trials of the hard seed, and the mean of what is left says nothing. Here, a configuration with all its seeds
is what is compared and stopped.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from rayfed.distributed.server_trials import GAIN
from rayfed.distributed.tune_server import JOB
from rayfed.experiments.config import Config
from rayfed.experiments.plan_identity import trial_name
from rayfed.experiments.space import Search


class ConfigurationHalving(FIFOScheduler):
    """Stops configurations with validation scores that lag behind, each with all its seeds.

    Rungs are at the rounds r, r η, r η², … below the last round, with r = search.grace_rounds and
    η = search.reduction_factor. The score of a configuration at a rung is its effect in the model

        score(configuration, seed) = effect(configuration) + difficulty(seed),

    fitted by least squares to all trials that have reached the rung. When a trial reaches a rung, its configuration
    goes on if its effect is in the best 1/η of those of the other configurations there.

    Args:
        search: The options of the search.
        rounds: The most rounds of a trial.
    """

    def __init__(self, search: Search, rounds: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self._factor = search.reduction_factor
        self._rungs: dict[int, dict[tuple[str, int], float]] = {}
        milestone = float(search.grace_rounds)
        while milestone < rounds:
            self._rungs[math.floor(milestone)] = {}
            milestone *= self._factor
        self._stopped: set[str] = set()
        self._known: dict[str, tuple[str, int]] = {}  # by Tune's id of a trial

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return whether the trial goes on after a round was scored."""
        if trial.trial_id not in self._known:
            config: Config = ray.cloudpickle.loads(trial.config[JOB].job)["config"]
            self._known[trial.trial_id] = trial_name(replace(config, seed=0)), config.seed
        configuration, seed = self._known[trial.trial_id]
        return self.decide(configuration, seed, result["round"], result.get(GAIN))

    def decide(self, configuration: str, seed: int, round: int, gain: float | None) -> str:
        """Record the score of a configuration at a seed, as a gain, and return whether the trial goes on."""
        if configuration in self._stopped:
            return str(TrialScheduler.STOP)
        reached = [milestone for milestone in self._rungs if milestone <= round]
        if not reached or gain is None or not math.isfinite(gain):
            return str(TrialScheduler.CONTINUE)
        rung = self._rungs[max(reached)]
        if (configuration, seed) not in rung:
            rung[configuration, seed] = gain
            if self._lags_behind(configuration, rung):
                self._stopped.add(configuration)
                return str(TrialScheduler.STOP)
        return str(TrialScheduler.CONTINUE)

    def _lags_behind(self, configuration: str, rung: dict[tuple[str, int], float]) -> bool:
        effects = configuration_effects(rung)
        own = effects.pop(configuration)
        if not effects:
            return False
        cutoff = np.percentile(list(effects.values()), 100 * (1 - 1 / self._factor))
        return bool(own < cutoff - 1e-9)


def configuration_effects(scores: dict[tuple[str, int], float]) -> dict[str, float]:
    """Return the effects of configurations by least squares; `scores` have a value by configuration and seed."""
    configurations = sorted({configuration for configuration, _ in scores})
    seeds = sorted({seed for _, seed in scores})
    design = np.zeros((len(scores), len(configurations) + len(seeds)))
    for row, (configuration, seed) in enumerate(scores):
        design[row, configurations.index(configuration)] = 1.0
        design[row, len(configurations) + seeds.index(seed)] = 1.0
    effects, *_ = np.linalg.lstsq(design, np.array(list(scores.values())), rcond=None)
    return dict(zip(configurations, effects[: len(configurations)].tolist(), strict=True))
