"""Where trials run: in this process (`placement.hosts=0`) or on Ray. Ray is imported only where it is needed."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

from rayfed.core.errors import HostLost, RayNotStarted, StorageError, breaks_device
from rayfed.core.rng import OwnGlobalState, one_thread_at_a_time
from rayfed.core.words import counted
from rayfed.engine.device import release_memory
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan
from rayfed.experiments.progress import bars_of_sweep, note, one_trial, restart_line, span, watched
from rayfed.experiments.round import Round
from rayfed.experiments.simulation import Simulation, failure, simulation_here
from rayfed.experiments.simulation import run_trial as run_here
from rayfed.experiments.sweep import (
    Job,
    Populations,
    SweepPlan,
    error_lines,
    failed_before_start,
    planned,
)
from rayfed.records.checkpoint_store import Saved
from rayfed.records.recorder import Recorder


def rounds(plan: Plan, given: Given, saved: Saved, *, quiet: bool) -> Generator[Round, None, str]:
    """Run `plan` with its server in this process, and yield each round when it is recorded.

    Between two rounds the caller has its own random generators, kernels and current GPU. What the caller throws into
    the generator ends the trial, as an error of its own would. A generator that is closed before the last round leaves
    a trial that goes on with resume=true.

    Returns:
        The hash of the final state.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: Processes of hosts died too often, or the cluster ended.
        Diverged: A value became infinite or NaN.
    """
    recorder = Recorder(plan.config.results, plan.config.experiment)
    with contextlib.ExitStack() as context:
        context.enter_context(_recorded(recorder))
        context.enter_context(watched(recorder.progress, lambda trials: one_trial(trials[0]), quiet=quiet))
        begin: Callable[[Saved], Simulation]
        if plan.config.placement.hosts:
            from rayfed.distributed.loop import hosts

            begin = context.enter_context(hosts(plan, recorder))
        else:
            begin = partial(simulation_here, plan, recorder)
        return (yield from _rounds(begin, plan, given, recorder, saved, quiet=quiet))


def _rounds(
    begin: Callable[[Saved], Simulation],
    plan: Plan,
    given: Given,
    recorder: Recorder,
    saved: Saved,
    *,
    quiet: bool,
) -> Generator[Round, None, str]:
    """Yield the rounds of the simulations that `begin` makes: the first one, and those that follow after lost hosts."""
    own_state = OwnGlobalState()
    last = -1  # the last round that was yielded
    simulation = begin(saved)
    records = iter(simulation)
    while True:
        try:
            with one_thread_at_a_time, own_state.turn(), simulation.current_device():
                record = next(records, None)
        except Exception as error:
            if not simulation.may_go_on_after(error):
                raise
            progress = recorder.lost(plan.trial, str(error))
            is_this_process = not isinstance(error, HostLost)  # whose GPU fails from now on
            if is_this_process or progress.restarts > plan.config.faults.restarts:
                recorder.end(plan.trial, {**plan.values(), **failure(error)})
                raise
            if not quiet:
                note(restart_line(progress, error))
            simulation = begin(recorder.saved(plan.trial))
            records = iter(simulation)
            continue
        if record is None:
            return simulation.outcome
        if record.round <= last:
            continue
        last = record.round
        try:
            yield Round(simulation, given)
        except GeneratorExit:
            simulation.leave()
            raise
        except BaseException as error:
            records.throw(error)


@contextlib.contextmanager
def _recorded(recorder: Recorder) -> Iterator[None]:
    """Close the recorder after this block, and say which trackers failed."""
    try:
        yield
    finally:
        for line in recorder.close():
            note(line)


def run_trial(plan: Plan, saved: Saved, *, quiet: bool) -> str:
    """Run `plan`, from the checkpoints `saved` if there are any, and show its progress unless `quiet`.

    Returns:
        The hash of the final state.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: Processes of Ray died too often, or the cluster ended.
        Diverged: A value became infinite or NaN.
    """
    if plan.config.placement.hosts:
        from rayfed.distributed import run

        return run.run_trial(plan, quiet=quiet)
    recorder = Recorder(plan.config.results, plan.config.experiment)
    with _recorded(recorder), watched(recorder.progress, lambda trials: one_trial(trials[0]), quiet=quiet):
        return run_here(plan, recorder, saved=saved)


class Swept(NamedTuple):
    """The outcome of a sweep: how many trials failed or diverged, and Tune's `ResultGrid`, None without Ray."""

    failed: int
    tune: Any


def run_sweep(plan: SweepPlan, *, quiet: bool) -> Swept:
    """Run the jobs of `plan`.

    They run with Ray Tune; but one after the other in this process if they have no hosts and max_concurrent is 1, or if
    they have no hosts and Ray does not start. Schedulers, searches and callbacks of Tune need Ray.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: Ray did not start and is needed, or its processes died too often.
        KeyboardInterrupt: The sweep was interrupted. Its trials have ended; the message says how to continue.
    """
    began = time.monotonic()
    statuses, grid = _ran(plan, quiet=quiet)
    if not quiet:
        elapsed = span(time.monotonic() - began)
        print(f"{counted(len(statuses), 'trial')} in {elapsed}", file=sys.stderr, flush=True)
    return Swept(sum(status in ("failed", "diverged") for status in statuses), grid)


def _ran(plan: SweepPlan, *, quiet: bool) -> tuple[list[str], Any]:
    """Run the jobs of `plan`, and return the statuses of the trials and Tune's `ResultGrid`; see `run_sweep`."""
    if not plan.needs_ray and plan.space.search.max_concurrent == 1:
        return _run_here(plan, quiet=quiet), None
    try:
        try:
            from rayfed.distributed import tune
        except ImportError as error:
            raise RayNotStarted(f"Ray cannot be imported ({error}); install it with pip install 'ray[tune]'") from error
        return tune.run_sweep(plan, quiet=quiet)
    except RayNotStarted as error:
        if plan.needs_ray:
            raise
        note(f"{error}; the trials run one after the other in this process, without Ray")
        return _run_here(plan, quiet=quiet), None


def _run_here(plan: SweepPlan, *, quiet: bool) -> list[str]:
    """Run the jobs of `plan` one after the other in this process, and return the statuses of the trials."""
    recorder = Recorder(plan.results, plan.experiment, in_sweep=True)
    populations = Populations()
    done = 0

    def say(line: str) -> None:
        if not quiet:
            note(line)

    say_errors = error_lines(plan.results, plan.experiment, say)
    bars = bars_of_sweep(plan.expected, plan.expected_rounds)
    with watched(recorder.progress, bars, quiet=quiet), _recorded(recorder):
        try:
            for job in plan.jobs:
                error = _run(plan, job, recorder, populations)
                say_errors(recorder.progress())
                done += 1
                if error is not None and breaks_device(error):
                    say(
                        "stopped, since the GPU fails in this process from now on; the same command with resume=true "
                        "runs the trials that are left"
                    )
                    break
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted after {done} of {plan.expected} trials; the same command with resume=true continues"
            ) from None
    return [progress.status for progress in recorder.progress()]


def _run(plan: SweepPlan, job: Job, recorder: Recorder, populations: Populations) -> Exception | None:
    """Run a trial and return its error, which is recorded; None if it ended well."""
    try:
        planned_trial = planned(job, plan.given, populations, keep_state=plan.keep_state)
        saved: Saved = ()
        if planned_trial.config.resume:
            saved = recorder.saved(planned_trial.trial)
        run_here(planned_trial, recorder, saved=saved)
    except StorageError:
        raise
    except Exception as error:  # if the trial has begun, its error is recorded there
        status = {progress.trial: progress.status for progress in recorder.progress()}
        if status.get(job["trial"]) not in ("failed", "diverged"):
            recorder.end(job["trial"], failed_before_start(job, error))
        return error
    finally:
        release_memory()
    return None
