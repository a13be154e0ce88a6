"""Runs the trials of a sweep with Ray Tune."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_SYNCER", "1")  # read when Tune is imported
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from rayfed.core.records import Record
from rayfed.distributed import cluster
from rayfed.distributed.placement import bundles, run_reserved
from rayfed.distributed.user_modules import install, register_user_modules, without_caches
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.progress import many_trials, span, watch_trials
from rayfed.experiments.run_summary import counted
from rayfed.experiments.sweep import Job, SweepPlan
from rayfed.experiments.user_code import ModuleSource, module_sources, named_objects
from rayfed.results.folder import join
from rayfed.results.storage import is_url


def run_trials(plan: SweepPlan, *, quiet: bool) -> int:
    """Run the jobs of `plan` and return the number of trials that failed or diverged.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        KeyboardInterrupt: The sweep was interrupted. Its trials have ended; the message says how to continue.
    """
    placements = dict.fromkeys(config.placement for config in plan.configs)
    url, *_ = [cluster.connect(placement, dashboard=True) for placement in placements]
    if not quiet and url:
        print(f"dashboard: http://{url}", file=sys.stderr, flush=True)
    recorder = cluster.remote_recorder(plan.results, plan.experiment)
    for name in ("ray.tune", "ray.train", "ray.air"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are recorded, and shown with the table
    interrupts: list[int] = []
    tuner = _tuner(plan, recorder, interrupts)
    ended, began = threading.Event(), time.monotonic()
    watcher = threading.Thread(
        target=watch_trials,
        args=(
            recorder.progress,
            ended.wait,
            lambda trials: many_trials(trials, len(plan.jobs), time.monotonic() - began),
        ),
        daemon=True,
    )
    if not quiet:
        watcher.start()
    try:
        tuner.fit()
    except KeyboardInterrupt:  # a second one, while Tune was ending its trials
        interrupts.append(signal.SIGINT)
    finally:
        ended.set()
        if not quiet:
            watcher.join()
        scheduler_stops = plan.space.search.scheduler != "none"
        failures = _close(recorder, plan.jobs, interrupted=bool(interrupts), scheduler_stops=scheduler_stops)
    if interrupts:
        done = sum(progress.status == "done" for progress in recorder.progress())
        raise KeyboardInterrupt(
            f"interrupted after {done} of {len(plan.jobs)} trials; the same command with resume=true continues"
        )
    if not quiet:
        elapsed = span(time.monotonic() - began)
        print(f"{counted(len(plan.jobs), 'trial')} in {elapsed}", file=sys.stderr, flush=True)
    return failures


def _tuner(plan: SweepPlan, recorder: cluster.RemoteRecorder, interrupts: list[int]) -> tune.Tuner:
    search = plan.space.search
    scheduler = None
    if search.scheduler == "asha":
        scheduler = ASHAScheduler(
            time_attr="round",
            max_t=max(config.rounds for config in plan.configs),
            grace_period=search.grace_rounds,
            reduction_factor=search.reduction_factor,
        )
    objects = {name: thing for config in plan.configs for name, thing in named_objects(config).items()}
    sources = without_caches(module_sources(objects))
    home = join(plan.results, plan.experiment)
    storage = home if is_url(home) else Path(home).resolve()
    return tune.Tuner(
        tune.with_resources(_trainable(recorder, sources), _resources),
        param_space={"job": tune.grid_search(list(plan.jobs))},
        tune_config=tune.TuneConfig(
            metric="val" if scheduler else None,
            mode="max" if scheduler else None,
            scheduler=scheduler,
            max_concurrent_trials=search.max_concurrent,
            trial_name_creator=lambda trial: trial.config["job"]["trial"],
            trial_dirname_creator=lambda trial: trial.config["job"]["trial"],
        ),
        run_config=tune.RunConfig(
            name="tune", storage_path=str(storage), verbose=0, callbacks=[_InterruptCallback(interrupts)]
        ),
    )


def _resources(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
    return tune.PlacementGroupFactory(bundles(Config.read(config["job"]["values"]).placement), strategy="PACK")


def _trainable(
    recorder: cluster.RemoteRecorder, sources: Sequence[ModuleSource]
) -> Callable[[Mapping[str, Any]], None]:
    actor = recorder.actor  # the function travels to each trial, and needs only this handle of the recorder

    def trial(config: Mapping[str, Any]) -> None:
        install(sources)  # of the modules that `Config.read` and `make_plan` look up by name
        sink = cluster.RemoteRecorder(actor)
        plan = make_plan(Config.read(config["job"]["values"]))
        register_user_modules()  # the hosts are sent the plan from here

        def report(record: Record) -> None:
            scores = record.accuracy(plan.evaluation.points[0])
            if scores:
                tune.report({"round": record.round, **scores})

        saved = sink.saved(plan.trial) if plan.config.resume else ()
        run_reserved(plan, sink, ray.util.get_current_placement_group(), saved, report)

    return trial


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


def _close(recorder: cluster.RemoteRecorder, jobs: Sequence[Job], *, interrupted: bool, scheduler_stops: bool) -> int:
    """Record the end of trials that ended without a record, and return how many failed or diverged.

    Such trials were stopped by the scheduler, or lost. In an interrupted sweep, trials that did not start have no row,
    and trials that ran are interrupted. Tune ends these in the same way as a scheduler stops a trial, so `stopped` is
    kept only if the sweep has a scheduler.
    """
    progress_of = {progress.trial: progress for progress in recorder.progress()}
    failures = 0
    for job in jobs:
        progress = progress_of.get(job["trial"])
        if interrupted:
            ended = ("running",) if scheduler_stops else ("running", "stopped")
            if progress is not None and progress.status in ended:
                recorder.end(job["trial"], {"status": "interrupted"})
        elif progress is None:
            config = Config.read(job["values"])
            values = config.tree() | {"seed": config.seed, "status": "failed", "error": "did not start"}
            recorder.end(job["trial"], values)
            failures += 1
        elif progress.status == "running":
            recorder.end(job["trial"], {"status": "stopped"})
        failures += progress is not None and progress.status in ("failed", "diverged")
    return failures
