"""Runs trials with Ray Tune: those of a sweep, or a single run as a sweep of one trial.

Whatever dies, the trial starts again from its last checkpoint. Tune notices what died and starts the trial again;
rayfed saves and restores.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Tune reads these when it is imported or later. Its CSV and JSON files repeat the tables. A trial that ends before
# its first scores has no metric. Nobody reads the state of Tune. Its handler of Ctrl-C outlives the experiment.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_SYNCER", "1")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "3600")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

from rayfed.core.errors import HostLost
from rayfed.core.machine import on_sigterm
from rayfed.data.lazy_rows import LazyRows
from rayfed.distributed.cluster import connect, is_private, on_node
from rayfed.distributed.fleet import sendable
from rayfed.distributed.ray_internals import cause_of_death, skip_callback_statistics
from rayfed.distributed.recorder_actor import RemoteRecorder, start_recorder
from rayfed.distributed.server_actor import SentJob, ServerActor
from rayfed.distributed.trial import ENDED, GAIN, RAISED
from rayfed.distributed.user_modules import SentFiles, register_user_modules, to_send
from rayfed.engine.checkpoint import newest_round
from rayfed.experiments.capacity import reserved
from rayfed.experiments.config import Config
from rayfed.experiments.plan import Plan, data_key, load_data
from rayfed.experiments.progress import Bars, bars_of_sweep, note, one_trial, span, watched
from rayfed.experiments.run_summary import counted
from rayfed.experiments.space import Search
from rayfed.experiments.sweep import Job, SweepPlan, error_lines, expected_names, name_next
from rayfed.experiments.trial import interrupted
from rayfed.experiments.user_code import given_objects, module_sources, named_objects
from rayfed.records.recorder import Progress, Recorder
from rayfed.records.storage import open_storage
from rayfed.records.trials import mark_interrupted, recorded_value

if TYPE_CHECKING:
    from rayfed.distributed.searcher import SweepSearcher

_BUFFERED_SECONDS = 0.5  # during which results of short rounds are collected, if no scheduler waits for each
_WAITING_SECONDS = 30.0  # without a trial that runs, until a line says what the cluster has not freed


def run_trial(plan: Plan, *, quiet: bool) -> str:
    """Run a single trial on hosts, and return the hash of its final state.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: Processes died too often, or the recorder died.
        KeyboardInterrupt: Ctrl-C ended the trial; the message says how to continue.
        Exception: The error that ended the trial.
    """
    config, name = plan.config, plan.trial
    connect(config.placement, dashboard=False)
    register_user_modules()
    sent = dataclasses.replace(plan, population=sendable(plan.population), sources=())
    job = Job(trial=name, config=config, identity={})
    trials = _Trials(config.results, config.experiment, quiet=quiet)

    def stopped(progress: Sequence[Progress]) -> KeyboardInterrupt:
        saved = newest_round(Recorder(config.results, config.experiment).saved(name))
        return interrupted(max((one.round for one in progress), default=0), saved)

    def terminated() -> str:
        mark_interrupted(config.results, config.experiment, [name])
        return str(stopped(trials.last_progress))

    space = {"job": trials.begin(job)}
    files = to_send(plan.sources)
    with trials.recorded(lambda progress: one_trial(progress[0]), terminated):
        _tuner(trials, [config], Search(), space, files, {"plan": sent}).fit()
    if trials.interrupted and [progress.status for progress in trials.last_progress] != ["done"]:
        raise stopped(trials.last_progress)
    if (raised := trials.results.get(name, {}).get(RAISED)) is not None:
        raise ray.cloudpickle.loads(raised)
    (progress,) = trials.last_progress
    if progress.status != "done":
        raise HostLost(progress.error or "the trial ended without an error message")
    return str(recorded_value(config.results, config.experiment, name, "weights_hash"))


def run_sweep(plan: SweepPlan, *, quiet: bool) -> int:
    """Run the jobs of `plan` and return the number of trials that failed or diverged.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: The recorder died, or the cluster ended.
        KeyboardInterrupt: The sweep was interrupted. Its trials have ended; the message says how to continue.
    """
    url, *_ = [connect(placement, dashboard=True) for placement in dict.fromkeys(c.placement for c in plan.configs)]
    if not quiet and url:
        print(f"dashboard: http://{url}", file=sys.stderr, flush=True)
    names, began = expected_names(plan), time.monotonic()
    trials = _Trials(plan.results, plan.experiment, quiet=quiet, names=names)
    searcher = None
    if plan.space.adaptive:
        from rayfed.distributed.searcher import SweepSearcher  # needs Optuna, an optional dependency

        searcher = SweepSearcher(plan, trials.begin)
        del names[: searcher.finished]
    data = _sent_data(plan.configs) if plan.given.clients is None else {}
    objects = {name: thing for config in plan.configs for name, thing in named_objects(config).items()}
    objects |= given_objects(plan.given.model, plan.given.loss, plan.given.clients)
    files = to_send(module_sources(objects))
    if plan.given:
        register_user_modules()
    work = {"given": plan.given, "keep_state": plan.keep_state, "data": data}
    space = {} if searcher else {"job": tune.grid_search([trials.begin(job) for job in plan.jobs])}

    def stopped(done: int) -> str:
        return f"interrupted after {done} of {len(names)} trials; the same command with resume=true continues"

    def terminated() -> str:
        return stopped(mark_interrupted(plan.results, plan.experiment, names))

    with trials.recorded(bars_of_sweep(names), terminated):
        _tuner(trials, plan.configs, plan.space.search, space, files, work, searcher).fit()
    statuses = [progress.status for progress in trials.last_progress]
    if trials.interrupted:
        raise KeyboardInterrupt(stopped(statuses.count("done")))
    if not quiet:
        elapsed = span(time.monotonic() - began)
        print(f"{counted(len(statuses), 'trial')} in {elapsed}", file=sys.stderr, flush=True)
    return sum(status in ("failed", "diverged") for status in statuses)


class _Trials(tune.Callback, tune.Stopper):
    """The trials that Tune is given, with their recorder: Tune calls it when trials end, and asks whether to stop all.

    Args:
        names: The names of all trials of a sweep, "" where a search has not chosen the trial yet; None in a single run.

    Attributes:
        results: The last result of each trial that was not stopped.
        interrupted: Whether Ctrl-C was pressed.
        last_progress: The last known progress of all trials.
    """

    def __init__(self, results: str, experiment: str, *, quiet: bool, names: list[str] | None = None):
        self.home = open_storage(results).child(experiment)
        self.recorder = RemoteRecorder(start_recorder(results, experiment, in_sweep=names is not None))
        self.results: dict[str, dict[str, Any]] = {}
        self.interrupted = False
        self.last_progress: list[Progress] = []
        self._quiet, self._names = quiet, names
        self._say_errors = error_lines(results, experiment, self._say)
        self._jobs: dict[str, Job] = {}
        self._idle_since: float | None = time.monotonic()

    def _say(self, line: str) -> None:
        if not self._quiet:
            note(line)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks, to restore a sweep; rayfed restores its own

    def begin(self, job: Job) -> SentJob:
        """Note a trial, and return what Tune is given."""
        self._jobs[job["trial"]] = job
        if self._names is not None:
            name_next(self._names, job["trial"])
        config = job["config"]
        return SentJob(
            trial=job["trial"],
            restarts=config.faults.restarts,
            placement=config.placement,
            bundles=reserved(config),
            job=ray.cloudpickle.dumps(job),
        )

    @contextlib.contextmanager
    def recorded(self, bars: Bars, terminated: Callable[[], str]) -> Iterator[None]:
        """Within, show the progress as `bars`, and end the command at SIGTERM with the line of `terminated`.

        Afterwards the end of every trial is recorded, and the recorder is closed.
        """
        for name in ("ray.tune", "ray.train", "ray.air"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are recorded, and shown with the table
        try:
            with watched(self._progress, bars, quiet=self._quiet), _ended_by_sigterm(terminated), self._ctrl_c_noted():
                yield
        except tune.TuneError as error:  # Tune raises it for exceptions of this callback, too
            try:
                self.recorder.progress()
            except HostLost as lost:
                raise lost from error
            raise
        except KeyboardInterrupt:  # a second one, while Tune was ending its trials
            self.interrupted = True
        finally:
            with contextlib.suppress(HostLost):  # the death of the recorder was raised before
                self._close()

    @contextlib.contextmanager
    def _ctrl_c_noted(self) -> Iterator[None]:
        """Within, note the first Ctrl-C, after which Tune stops all trials. The second one raises KeyboardInterrupt."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield
            return

        def note_first(number: int, frame: Any) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, note_first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _progress(self) -> list[Progress]:
        self.last_progress = self.recorder.progress()
        return self.last_progress

    def _close(self) -> None:
        """Record missing ends of trials, and close the recorder. Interrupted trials that never began have no row."""
        progress_of = {progress.trial: progress for progress in self.recorder.progress()}
        for name, job in self._jobs.items():
            progress = progress_of.get(name)
            if progress is not None and progress.status != "running":
                continue
            started = progress is not None and progress.rounds > 0
            if not self.stop_all():
                error = "ended without an error message" if started else "did not start"
                self.recorder.end(name, job["config"].tree() | {"status": "failed", "error": error})
            elif started:
                self.recorder.end(name, {"status": "interrupted"})
        self._progress()
        for line in self.recorder.close():
            self._say(line)

    # What Tune calls

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.interrupted

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Say what a trial waits for."""
        if any(trial.status == "RUNNING" for trial in trials):
            self._idle_since = time.monotonic()
        elif self._idle_since is not None and time.monotonic() - self._idle_since > _WAITING_SECONDS:
            self._idle_since = None  # said once
            needs = trials[0].placement_group_factory.bundles if trials else []
            seconds = f"{_WAITING_SECONDS:g} s"
            self._say(f"no trial has begun for {seconds}: it needs {needs}; `ray status` shows what is free")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        result = trial.last_result or {}
        if result.get(ENDED):
            self.results[_name(trial)] = result
        else:
            self.recorder.end(_name(trial), {"status": "stopped"})
        self._look()

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        cause = _cause(trial)
        done = self.recorder.lost(_name(trial), cause).rounds_done
        self._say(f"{_name(trial)} was lost after round {done} ({cause}); it starts again from its last checkpoint")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = _name(trial)
        config = self._jobs[name]["config"]
        cause = _cause(trial)
        times = self.recorder.lost(name, cause).lost
        lost = f"lost {times} times" if times > 1 else "lost"
        error = f"{lost} ({cause}); faults.restarts={config.faults.restarts} allows no other start"
        values = config.tree() | {"status": "failed", "error": error}
        if isinstance(raised := _error(trial), ray.exceptions.RayTaskError):
            values["traceback"] = str(raised)
        self.recorder.end(name, values)
        self._look()

    def _look(self) -> None:
        if self._names is not None:  # a single run raises its error
            self._say_errors(self.recorder.progress())


def _name(trial: Any) -> str:
    return str(trial.config["job"]["trial"])


def _error(trial: Any) -> Any:
    """Return the last error of one of Tune's trials, None if Tune keeps none."""
    if (path := trial.pickled_error_file) is None or not Path(path).exists():
        return None
    return ray.cloudpickle.loads(Path(path).read_bytes())  # this process has just written it


def _cause(trial: Any) -> str:
    """Return why one of Tune's trials was lost: its server, with the node, or what it raised."""
    error = _error(trial)
    if isinstance(error, ray.exceptions.RayTaskError):
        return cause_of_death(error)
    if isinstance(error, ray.exceptions.RayActorError):
        return f"its server{on_node((trial.last_result or {}).get('node_ip'))}: {cause_of_death(error)}"
    return (str(error).strip().splitlines() or ["unknown cause"])[-1]


def _tuner(
    trials: _Trials,
    configs: Sequence[Config],
    search: Search,
    space: Mapping[str, Any],
    files: SentFiles,
    work: Mapping[str, Any],
    searcher: "SweepSearcher | None" = None,
) -> tune.Tuner:
    """Return Tune's tuner for `trials`, whose configurations are in `space` unless `searcher` chooses them.

    Args:
        configs: The configurations of all trials, or the corners of a space that is searched.
        files: The user's folders and modules.
        work: Further arguments of `Trials`.
    """
    skip_callback_statistics()
    stops_early = search.scheduler == "asha"
    os.environ["TUNE_RESULT_BUFFER_LENGTH"] = "1" if stops_early else "1000"
    os.environ["TUNE_RESULT_BUFFER_MIN_TIME_S"] = "0" if stops_early else str(_BUFFERED_SECONDS)
    trainable = tune.with_parameters(ServerActor, actor=trials.recorder.actor, files=files, work=[ray.put(work)])
    trainable.__qualname__ = ServerActor.__name__  # Ray names the process so
    storage = trials.home
    scheduler: FIFOScheduler = _Fifo()  # type: ignore[no-untyped-call]
    if stops_early:
        scheduler = _Asha(
            time_attr="round",
            max_t=max(config.rounds for config in configs),
            grace_period=search.grace_rounds,
            reduction_factor=search.reduction_factor,
        )
    return tune.Tuner(
        trainable,
        param_space=dict(space),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=-1 if searcher else 1,  # the searcher says when it has finished
            metric=GAIN if stops_early else None,
            mode="max" if stops_early else None,
            scheduler=scheduler,
            max_concurrent_trials=search.max_concurrent,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=storage.path if storage.local is None else str(Path(storage.location).resolve()),
            storage_filesystem=storage.filesystem if storage.local is None else None,
            verbose=0,
            callbacks=[trials],
            stop=trials,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the recorder keeps the checkpoints
        ),
    )


class _RestartedFirst:
    """Lets a lost trial start again before trials that have not begun, as often as its configuration allows."""

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        trial.max_failures = trial.config["job"]["restarts"]
        super().on_trial_add(tune_controller, trial)  # type: ignore[misc]

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        lost = (t for t in tune_controller.get_trials() if t.status == "PENDING" and t.num_failures)
        return next(lost, None) or super().choose_trial_to_run(tune_controller)  # type: ignore[misc]


class _Fifo(_RestartedFirst, FIFOScheduler):
    pass


class _Asha(_RestartedFirst, ASHAScheduler):
    pass


def _sent_data(configs: Sequence[Config]) -> dict[str, Any]:
    """Return the data of a sweep in a cluster as objects by `data_key`, so that only this machine needs the files.

    Data that are too large to send are left out; each machine must have them. On this machine alone, trials load data.
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


def _ended_by_sigterm(end: Callable[[], str]) -> "contextlib.AbstractContextManager[None]":
    """Within, end this process at SIGTERM, with exit code 143 and the line that `end()` returns.

    SLURM and `timeout` send the signal to Ray's processes, too. Asking these for anything would print pages of errors.
    """

    def act(number: int, frame: Any) -> None:
        line = end()
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K\x1b[?25h")  # clears the line of progress, and shows the cursor again
        print(f"rayfed: {line}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(128 + number)

    return on_sigterm(act)
