"""Runs the trials of a sweep with Ray Tune."""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Read when Tune is imported, or later. Its CSV and JSON files would repeat the tables, a trial that ends before its
# first scores has no metric, and its own state is never read, since `resume=true` goes by the tables and checkpoints.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_SYNCER", "1")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "3600")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from rayfed.core.records import Event
from rayfed.data.lazy_rows import LazyRows
from rayfed.distributed import cluster
from rayfed.distributed.hosts import sendable
from rayfed.distributed.private_session import is_private
from rayfed.distributed.processes import cause_of_death
from rayfed.distributed.recording import DriversRecorder, Watchdog
from rayfed.distributed.searcher import SweepSearcher
from rayfed.distributed.session_watch import ended_by_sigterm, watching_session
from rayfed.distributed.sweep_trial import ENDED, GAIN, SweepTrial
from rayfed.distributed.user_modules import register_user_modules, to_send
from rayfed.experiments.config import Config, Faults
from rayfed.experiments.jobs import Job
from rayfed.experiments.local_sweep import expected_names, name_next
from rayfed.experiments.plan import data_key, load_data
from rayfed.experiments.progress import bars_of_sweep, span, watched
from rayfed.experiments.run_summary import counted
from rayfed.experiments.sweep import SweepPlan
from rayfed.experiments.user_code import given_objects, module_sources, named_objects
from rayfed.records.storage import open_storage
from rayfed.records.trials import mark_interrupted

_BUFFERED_SECONDS = 0.5  # during which results of short rounds are collected, if no scheduler waits for each


def run_trials(plan: SweepPlan, *, quiet: bool) -> int:
    """Run the jobs of `plan` and return the number of trials that failed or diverged.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: The recorder died too often, or the cluster ended.
        KeyboardInterrupt: The sweep was interrupted. Its trials have ended; the message says how to continue.
    """
    placements = dict.fromkeys(config.placement for config in plan.configs)
    start_seconds = max(config.faults.start_seconds for config in plan.configs)
    url, *_ = [cluster.connect(placement, dashboard=True, start_seconds=start_seconds) for placement in placements]
    if not quiet and url:
        print(f"dashboard: http://{url}", file=sys.stderr, flush=True)
    continues = "the same command with resume=true runs the trials that are left"
    with watching_session(continues, quiet=quiet) as say:
        return _run_connected(plan, say, quiet=quiet)


def _run_connected(plan: SweepPlan, say: Callable[[str], None], *, quiet: bool) -> int:
    """See `run_trials`; `say` prints a line on what happened to a process."""
    faults = [config.faults for config in plan.configs]
    recorder = DriversRecorder(
        plan.results,
        plan.experiment,
        restarts=max(one.restarts for one in faults),
        patience=max(one.patience for one in faults),
        say=say,
        in_sweep=True,
    )
    for name in ("ray.tune", "ray.train", "ray.air"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are recorded, and shown with the table
    data = _sent_data(plan.configs) if plan.given.clients is None else {}
    interrupts: list[int] = []
    run = _Jobs(plan, say)
    began = time.monotonic()
    sigterm = lambda: _interrupted(mark_interrupted(plan.results, plan.experiment, run.names), run)  # noqa: E731
    try:
        jobs, tries = list(plan.jobs), max(one.restarts for one in faults)
        with watched(recorder.progress, bars_of_sweep(run.names), quiet=quiet), ended_by_sigterm(sigterm):
            while (jobs or run.has_more(jobs)) and not interrupts and not run.failures.doom:
                jobs = _fit(plan, run, jobs, data, recorder, interrupts, say, last=tries <= 0)
                tries -= 1
    except KeyboardInterrupt:  # a second one, while Tune was ending its trials
        interrupts.append(signal.SIGINT)
    finally:
        failures = _close(recorder, run.begun, interrupted=bool(interrupts or run.failures.doom))
        statuses = [progress.status for progress in recorder.progress()]
        recorder.close()
    if interrupts:
        raise KeyboardInterrupt(_interrupted(statuses.count("done"), run))
    if not quiet:
        elapsed = span(time.monotonic() - began)
        print(f"{counted(len(statuses), 'trial')} in {elapsed}", file=sys.stderr, flush=True)
        if run.failures.doom:
            say(run.failures.doom)
    return failures


class _Jobs:
    """The trials of a sweep, of which a search chooses one after the other.

    Attributes:
        begun: Those that Tune was given.
        failures: How they fail.
        faults: What happens when their processes die, by name.
        names: The names of all; "" stands for one that is not chosen yet.
        searcher: What chooses them, with search.kind=optuna.
    """

    def __init__(self, plan: SweepPlan, say: Callable[[str], None]):
        self.failures = plan.failures(say)
        self.begun: list[Job] = []
        self.faults: dict[str, Faults] = {}
        self.searcher = SweepSearcher(plan, self.begin) if plan.space.adaptive else None
        self.names = expected_names(plan)[self.searcher.finished if self.searcher else 0 :]
        for job in plan.jobs:
            self.begin(job)

    def begin(self, job: Job) -> None:
        """Note a trial that Tune is given."""
        if job["trial"] not in self.faults:
            self.begun.append(job)
            self.failures.begin(job)
            self.faults[job["trial"]] = job["config"].faults
            name_next(self.names, job["trial"])

    def has_more(self, jobs: list[Job]) -> bool:
        """Return whether the search has another trial, which is then put into `jobs`."""
        if self.searcher is None or (job := self.searcher.next_job()) is None:
            return False
        jobs.append(job)
        return True


def _interrupted(done: int, run: _Jobs) -> str:
    return f"interrupted after {done} of {len(run.names)} trials; the same command with resume=true continues"


def _fit(
    plan: SweepPlan,
    run: _Jobs,
    jobs: Sequence[Job],
    data: Mapping[str, Any],
    recorder: DriversRecorder,
    interrupts: list[int],
    say: Callable[[str], None],
    *,
    last: bool,
) -> list[Job]:
    """Run `jobs` with Tune, and those that a search chooses after them, and return those that have to be run once more.

    Tune itself starts a lost trial again, unless the process died while it changed from one trial to the next.

    Args:
        last: Whether no trial may be run once more.
    """
    trials = _TrialsCallback(recorder, run, say, last=last)
    try:
        _tuner(plan, run, jobs, data, recorder, [_InterruptCallback(interrupts), trials]).fit()
    except Exception as error:
        if last:
            raise
        say(f"Ray Tune failed ({type(error).__name__}); it is started again for the trials that are left")
        ended = {progress.trial for progress in recorder.progress() if progress.status != "running"}
        return [job for job in run.begun if job["trial"] not in ended]
    return [job for job in run.begun if job["trial"] in trials.again]


def _tuner(
    plan: SweepPlan,
    run: _Jobs,
    jobs: Sequence[Job],
    data: Mapping[str, Any],
    recorder: DriversRecorder,
    callbacks: list[tune.Callback],
) -> tune.Tuner:
    search, scheduler = plan.space.search, _scheduler(plan)
    os.environ["TUNE_RESULT_BUFFER_LENGTH"] = "1" if scheduler else "1000"
    os.environ["TUNE_RESULT_BUFFER_MIN_TIME_S"] = "0" if scheduler else str(_BUFFERED_SECONDS)
    objects = {name: thing for config in plan.configs for name, thing in named_objects(config).items()}
    objects |= given_objects(plan.given.model, plan.given.loss, plan.given.clients)
    files = to_send(module_sources(objects))
    home = open_storage(plan.results).child(plan.experiment)
    in_store = home if home.local is None else None
    if plan.given:
        register_user_modules()
    trainable = tune.with_parameters(
        SweepTrial, actor=recorder.actor, files=files, given=plan.given, keep_state=plan.keep_state, data=data
    )
    trainable.__qualname__ = SweepTrial.__name__  # as Ray calls the process, in its dashboard too
    if run.searcher is not None:
        run.searcher.queue.extendleft(reversed(jobs))
    return tune.Tuner(
        trainable,
        param_space={} if run.searcher else {"job": tune.grid_search(list(jobs))},
        tune_config=tune.TuneConfig(
            search_alg=run.searcher,
            num_samples=len(jobs) + plan.space.searched_trials if run.searcher else 1,
            metric=GAIN if scheduler else None,
            mode="max" if scheduler else None,
            scheduler=scheduler,
            max_concurrent_trials=search.max_concurrent,
            trial_name_creator=lambda trial: trial.config["job"]["trial"],
            trial_dirname_creator=lambda trial: trial.config["job"]["trial"],
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=in_store.path if in_store else str(Path(home.location).resolve()),
            storage_filesystem=in_store.filesystem if in_store else None,
            verbose=0,
            callbacks=callbacks,
            stop=_StopDoomed(run),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the recorder keeps the checkpoints
            failure_config=tune.FailureConfig(max_failures=max(config.faults.restarts for config in plan.configs)),
        ),
    )


def _scheduler(plan: SweepPlan) -> ASHAScheduler | None:
    search = plan.space.search
    if search.scheduler != "asha":
        return None
    return ASHAScheduler(
        time_attr="round",
        max_t=max(config.rounds for config in plan.configs),
        grace_period=search.grace_rounds,
        reduction_factor=search.reduction_factor,
    )


def _sent_data(configs: Sequence[Config]) -> dict[str, Any]:
    """Return the data of a sweep in a cluster as objects, by `data_key`, so that only this machine needs the files.

    Data that are too large to send are left out: each machine must have those. On a machine alone, trials load theirs.
    """
    if is_private():
        return {}
    register_user_modules()
    objects = {}
    for key, config in {data_key(config): config for config in configs}.items():
        population = sendable(load_data(config))
        if not any(isinstance(part.x, LazyRows) for part in population.examples()):
            objects[key] = ray.put(population)
    return objects


class _StopDoomed(tune.Stopper):
    """Ends a sweep whose trials all fail with the same error."""

    def __init__(self, run: _Jobs):
        self._run = run

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves it, to restore a sweep; rayfed restores its own

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return bool(self._run.failures.doom)


class _TrialsCallback(tune.Callback):
    """Records at once how trials end that do not say so themselves: stopped by the scheduler, or lost.

    A process that gives no sign of life is killed. Tune then starts a lost trial again, and it continues after its last
    checkpoint.

    Attributes:
        again: The lost trials that Tune does not start again, although they may be.
    """

    def __init__(self, recorder: DriversRecorder, run: _Jobs, say: Callable[[str], None], *, last: bool):
        self._recorder, self._failures, self._say, self._last = recorder, run.failures, say, last
        self._faults: Mapping[str, Faults] = run.faults
        self.again: set[str] = set()
        self._watchdog = Watchdog(recorder)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks, to restore a sweep; rayfed restores its own

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._watchdog.look(lambda trial: self._faults[trial].patience if trial in self._faults else math.inf)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not (trial.last_result or {}).get(ENDED):
            self._recorder.end(_name(trial), {"status": "stopped"})
        self._failures.look(self._recorder.progress())

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._lost(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._lost(trial, last=True)

    def _lost(self, trial: Any, *, last: bool = False) -> None:
        name, error = _name(trial), _error(trial)
        if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.RayTaskError)):
            cause = cause_of_death(error)
        else:  # an error of Tune's own, or of the recorder
            cause = (str(error).strip().splitlines() or ["unknown cause"])[-1]
        happened, cause = self._watchdog.lost(name, cause)
        times = self._recorder.lost(name, Event(event=f"trial {happened}", detail=cause))
        if times <= self._faults[name].restarts and not (last and self._last):
            if last:
                self.again.add(name)
            self._say(f"{name} was lost ({cause}); it is started again from its last checkpoint")
            return
        allowed = f"faults.restarts={self._faults[name].restarts} allows no other start"
        error_text = f"lost {times} times ({cause}); {allowed}" if times > 1 else f"lost ({cause}); {allowed}"
        values = trial.config["job"]["config"].tree() | {"status": "failed", "error": error_text}
        if isinstance(error, ray.exceptions.RayTaskError):
            values["traceback"] = str(error)
        self._recorder.end(name, values)
        self._failures.look(self._recorder.progress())


def _error(trial: Any) -> Any:
    """Return the last error of one of Tune's trials, None if Tune keeps none."""
    if (path := trial.pickled_error_file) is None or not Path(path).exists():
        return None
    return ray.cloudpickle.loads(Path(path).read_bytes())  # this process has just written it


def _name(trial: Any) -> str:
    return str(trial.config["job"]["trial"])


class _InterruptCallback(tune.Callback):
    """Notes Ctrl-C in a list: Tune ends its trials then, and does not say why."""

    def __init__(self, interrupts: list[int]) -> None:
        self._interrupts, self._watching = interrupts, False

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self._watching or threading.current_thread() is not threading.main_thread():
            return
        self._watching, handler = True, signal.getsignal(signal.SIGINT)

        def note(number: int, frame: Any) -> None:
            self._interrupts.append(number)
            if callable(handler):
                handler(number, frame)  # Tune's, which puts back the handler from before

        signal.signal(signal.SIGINT, note)


def _close(recorder: DriversRecorder, jobs: Sequence[Job], *, interrupted: bool) -> int:
    """Record the end of trials that ended without a record, and return how many failed or diverged.

    In an interrupted sweep, trials that did not start have no row, and trials that ran are interrupted.
    """
    progress_of = {progress.trial: progress for progress in recorder.progress()}
    failures = 0
    for job in jobs:
        progress = progress_of.get(job["trial"])
        if interrupted:
            if progress is not None and progress.status == "running":
                recorder.end(job["trial"], {"status": "interrupted"})
        elif progress is None or progress.status == "running":
            error = "did not start" if progress is None or not progress.rounds else "ended without an error message"
            values = job["config"].tree() | {"status": "failed", "error": error}
            recorder.end(job["trial"], values)
            failures += 1
        failures += progress is not None and progress.status in ("failed", "diverged")
    return failures
