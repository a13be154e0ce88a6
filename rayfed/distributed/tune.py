"""Runs the trials of a sweep with Ray Tune. A single run does without it; see `rayfed.distributed.run`.

Whatever dies, the trial starts again from its last checkpoint. Tune notices what died and starts the trial again;
rayfed saves and restores.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Tune reads these when it is imported or later. Its CSV and JSON files repeat the tables. A trial that ends before
# its first scores has no metric. Nobody reads the state of Tune. Its handler of Ctrl-C outlives the experiment.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "3600")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import tune

from rayfed.core.rng import global_generators_seeded
from rayfed.distributed.cluster import connect, on_node
from rayfed.distributed.given_searcher import GivenSearcher
from rayfed.distributed.guarded import guarded
from rayfed.distributed.losses import WAITING_SECONDS, cause_of_loss, failure_by_losses, too_often, waiting_line
from rayfed.distributed.ray_internals import is_preempted, keep_credentials_here, most_resources
from rayfed.distributed.recorder_actor import RemoteRecorder, close_recorder, start_recorder
from rayfed.distributed.running_trials import RunningTrials, trial_name
from rayfed.distributed.schedulers import Chosen, scheduler_of
from rayfed.distributed.sent_data import sent_data
from rayfed.distributed.server_trials import ENDED
from rayfed.distributed.shared import Shared, share
from rayfed.distributed.signals import handled_signals
from rayfed.distributed.trial_list import JobList, RoundsFile, refuse_restore
from rayfed.distributed.tune_server import JOB, PROCESS_NAME, TuneServer, sent
from rayfed.distributed.user_modules import SentFiles, register_user_modules, to_send
from rayfed.experiments.capacity import reserved, together
from rayfed.experiments.config import Config
from rayfed.experiments.progress import Bars, bars_of_sweep, note, restart_line, watched
from rayfed.experiments.space import Space
from rayfed.experiments.sweep import SweepPlan, error_lines, shown_values
from rayfed.experiments.user_code import own_code, own_names
from rayfed.records.progress import Progress
from rayfed.records.storage import open_storage
from rayfed.records.trials import mark_interrupted

if TYPE_CHECKING:
    from ray.tune.search import Searcher

_TUNES_FOLDER = "tune"  # in that of the experiment
_BUFFERED_SECONDS = 0.5  # during which results of short rounds are collected, if no scheduler waits for each
_MOST_PENDING = 200  # trials of a search; pending ones learn nothing from each other


def run_sweep(plan: SweepPlan, *, quiet: bool) -> tuple[list[str], tune.ResultGrid | None]:
    """Run the jobs of `plan`, and return the statuses of the trials and Tune's results.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: The recorder died, or the cluster ended.
        KeyboardInterrupt: The sweep was interrupted. Its trials have ended; the message says how to continue.
    """
    chosen = scheduler_of(plan.space, plan.configs, plan.tuning.scheduler)
    _connect_sweep(plan.configs, quiet=quiet)
    register_user_modules()
    trials = _Trials(plan.configs, plan.space, chosen, plan.tuning.callbacks, quiet=quiet)
    searcher: Searcher | None = None
    expected = plan.expected
    space: dict[str, Any] = {}
    if plan.space.search.kind == "optuna":
        from rayfed.distributed.searcher import SweepSearcher  # needs Optuna, an optional dependency

        searcher = SweepSearcher(plan)
        expected -= searcher.finished
    elif plan.space.adaptive:
        searcher = GivenSearcher(plan)
    else:
        shown = plan.varied
        jobs = [sent(job, shown_values(job["config"], shown))[JOB] for job in plan.jobs]
        space = {JOB: tune.grid_search(jobs)}
    data: dict[str, Shared] = {}
    if plan.given.clients is None:
        data = sent_data(plan.configs, searched=bool(plan.space.adaptive))
    at_once = min(expected, plan.space.search.max_concurrent or expected)
    work = {"given": share(plan.given), "keep_state": plan.keep_state, "data": data, "at_once": at_once}

    def stopped(done: int) -> str:
        return f"interrupted after {done} of {expected} trials; the same command with resume=true continues"

    bars = bars_of_sweep(expected, plan.expected_rounds)
    grid = trials.run(space, _files_of(plan), work, bars, stopped, searcher)
    statuses = [progress.status for progress in trials.progress]
    if trials.interrupted:
        raise KeyboardInterrupt(stopped(statuses.count("done")))
    return statuses, grid


def _connect_sweep(configs: Sequence[Config], *, quiet: bool) -> None:
    """Join or start a cluster that has the resources of all trials, and say where its dashboard is."""
    url = ""
    for placement in dict.fromkeys(config.placement for config in configs):
        url = connect(placement, dashboard=True) or url  # only the first call joins or starts it
    if url and not quiet:
        print(f"dashboard: http://{url}", file=sys.stderr, flush=True)


def _files_of(plan: SweepPlan) -> SentFiles:
    """Return the user's own folders and modules that the trials import."""
    names = set[str]().union(*map(own_names, plan.configs))
    code = own_code(names, plan.given.model, plan.given.loss, plan.given.clients)
    return to_send(code.sources)


class _Trials(tune.Callback, tune.Stopper):
    """The trials that Tune is given, with their recorder: Tune calls it when trials end, and asks whether to stop all.

    Args:
        configs: The configurations of all trials, or the corners of a space that is searched.
        space: What Tune searches.
        chosen: What stops trials.
        callbacks: Callbacks of the user's.

    Attributes:
        interrupted: Whether Ctrl-C was pressed.
        progress: The last known progress of all trials.
    """

    def __init__(
        self,
        configs: Sequence[Config],
        space: Space,
        chosen: Chosen,
        callbacks: Sequence[tune.Callback],
        *,
        quiet: bool,
    ):
        self._configs = configs
        self._space = space
        self._chosen = chosen
        self._callbacks = callbacks
        self._quiet = quiet
        self._folder = configs[0].results
        self._experiment = configs[0].experiment
        self._recorder = RemoteRecorder(start_recorder(self._folder, self._experiment, in_sweep=True))
        self._running = RunningTrials(configs[0].faults)
        self.interrupted = False
        self.progress = list[Progress]()
        self._say_errors = error_lines(self._folder, self._experiment, self._say)
        self._begun: list[Any] = []  # Tune's trials
        self._idle_since: float | None = time.monotonic()

    def run(
        self,
        space: Mapping[str, Any],
        files: SentFiles,
        work: Mapping[str, Any],
        bars: Bars,
        stopped: Callable[[int], str],
        searcher: "Searcher | None" = None,
    ) -> tune.ResultGrid | None:
        """Run the trials, record the end of each, close the recorder, and return Tune's results.

        Args:
            space: The trials, unless `searcher` chooses them.
            files: The user's folders and modules.
            work: Further arguments of `rayfed.distributed.server_trials.Trials`.
            bars: What to show of the progress.
            stopped: Returns the line with which SIGTERM ends the command, from the number of trials that are done.
        """
        for name in ("ray.tune", "ray.train", "ray.air"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are recorded, and shown with the table

        def note_ctrl_c() -> None:
            self.interrupted = True  # so that Tune stops all trials

        def last_line() -> str:
            return stopped(mark_interrupted(self._folder, self._experiment, map(trial_name, self._begun)))

        signals = handled_signals(note_ctrl_c, last_line)
        try:
            tuner = self._tuner(space, files, work, searcher)
            refuse_restore(open_storage(self._folder).child(self._experiment, _TUNES_FOLDER))
            seeded = global_generators_seeded(self._space.search.seed, "schedulers")  # some of Tune's draw from them
            with watched(self._look, bars, quiet=self._quiet), signals, seeded:
                return tuner.fit()
        except tune.TuneError:  # Tune raises it for exceptions of this callback, too
            self._look()  # raises HostLost if the recorder died
            raise
        except KeyboardInterrupt:  # a second one, while Tune was ending its trials
            self.interrupted = True
        finally:
            self.progress = close_recorder(self._recorder, self._say)
        return None

    def _tuner(
        self, space: Mapping[str, Any], files: SentFiles, work: Mapping[str, Any], searcher: "Searcher | None"
    ) -> tune.Tuner:
        search = self._space.search
        chosen = self._chosen
        keep_credentials_here()
        is_buffered = chosen.scheduler is None
        os.environ.pop("TUNE_RESULT_BUFFER_LENGTH", None)
        if is_buffered:
            os.environ["TUNE_RESULT_BUFFER_LENGTH"] = "1000"
            os.environ["TUNE_RESULT_BUFFER_MIN_TIME_S"] = str(_BUFFERED_SECONDS)
        callbacks: list[tune.Callback] = [self, RoundsFile()]
        search_alg: Any = searcher
        at_once = search.max_concurrent
        callbacks += [guarded(callback, self._say) for callback in self._callbacks]
        if searcher is not None and at_once is None:
            _allow_pending_trials(self._configs[0])
        if searcher is None:
            search_alg = JobList(max_concurrent=at_once or 0)
            at_once = None
        trainable = tune.with_parameters(TuneServer, actor=self._recorder.actor, files=files, work=[ray.put(work)])
        trainable.__qualname__ = PROCESS_NAME
        samples = 1
        if searcher is not None:
            samples = -1  # the searcher says when it has finished
        mode = None
        if chosen.metric is not None:
            mode = "max"
        return tune.Tuner(
            trainable,
            param_space=dict(space),
            tune_config=tune.TuneConfig(
                search_alg=search_alg,
                num_samples=samples,
                metric=chosen.metric,
                mode=mode,
                scheduler=chosen.scheduler,
                max_concurrent_trials=at_once,
                trial_name_creator=trial_name,
                trial_dirname_creator=trial_name,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=_TUNES_FOLDER,
                **self._storage(),
                verbose=0,
                callbacks=callbacks,
                stop=self,
                failure_config=tune.FailureConfig(max_failures=self._configs[0].faults.restarts),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the recorder keeps the checkpoints
            ),
        )

    def _storage(self) -> dict[str, Any]:
        """Return the arguments that say where Tune keeps its files."""
        storage = open_storage(self._folder).child(self._experiment)
        if storage.local is None:
            return {"storage_path": storage.path, "storage_filesystem": storage.filesystem}
        return {"storage_path": str(Path(storage.location).resolve())}

    def _say(self, line: str) -> None:
        if not self._quiet:
            note(line)

    def _look(self) -> list[Progress]:
        self.progress = self._recorder.progress()
        return self.progress

    # What Tune calls

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks, to restore a sweep; rayfed restores its own

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.interrupted

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Keep the trials that Tune has, for SIGTERM, and say what a trial waits for."""
        self._begun = trials
        if self._running.is_due:
            self._running.check(trials, self._look())
        if any(trial.status == "RUNNING" for trial in trials):
            self._idle_since = time.monotonic()
        elif self._idle_since is not None and time.monotonic() - self._idle_since > WAITING_SECONDS:
            self._idle_since = None  # said once
            self._say_waiting(trials)

    def _say_waiting(self, trials: list[Any]) -> None:
        needs = []
        if trials:
            needs = trials[0].placement_group_factory.bundles
        self._say(waiting_line(needs))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        result = trial.last_result or {}
        if not result.get(ENDED):
            self._recorder.end(trial_name(trial), {"status": "stopped"}, after_round=result.get("round", 0))
        self._say_failures()

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = trial_name(trial)
        cause = self._cause(trial)
        counts = not is_preempted(_error(trial))
        self._say(restart_line(self._recorder.lost(name, cause, counts=counts), cause))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        config: Config = ray.cloudpickle.loads(trial.config[JOB].job)["config"]
        cause = self._cause(trial)
        times = self._recorder.lost(trial_name(trial), cause).restarts
        error = too_often(times, cause, config.faults.restarts)
        self._recorder.end(trial_name(trial), failure_by_losses(config, error, _error(trial)))
        self._say_failures()

    def _say_failures(self) -> None:
        """Say the new errors of trials."""
        self._say_errors(self._look())

    def _cause(self, trial: Any) -> str:
        """Return why one of Tune's trials was lost: its server, with the node, or what it raised."""
        where = on_node((trial.last_result or {}).get("node_ip"))
        return cause_of_loss(_error(trial), where, self._running.why_ended(trial_name(trial)))


def _allow_pending_trials(config: Config) -> None:
    """Let Tune ask for as many trials of a search as fit on all nodes that an autoscaler may start.

    Tune itself asks for one more trial at a time, so that nodes would start one by one.
    """
    most = most_resources()
    if not config.placement.autoscale or most is None:
        return
    needed = together(reserved(config))
    fitting = min(most.get(name, 0.0) // amount for name, amount in needed.items())
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(min(_MOST_PENDING, max(1, int(fitting))))


def _error(trial: Any) -> Any:
    """Return the last error of one of Tune's trials, None if Tune keeps none."""
    file = trial.pickled_error_file
    if file is None or not Path(file).exists():
        return None
    return ray.cloudpickle.loads(Path(file).read_bytes())  # this process has just written it
