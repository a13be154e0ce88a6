"""Run a sweep on Ray Tune: `python -m rayfed.sweep space.yaml [key=value …]`."""

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

from rayfed.cli.help import usage
from rayfed.cli.interrupts import INTERRUPTED, command
from rayfed.core.errors import UsageError
from rayfed.core.records import Record
from rayfed.distributed.capacity import bundles, check_fits, known_nodes
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan, trial_name
from rayfed.experiments.progress import many_trials, span, watch_trials
from rayfed.experiments.run_summary import counted, remarks
from rayfed.experiments.sources import from_arguments, from_file
from rayfed.experiments.space import Space, read_space
from rayfed.experiments.user_code import own_classes
from rayfed.results.folder import make_experiment_folder
from rayfed.results.read import read
from rayfed.results.report import plot, render

NOTES = 8  # of the algorithms' remarks, so many are shown before a sweep


def sweep(space: Space, *, quiet: bool = False) -> int:
    """Runs every trial of `space` and returns how many went wrong. Finished ones are skipped with resume=true.

    Raises:
        UsageError: a configuration that cannot work, or resources that do not exist; nothing was started.
        KeyboardInterrupt: after the trials were ended; its text says how to go on.
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
    make_experiment_folder(first.results, first.experiment)
    done = _done(first) if first.resume else set()
    todo = [
        {"trial": name, "values": values} for name, (_, values) in zip(names, trials, strict=True) if name not in done
    ]
    if not quiet:
        said = [_announce(space, len(names), len(done & set(names))), *_shortened(notes)]
        print("\n".join(said), file=sys.stderr, flush=True)
    return _tune(space, configs, todo, quiet) if todo else 0


def _check_all(configs: Sequence[Config], space: Space) -> list[str]:
    """Plans each configuration once, with data loaded once for each way of dividing it; returns the plans' remarks."""
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
    more = [f"{len(notes) - NOTES} more notes; rayfed.run prints those of one configuration"]
    return notes[:NOTES] + (more if len(notes) > NOTES else [])


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
    placements = dict.fromkeys(config.placement for config in configs)  # most sweeps have one for all their trials
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
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are recorded, and shown with the table
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
    over, began = threading.Event(), time.monotonic()
    watcher = threading.Thread(
        target=watch_trials,
        args=(
            recorder.progress,
            over.wait,
            lambda trials: many_trials(trials, len(todo), time.monotonic() - began),
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
        over.set()
        if not quiet:
            watcher.join()
        wrong = _close(recorder, todo, interrupted=bool(interrupts), stops=scheduler is not None)
    if interrupts:
        done = sum(progress.status == "done" for progress in recorder.progress())
        raise KeyboardInterrupt(
            f"interrupted after {done} of {len(todo)} trials; the same command with resume=true goes on"
        )
    if not quiet:
        print(f"{counted(len(todo), 'trial')} in {span(time.monotonic() - began)}", file=sys.stderr, flush=True)
    return wrong


def _resources(config: Mapping[str, Any]) -> Any:
    from ray import tune

    return tune.PlacementGroupFactory(bundles(Config.read(config["job"]["values"]).placement), strategy="PACK")


def _trainable(recorder: Any, modules: list[ModuleType]) -> Any:
    actor = recorder.actor  # the function travels to each trial; of the recorder it needs this handle

    def trial(config: Mapping[str, Any]) -> None:
        import ray
        from ray import tune

        from rayfed.distributed.cluster import RemoteRecorder, run_placed

        for module in modules:  # the user's own, which `Config.read` looks up by name
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


def _watching_interrupts(found: list[int]) -> Any:
    """A callback for Tune that notes Ctrl-C in `found`: Tune ends its trials then, and tells nobody why."""
    from ray.tune import Callback

    class Watching(Callback):
        watching = False

        def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
            if self.watching or threading.current_thread() is not threading.main_thread():
                return
            self.watching, tunes = True, signal.getsignal(signal.SIGINT)

            def note(number: int, frame: Any) -> None:
                found.append(number)
                if callable(tunes):
                    tunes(number, frame)  # puts back the handler from before

            signal.signal(signal.SIGINT, note)

    return Watching()


def _close(recorder: Any, todo: Sequence[Mapping[str, Any]], *, interrupted: bool, stops: bool) -> int:
    """Settles the trials that ended without a word (stopped by the scheduler, or lost); returns how many went wrong.

    Where the sweep was `interrupted`, those that did not start have no row, and those under way are interrupted, though
    what Tune's end of a trial looks like from inside is `stopped`; a scheduler that `stops` some itself leaves that.
    """
    known = {progress.trial: progress for progress in recorder.progress()}
    wrong = 0
    for job in todo:
        progress = known.get(job["trial"])
        if interrupted:
            ended = progress is not None and progress.status in ("running", *(() if stops else ("stopped",)))
            if ended:
                recorder.end(job["trial"], {"status": "interrupted"})
        elif progress is None:
            config = Config.read(job["values"])
            values = config.tree() | {"seed": config.seed, "status": "failed", "error": "did not start"}
            recorder.end(job["trial"], values)
            wrong += 1
        elif progress.status == "running":
            recorder.end(job["trial"], {"status": "stopped"})
        wrong += progress is not None and progress.status in ("failed", "diverged")
    return wrong


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 some trials went wrong, 2 it could not be started,
    130 it was interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments) or not arguments:
        print(usage())
        return 0 if arguments else 2
    try:
        files = [argument for argument in arguments if "=" not in argument]
        if len(files) != 1:
            raise UsageError(f"expected one space file, such as tune_spaces/adcol.yaml, got {len(files)}")
        space = read_space(from_file(files[0]), from_arguments([a for a in arguments if "=" in a]))
        code = 1 if sweep(space) else 0
    except UsageError as error:
        print(f"rayfed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        if not error.args:
            raise  # nothing was started
        print(f"rayfed: {error}", file=sys.stderr)
        code = INTERRUPTED
    config = Config.read(next(space.trials()))
    try:
        print(_shown(config))
    except UsageError as error:  # the trials are over: what they are worth is for the exit code to say, not this
        print(f"no table: {error}")
    return code


def _shown(config: Config) -> str:
    """The report on the sweep, and a plot of it beside the tables."""
    text = render(config.results, config.experiment)
    tables = read(config.results, config.experiment)
    if not (tables.trials["status"] == "done").any():
        return text
    picture = Path(config.results) / config.experiment / "curves.png"
    try:
        plot(tables, picture)
    except UsageError as error:
        return f"{text}\nno plot: {error}"
    return f"{text}\nPlot: {picture}"


if __name__ == "__main__":
    sys.exit(main())
