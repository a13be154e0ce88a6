"""The plan of a sweep: all configurations checked, which trials are still to run, and what to print before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from rayfed.core.errors import UsageError
from rayfed.data.population import Population
from rayfed.experiments.config import Config
from rayfed.experiments.naming import trial_name
from rayfed.experiments.plan import data_key, make_plan
from rayfed.experiments.run_summary import counted, notes
from rayfed.experiments.space import Space
from rayfed.results.storage import open_storage
from rayfed.results.trials import read_trials

MAX_NOTES = 8  # that are printed before a sweep


class Job(TypedDict):
    """One trial to run: its name, and the nested values of its configuration."""

    trial: str
    values: dict[str, Any]


@dataclass(frozen=True)
class SweepPlan:
    """A sweep, ready to run.

    Attributes:
        space: The space that was searched.
        configs: The configuration of every trial, finished ones included.
        jobs: The trials to run.
        notes: The notes on the trials, as lines to print.
    """

    space: Space
    configs: tuple[Config, ...]
    jobs: tuple[Job, ...]
    notes: tuple[str, ...]

    @property
    def results(self) -> str:
        return self.configs[0].results

    @property
    def experiment(self) -> str:
        return self.configs[0].experiment

    def summary(self) -> str:
        """Return what to print before the start: the numbers of trials by algorithm, and the notes."""
        counts: dict[str, int] = {}
        for arm in self.space.arms:
            name = str(arm[0].get("algorithm", {}).get("name", "fedavg"))
            counts[name] = counts.get(name, 0) + len(arm)
        budget = ", ".join(f"{name} {count}" for name, count in counts.items())
        finished = len(self.configs) - len(self.jobs)
        skipped = f"; {finished} already done" if finished else ""
        trials, seeds = counted(len(self.configs), "trial"), counted(len(self.space.seeds), "seed")
        return "\n".join([f"{trials}: configurations {budget}; each with {seeds}{skipped}", *_shortened(self.notes)])


def configurations(space: Space) -> tuple[Config, ...]:
    """Return the configuration of every trial of `space`, in the order of `space.trials()`."""
    return tuple(Config.read(values) for values in space.trials())


def plan_sweep(space: Space, configs: Sequence[Config]) -> SweepPlan:
    """Check every configuration of a sweep, and find the trials that are still to run.

    With resume=true, trials that are done are left out.

    Args:
        space: The space.
        configs: `configurations(space)`.

    Raises:
        UsageError: A configuration cannot work.
    """
    first = configs[0]
    names = [trial_name(config) for config in configs]
    if len(set(names)) < len(names):
        raise UsageError(f"arms: two trials have the same configuration ({_repeated(names)}); each must differ")
    if any((config.results, config.experiment) != (first.results, first.experiment) for config in configs):
        raise UsageError("results and experiment: all arms of a sweep share them; give them outside the arms")
    notes_of_plans = _check_plans(space, configs)
    done = _done_trials(first) if first.resume else set()
    jobs = (Job(trial=name, values=values) for name, values in zip(names, space.trials(), strict=True))
    return SweepPlan(space, tuple(configs), tuple(job for job in jobs if job["trial"] not in done), notes_of_plans)


def _check_plans(space: Space, configs: Sequence[Config]) -> tuple[str, ...]:
    """Plan each configuration with the first seed, and with the others where these change the partition.

    Return the notes for the first seed. Equal data are loaded once.
    """
    populations: dict[str, Population] = {}
    lines: dict[str, None] = {}
    count = len(configs) // len(space.seeds)
    for config in configs[:count]:
        key = data_key(config)
        plan = make_plan(config, population=populations.get(key))
        populations[key] = plan.population
        if space.search.scheduler == "asha" and not any(len(client.val) for client in plan.population.participants):
            raise UsageError("search.scheduler=asha: needs validation accuracies, but partition.validation is 0")
        lines |= {f"note: {config.algorithm_name}: {note}": None for note in notes(plan)}
    known = set(populations)
    for start in range(count, len(configs), count):
        populations = {}  # one seed at a time, since each holds the data
        for config in configs[start : start + count]:
            if (key := data_key(config)) not in known:
                populations[key] = _planned_with_seed(config, populations.get(key))
    return tuple(lines)


def _planned_with_seed(config: Config, population: Population | None) -> Population:
    """Plan a configuration whose partition follows its seed, and return its population."""
    try:
        return make_plan(config, population=population).population
    except UsageError as error:
        raise UsageError(f"seed={config.seed}: {error}") from error


def _shortened(lines: Sequence[str]) -> list[str]:
    more = [f"{len(lines) - MAX_NOTES} more notes; `rayfed.run` prints those of one configuration"]
    return [*lines[:MAX_NOTES], *(more if len(lines) > MAX_NOTES else [])]


def _repeated(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _done_trials(config: Config) -> set[str]:
    rows = read_trials(open_storage(config.results).child(config.experiment, "trials"))
    return {row["trial"] for row in rows if row["status"] == "done"}
