"""Run the trials of a search space on Ray Tune."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.distributed.capacity import bundles, check_fits, known_nodes
from rayfed.engine.server import Record
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan, trial_name
from rayfed.experiments.progress import many_trials, span, watch_trials
from rayfed.experiments.run_summary import counted, remarks
from rayfed.experiments.space import Space
from rayfed.experiments.user_code import own_classes
from rayfed.results.folder import make_place
from rayfed.results.read import read

MAX_NOTES = 8  # algorithms' remarks that are shown before a sweep


def sweep(space: Space, *, quiet: bool = False) -> int:
    """Run every trial of `space` and return the number of trials that failed or diverged.

    With resume=true, trials that are done are skipped.

    Raises:
        UsageError: A configuration cannot work, or the resources do not exist. Nothing was started.
        KeyboardInterrupt: The sweep was interrupted and its trials have ended. The text says how to continue.
    """
    trials = [(Config.read(values), values) for values in space.trials()]
    configs = [config for config, _ in trials]
    first = configs[0]
    nodes = known_nodes()
    for config in configs if nodes is not None else ():
        check_fits(config.placement, nodes or [])
    names = [trial_name(config) for config in configs]
    if len(set(names)) < len(names):
        raise UsageError(f"arms: two trials are the same configuration ({_repeated(names)}); each must differ")
    if any((c.results, c.experiment) != (first.results, first.experiment) for c in configs):
        raise UsageError("results and experiment: one for the whole sweep, not one for each arm")
    notes = _check_all(configs, space)
    make_place(first.results, first.experiment)
    done = _done(first) if first.resume else set()
    todo = [
        {"trial": name, "values": values} for name, (_, values) in zip(names, trials, strict=True) if name not in done
    ]
    if not quiet:
        lines = [_announce(space, len(names), len(done & set(names))), *_shortened(notes)]
        print("\n".join(lines), file=sys.stderr, flush=True)
    return _tune(space, configs, todo, quiet) if todo else 0


def _check_all(configs: Sequence[Config], space: Space) -> list[str]:
    """Plan each configuration with the first seed, load each dataset and partition once, and return all remarks."""
    loaded: dict[str, Any] = {}
    notes: dict[str, None] = {}
    for config in configs[: len(configs) // len(space.seeds)]:
        key = repr((config.data, config.partition, config.leave_out))
        plan = make_plan(config, population=loaded.get(key))
        loaded[key] = plan.population
        if space.search.scheduler == "asha" and not any(len(client.val) for client in plan.population.participants):
            raise UsageError("search.scheduler=asha: compares validation accuracies, and partition.validation is 0")
        notes |= {f"note: {config.algorithm_name}: {remark}": None for remark in remarks(plan)}
    return list(notes)


def _shortened(notes: list[str]) -> list[str]:
    more = [f"{len(notes) - MAX_NOTES} more notes; rayfed run prints those of one configuration"]
    return notes[:MAX_NOTES] + (more if len(notes) > MAX_NOTES else [])


def _repeated(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _done(config: Config) -> set[str]:
    if not (Path(config.results) / config.experiment / "trials").exists():
        return set()
    trials = read(config.results, config.experiment).trials
    return set(trials.loc[trials["status"] == "done", "trial"])


def _announce(space: Space, total: int, done: int) -> str:
    counts: dict[str, int] = {}
    for arm in space.arms:
        name = str(arm[0].get("algorithm", {}).get("name", "fedavg"))
        counts[name] = counts.get(name, 0) + len(arm)
    budget = ", ".join(f"{name} {count}" for name, count in counts.items())
    skipped = f"; {done} are done already" if done else ""
    return f"{counted(total, 'trial')}: configurations {budget}; each with {counted(len(space.seeds), 'seed')}{skipped}"


def _tune(space: Space, configs: Sequence[Config], todo: list[dict[str, Any]], quiet: bool) -> int:
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_SYNCER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    from rayfed.distributed import cluster

    first = configs[0]
    placements = dict.fromkeys(config.placement for config in configs)  # usually the same for all trials
    url, *_ = [cluster.connect(placement, dashboard=True) for placement in placements]
    modules = cluster.carry_user_modules(*(thing for config in configs for _, thing in own_classes(config)))
    if not quiet and url:
        print(f"dashboard: http://{url}", file=sys.stderr, flush=True)
    home = (Path(first.results) / first.experiment).resolve()
    recorder = cluster.remote_recorder(first.results, first.experiment)
    scheduler = None
    if space.search.scheduler == "asha":
        scheduler = ASHAScheduler(
            time_attr="round",
            max_t=max(config.rounds for config in configs),
            grace_period=space.search.grace_rounds,
            reduction_factor=space.search.reduction_factor,
        )
    interrupts: list[int] = []
    for name in ("ray.tune", "ray.train", "ray.air"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are recorded and reported with the results
    tuner = tune.Tuner(
        tune.with_resources(_trainable(recorder, modules), _resources),
        param_space={"job": tune.grid_search(todo)},
        tune_config=tune.TuneConfig(
            metric="val" if scheduler else None,
            mode="max" if scheduler else None,
            scheduler=scheduler,
            max_concurrent_trials=space.search.max_concurrent,
            trial_name_creator=lambda trial: trial.config["job"]["trial"],
            trial_dirname_creator=lambda trial: trial.config["job"]["trial"],
        ),
        run_config=tune.RunConfig(
            name="tune", storage_path=str(home), verbose=0, callbacks=[_watching_interrupts(interrupts)]
        ),
    )
    finished, began = threading.Event(), time.monotonic()
    watcher = threading.Thread(
        target=watch_trials,
        args=(
            recorder.progress,
            finished.wait,
            lambda trials: many_trials(trials, len(todo), time.monotonic() - began),
        ),
        daemon=True,
    )
    if not quiet:
        watcher.start()
    try:
        tuner.fit()
    except KeyboardInterrupt:  # a second Ctrl-C, while Tune was ending its trials
        interrupts.append(signal.SIGINT)
    finally:
        finished.set()
        if not quiet:
            watcher.join()
        failures = _close(recorder, todo, interrupted=bool(interrupts), stops=scheduler is not None)
    if interrupts:
        done = sum(progress.status == "done" for progress in recorder.progress())
        raise KeyboardInterrupt(
            f"interrupted after {done} of {len(todo)} trials; the same command with resume=true goes on"
        )
    if not quiet:
        print(f"{counted(len(todo), 'trial')} in {span(time.monotonic() - began)}", file=sys.stderr, flush=True)
    return failures


def _resources(config: Mapping[str, Any]) -> Any:
    from ray import tune

    return tune.PlacementGroupFactory(bundles(Config.read(config["job"]["values"]).placement), strategy="PACK")


def _trainable(recorder: Any, modules: list[ModuleType]) -> Any:
    actor = recorder.actor  # `trial` is sent to every trial's process, and needs no more of the recorder than this

    def trial(config: Mapping[str, Any]) -> None:
        import ray
        from ray import tune

        from rayfed.distributed.cluster import RemoteRecorder, run_placed

        for module in modules:  # the user's modules, which `Config.read` resolves by name
            sys.modules.setdefault(module.__name__, module)
        sink = RemoteRecorder(actor)
        plan = make_plan(Config.read(config["job"]["values"]))

        def report(record: Record) -> None:
            scores = record.accuracy(plan.evaluation.points[0])
            if scores:
                tune.report({"round": record.round, **scores})

        saved = sink.saved(plan.trial) if plan.config.resume else None
        run_placed(plan, sink, ray.util.get_current_placement_group(), saved, report)

    return trial


def _watching_interrupts(interrupts: list[int]) -> Any:
    """Return a callback for Tune that appends to `interrupts` at Ctrl-C: Tune ends its trials, but does not say why."""
    from ray.tune import Callback

    class Watching(Callback):
        watching = False

        def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
            if self.watching or threading.current_thread() is not threading.main_thread():
                return
            self.watching, handler_of_tune = True, signal.getsignal(signal.SIGINT)

            def note(number: int, frame: Any) -> None:
                interrupts.append(number)
                if callable(handler_of_tune):
                    handler_of_tune(number, frame)  # which restores the handler before it

            signal.signal(signal.SIGINT, note)

    return Watching()


def _close(recorder: Any, todo: Sequence[Mapping[str, Any]], *, interrupted: bool, stops: bool) -> int:
    """Record the end of trials that could not do so themselves, and return the number of trials that went wrong.

    Such trials were stopped by the scheduler or lost. In a sweep that was interrupted, trials that did not start get no
    row, and trials that were running become "interrupted". Tune ended those, which they recorded as "stopped"; where
    the scheduler itself `stops` trials, that status is left as it is.
    """
    by_trial = {progress.trial: progress for progress in recorder.progress()}
    failures = 0
    for job in todo:
        progress = by_trial.get(job["trial"])
        if interrupted:
            cut_short = ("running",) if stops else ("running", "stopped")
            if progress is not None and progress.status in cut_short:
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
