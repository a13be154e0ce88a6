"""The trials of a sweep one after the other in this process, without Ray."""

import gc
import sys
import time

import torch

from rayfed.core.errors import StorageError
from rayfed.engine.device import breaks_device
from rayfed.experiments.progress import bars_of_sweep, note, span, watched
from rayfed.experiments.run_summary import counted
from rayfed.experiments.sweep import Job, Populations, SweepPlan, error_lines, failed_before_start, planned
from rayfed.experiments.trial import run_trial
from rayfed.records.recorder import Recorder


def run_sweep(plan: SweepPlan, *, quiet: bool) -> int:
    """Run the jobs of `plan` and return the number of trials that failed or diverged.

    Tables and results are those of a sweep on Ray.

    Raises:
        StorageError: The results could not be written.
        KeyboardInterrupt: The sweep was interrupted; the message says how to continue.
    """
    recorder = Recorder(plan.results, plan.experiment, in_sweep=True)
    populations = Populations()
    began, failures, done, gpu_fails = time.monotonic(), 0, 0, False
    say_errors = error_lines(plan.results, plan.experiment, lambda line: None if quiet else note(line))
    names = expected_names(plan)
    with watched(recorder.progress, bars_of_sweep(names), quiet=quiet):
        try:
            for job in plan.jobs:
                error = _run(plan, job, recorder, populations)
                say_errors(recorder.progress())
                failures += error is not None
                done += 1
                gpu_fails = error is not None and breaks_device(error)
                if gpu_fails:
                    break
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted after {done} of {len(names)} trials; the same command with resume=true continues"
            ) from None
        finally:
            for line in recorder.close():
                note(line)
    if not quiet:
        elapsed = span(time.monotonic() - began)
        print(f"{counted(done, 'trial')} in {elapsed}", file=sys.stderr, flush=True)
        if gpu_fails:
            note(
                "stopped, since the GPU fails in this process from now on; the same command with resume=true runs the "
                "trials that are left"
            )
    return failures


def expected_names(plan: SweepPlan) -> list[str]:
    """Return the names of the trials to run; "" for each trial that a search will choose."""
    return [job["trial"] for job in plan.jobs] or [""] * plan.space.searched_trials


def name_next(names: list[str], name: str) -> None:
    """Put `name` in place of the first name that is not known yet."""
    if "" in names:
        names[names.index("")] = name


def _run(plan: SweepPlan, job: Job, recorder: Recorder, populations: Populations) -> Exception | None:
    """Run a trial and return its error, which is recorded; None if it ended well."""
    try:
        trial = planned(job, plan.given, populations, keep_state=plan.keep_state)
        saved = recorder.saved(trial.trial) if trial.config.resume else ()
        run_trial(trial, recorder, saved=saved)
    except StorageError:
        raise
    except Exception as error:  # if the trial has begun, its error is recorded there
        status = {progress.trial: progress.status for progress in recorder.progress()}
        if status.get(job["trial"]) not in ("failed", "diverged"):
            recorder.end(job["trial"], failed_before_start(job, error))
        return error
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return None
