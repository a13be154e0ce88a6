"""The plan of a sweep: all configurations checked, which trials are still to run, and what to print before."""

import dataclasses
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from rayfed.algorithm import Algorithm
from rayfed.core.errors import UsageError
from rayfed.core.words import counted
from rayfed.data.population import Population
from rayfed.experiments.config import Config
from rayfed.experiments.data_notes import data_notes, split_notes
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan, make_plan
from rayfed.experiments.plan_data import data_key, load_data
from rayfed.experiments.plan_evaluation import check_validated
from rayfed.experiments.plan_identity import trial_name
from rayfed.experiments.published import trials_by_arm
from rayfed.experiments.run_summary import column_names, method_notes, unused_gpu
from rayfed.experiments.simulation import check_rounds, failure
from rayfed.experiments.space import Search, Space
from rayfed.experiments.tuning import Tuning, check_tuning
from rayfed.experiments.user_code import own_names
from rayfed.records.progress import Progress
from rayfed.records.published import Published
from rayfed.records.recorder import traceback_file
from rayfed.records.tracking import check_tracking
from rayfed.records.trials import flattened

_ALWAYS_SHOWN = ("algorithm.name", "seed")
MAX_NOTES = 8  # that are printed before a sweep
SEARCH_LOG = "search.json"
"""The file of an experiment with the configurations that Optuna chose, and the scores of their trials."""


class Job(TypedDict):
    """A trial to run, as it travels to another process: its name and its configuration, whose components are not built.

    `identity` has the fields of its `Plan` that name what was given in Python. They are computed once, because another
    process has no source of functions that were written in a notebook.
    """

    trial: str
    config: Config
    identity: Mapping[str, Any]


def shown_values(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """Return those of the values with these dotted keys that a configuration has."""
    values = dict(flattened(config.tree()))
    return {key: values[key] for key in keys if key in values}


def error_lines(results: str, experiment: str, say: Callable[[str], None]) -> Callable[[Iterable[Progress]], None]:
    """Return a function that says each error of failed trials once, by `say`; errors may differ in numbers."""
    said: set[str] = set()

    def update(trials: Iterable[Progress]) -> None:
        for trial in trials:
            if trial.status != "failed":
                continue
            kind = re.sub(r"\d+", "0", trial.error or "")
            if kind in said:
                continue
            said.add(kind)
            line = f"{trial.trial} failed: {trial.error}"
            if trial.has_traceback:
                file = traceback_file(results, experiment, trial.trial)
                line += f"; the full traceback is in {file}"
            say(line)

    return update


@dataclass(frozen=True)
class SweepPlan:
    """A sweep, ready to run.

    Attributes:
        space: The space that was searched.
        configs: The configuration of every trial, finished trials included.
        jobs: The trials to run; none with a search, whose `configs` are the corners of the space.
        notes: The notes on the trials, as lines to print.
        given: What was given in Python, for all trials.
        keep_state: Whether the final states are kept also with checkpoint.every=0.
        tuning: The parts of Ray Tune that were given in Python.
    """

    space: Space
    configs: tuple[Config, ...]
    jobs: tuple[Job, ...]
    notes: tuple[str, ...]
    given: Given
    keep_state: bool = False
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def results(self) -> str:
        return self.configs[0].results

    @property
    def experiment(self) -> str:
        return self.configs[0].experiment

    @property
    def expected(self) -> int:
        """The number of trials to run, with those that a search will choose."""
        if self.space.adaptive:
            return self.space.searched_trials
        return len(self.jobs)

    @property
    def expected_rounds(self) -> int | None:
        """The rounds of all trials to run; None with a search, which chooses them."""
        if self.space.adaptive:
            return None
        return sum(job["config"].rounds for job in self.jobs)

    @property
    def names(self) -> list[str]:
        """The trials that this command locks. A search locks its log, because its trials are not known in advance."""
        if self.space.adaptive:
            return [SEARCH_LOG]
        return [job["trial"] for job in self.jobs]

    def published(self) -> Published | None:
        """Return the values that somebody published for the trials; None if there are none."""
        if self.space.published is None:
            return None
        trials = trials_by_arm(self.space.arms, list(map(trial_name, self.configs)))
        return self.space.published.of_trials(trials)

    @property
    def needs_ray(self) -> bool:
        """Whether the trials can only run with Ray Tune."""
        is_searched = bool(self.space.adaptive) or self.space.search.scheduler_name != "none"
        is_given = bool(self.tuning.callbacks) or self.tuning.scheduler is not None
        return is_searched or is_given or any(config.placement.hosts for config in self.configs)

    @property
    def varied(self) -> list[str]:
        """The dotted keys whose values differ between trials, after those of the algorithm and the seed."""
        known: dict[str, set[str]] = {}
        for config in self.configs:
            for key, value in flattened(config.tree()):
                known.setdefault(key, set()).add(repr(value))
        searched = set[str]().union(*(arm.spaces for arm in self.space.adaptive))
        varied = list(_ALWAYS_SHOWN)
        for key, values in known.items():
            if (len(values) > 1 or key in searched) and key not in varied:
                varied.append(key)
        return varied

    def jobs_of(self, config: Config, populations: "Populations") -> Iterator[Job]:
        """Yield the job of a configuration that a search chose with each seed."""
        for seed in self.space.seeds:
            config = replace(config, seed=seed)
            if self.given:
                plan = _planned_first(config, self.given, populations, names_seed=True)
                yield Job(trial=plan.trial, config=config, identity=_identity(plan))
            else:
                yield Job(trial=trial_name(config), config=config, identity={})

    def summary(self) -> str:
        """Return what to print before the start: the numbers of trials by algorithm, and the notes."""
        seeds = counted(len(self.space.seeds), "seed")
        if self.space.adaptive:
            line = f"{counted(self.space.searched_trials, 'trial')}: {self._search_in_words()}; each with {seeds}"
        else:
            line = f"{counted(len(self.configs), 'trial')}: {self._arms_in_words()}; each with {seeds}"
            finished = len(self.configs) - len(self.jobs)
            if finished:
                line += f"; {finished} already done"
        lines = [line, *self.notes[:MAX_NOTES]]
        more = len(self.notes) - MAX_NOTES
        if more > 0:
            lines.append(f"{more} more notes")
        return "\n".join(lines)

    def _search_in_words(self) -> str:
        """Return "Optuna chooses 20 configurations of each of 2 arms"."""
        chooser = "Optuna"
        if self.tuning.search_alg is not None:
            chooser = type(self.tuning.search_alg).__name__
        samples = counted(self.space.search.samples or 1, "configuration")
        return f"{chooser} chooses {samples} of each of {counted(len(self.space.adaptive), 'arm')}"

    def _arms_in_words(self) -> str:
        """Return "configurations fedavg 1, adcol 3"."""
        counts: Counter[str] = Counter()
        for arm in self.space.arms:
            counts[str(arm[0].get("algorithm", {}).get("name", "fedavg"))] += len(arm)
        return "configurations " + ", ".join(f"{name} {count}" for name, count in counts.items())


def plan_sweep(
    space: Space,
    configs: Sequence[Config],
    given: Given | None = None,
    *,
    keep_state: bool = False,
    tuning: Tuning | None = None,
) -> SweepPlan:
    """Check every configuration of a sweep, and find the trials that are still to run.

    With resume=true, trials that are done are left out.

    Args:
        space: The space.
        configs: `configurations(space)`.
        given: What was given in Python, for all trials.
        keep_state: Whether to keep the final states also with checkpoint.every=0.
        tuning: Parts of Ray Tune that were given in Python.

    Raises:
        UsageError: A configuration cannot work.
    """
    _check_packages(space)
    tuning = tuning or Tuning()
    check_tuning(space, configs, tuning)
    given = given or Given()
    if given and space.published is not None:
        raise UsageError(
            "published: is about the data, the model and the loss of the file; leave out those of your own"
        )
    names = list(map(trial_name, configs))
    _check_arms(configs, names)
    notes_of_plans, identities = _check_plans(space, configs, given)
    jobs: tuple[Job, ...] = ()
    if not space.adaptive:
        jobs = _jobs_to_run(configs, names, identities)
    return SweepPlan(space, tuple(configs), jobs, notes_of_plans, given, keep_state, tuning)


def _check_arms(configs: Sequence[Config], names: Sequence[str]) -> None:
    """Raise UsageError if arms differ in what all share, or if two trials are one."""
    first = configs[0]
    for key in ("results", "experiment", "select", "faults"):
        if any(getattr(config, key) != getattr(first, key) for config in configs):
            raise UsageError(f"{key}: all arms of a sweep share it; give it outside the arms")
    for name, count in Counter(names).items():
        if count > 1:
            what = f"two trials have the same configuration ({name})"
            raise UsageError(f"arms: {what}; each must differ in more than rounds")
    for config in configs:
        check_tracking(config.tracking, first.results)


def _jobs_to_run(
    configs: Sequence[Config], names: Sequence[str], identities: Sequence[Mapping[str, Any]]
) -> tuple[Job, ...]:
    """Return the jobs of the trials; with resume=true, without those that are done."""
    jobs = {}
    for name, config, identity in zip(names, configs, identities, strict=True):
        name = str(identity.get("trial", name))
        jobs[name] = Job(trial=name, config=replace(config), identity=identity)
    for name in _done({name: job["config"] for name, job in jobs.items()}):
        if jobs[name]["config"].resume:
            del jobs[name]
    return tuple(jobs.values())


def _done(configs: Mapping[str, Config]) -> set[str]:
    """Return the trials that have all their rounds, or stopped early; `configs` are by the names of trials."""
    done = set()
    for row in check_rounds(configs):
        name = row["trial"]
        if name not in configs or row["status"] != "done":
            continue
        if row["stop_reason"] or (row.get("rounds") or 0) >= configs[name].rounds:
            done.add(name)
    return done


def _check_packages(space: Space) -> None:
    """Raise UsageError if a package for the search is missing."""
    if space.search.kind != "optuna":
        return
    for package in ("ray", "optuna"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"search.kind=optuna: needs the package {package}, which is not installed; pip install "
                "'rayfed-sim[search]', or use search.kind=random"
            )


def _identity(plan: Plan) -> Mapping[str, Any]:
    names = ("trial", "clients_hash", "model_label", "loss_label", "code_hash", "base_hash")
    return {name: getattr(plan, name) for name in names}


class Populations:
    """The data of the trials of one process; equal data are loaded once.

    Args:
        keep_all: Whether the data of all trials stay in memory, or only those of the last one.
        elsewhere: Returns the data of a `data_key` that need not be loaded, or None.
    """

    def __init__(self, *, keep_all: bool = False, elsewhere: Callable[[str], Population | None] | None = None) -> None:
        self._keep_all = keep_all
        self._elsewhere = elsewhere or (lambda key: None)
        self._known: dict[str, Population] = {}

    def plan(self, config: Config, given: Given, *, tried: bool = False) -> Plan:
        """Return the plan of a configuration, with what was given in Python; see `make_plan`."""
        if given.clients is not None:
            return make_plan(config, given, tried=tried)
        key = data_key(config)
        if key not in self._known:
            if not self._keep_all:
                self._known.clear()  # before the others are loaded
            self._known[key] = self._elsewhere(key) or load_data(config)
        return make_plan(config, given, population=self._known[key], tried=tried)


def planned(job: Job, given: Given, populations: Populations, *, keep_state: bool) -> Plan:
    """Return the plan of a trial in the process that runs it.

    Raises:
        UsageError: The trial cannot work here, for example because a file of the data is missing on this machine.
    """
    config = job["config"]
    if given:  # its code was compared with that of the trial to resume where it was given
        config = replace(config, resume=False)
    plan = populations.plan(config, given, tried=True)
    return replace(plan, config=job["config"], keep_state=keep_state, **job["identity"])


def failed_before_start(job: Job, error: Exception, where: str = "") -> dict[str, Any]:
    """Return the row in the table `trials` of a trial that could not begin; `where` is appended to the error."""
    values = failure(error)
    return job["config"].tree() | values | {"error": values["error"] + where}


def _check_plans(
    space: Space, configs: Sequence[Config], given: Given
) -> tuple[tuple[str, ...], list[Mapping[str, Any]]]:
    """Plan one configuration of each kind with the first seed, and with other seeds if they change the partition.

    If something is given in Python, plan every configuration.

    Returns:
        The notes for the first seed, and the `identity` of each job.
    """
    notes = dict.fromkeys(unused_gpu(config.placement for config in configs))
    identities = []
    data: dict[str | None, Population] = {}  # of the first seed
    keys = [data_key(config) for config in configs]
    per_seed = len(configs) // len(space.seeds)
    keys_of_first = set(keys[:per_seed])
    kinds: set[str] = set()
    for place, config in enumerate(configs):
        is_first = place < per_seed
        if place % per_seed == 0:
            populations = Populations(keep_all=True)  # the data of one seed at a time
        has_new_data = is_first or keys[place] not in keys_of_first
        identity: Mapping[str, Any] = {}
        if given or (has_new_data and _is_new_kind(config, kinds)):
            plan = _planned_first(config, given, populations, names_seed=not is_first)
            if is_first:
                _check_plan(plan, space)
                data.setdefault(plan.data_hash, plan.population)
            notes.update(dict.fromkeys(_notes_on(plan, is_first=is_first)))
            if given:
                identity = _identity(plan)
        identities.append(identity)
    shared = split_notes(list(data.values()), len(space.seeds), kept=set(keys) == keys_of_first)
    return tuple(f"note: {note}" for note in (*shared, *notes)), identities


def _is_new_kind(config: Config, kinds: set[str]) -> bool:
    """Return whether the kind of a configuration is none of `kinds`, and add it."""
    kind = plan_kind(config)
    is_new = kind not in kinds
    kinds.add(kind)
    return is_new


def _check_plan(plan: Plan, space: Space) -> None:
    """Raise UsageError if a plan lacks what the sweep needs: what published values are of, and validation examples."""
    if space.published is not None:
        space.published.check_columns({client.domain for client in plan.population.clients})
        space.published.check_metric(plan.blueprint.outputs.kind, plan.evaluation.metrics)
    for key, value in _needing_validation(space.search):
        check_validated(key, value, plan.population, plan.evaluation.splits)


def _notes_on(plan: Plan, *, is_first: bool) -> Iterator[str]:
    """Yield the notes on a plan; with other seeds than the first, only those on the data."""
    for note in data_notes(plan.population, plan.evaluation, column_names(plan.config)):
        if is_first:
            yield note
        else:
            yield f"seed {plan.config.seed}: {note}"
    if is_first:
        for note in method_notes(plan):
            yield f"{plan.config.algorithm_name}: {note}"


def _needing_validation(search: Search) -> Iterator[tuple[str, str]]:
    """Yield the keys, with their values, that need validation scores."""
    if search.scheduler_name != "none":
        yield "search.scheduler", search.scheduler_name
    if search.kind in ("optuna", "tune"):
        yield "search.kind", search.kind


def plan_kind(config: Config) -> str:
    """Return a text that configurations share if they have the same plan, notes and estimate.

    They differ only in rates above 0: the learning rate, the weight decay, and fractional options of rayfed's
    algorithms without an upper bound. An option with an upper bound may be a share, and shares decide about sizes. The
    options of an algorithm that checks or notes them all count.
    """
    tree = config.tree()
    if not own_names(config):  # the user's own code may look at anything
        _hide_rates(tree["local"], ("lr", "weight_decay"))
        kind = type(config.algorithm)
        if kind.check is Algorithm.check and kind.notes is Algorithm.notes:
            _hide_rates(tree["algorithm"], _unbounded(config.algorithm))
    return json.dumps(tree, sort_keys=True, default=str)


def _hide_rates(group: dict[str, Any], names: Iterable[str]) -> None:
    """Put "above 0" in place of fractional values above 0."""
    for name in names:
        value = group.get(name)
        if isinstance(value, float) and value > 0:
            group[name] = "above 0"


def _unbounded(algorithm: Any) -> Iterator[str]:
    """Yield the options of an algorithm that have no upper bound."""
    for declared in dataclasses.fields(algorithm):
        if "high" not in declared.metadata and "below" not in declared.metadata:
            yield declared.name


def _planned_first(config: Config, given: Given, populations: Populations, *, names_seed: bool) -> Plan:
    """Plan a configuration before the sweep starts. With `names_seed`, errors begin with its seed."""
    try:
        return populations.plan(config, given)
    except UsageError as error:
        if not names_seed:
            raise
        raise UsageError(f"seed={config.seed}: {error}") from error
