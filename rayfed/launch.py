"""Where trials run: in this process (`placement.hosts=0`) or on Ray. Ray is imported only where it is needed."""

from rayfed.core.errors import RayNotStarted
from rayfed.experiments import local_sweep, trial
from rayfed.experiments.plan import Plan
from rayfed.experiments.progress import note, one_trial, watched
from rayfed.experiments.sweep import SweepPlan
from rayfed.records.checkpoints import Saved
from rayfed.records.recorder import Recorder


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
        from rayfed.distributed import tune

        return tune.run_trial(plan, quiet=quiet)
    recorder = Recorder(plan.config.results, plan.config.experiment)
    with watched(recorder.progress, lambda trials: one_trial(trials[0]), quiet=quiet):
        try:
            return trial.run_trial(plan, recorder, saved=saved)
        finally:
            for line in recorder.close():
                note(line)


def run_sweep(plan: SweepPlan, *, quiet: bool) -> int:
    """Run the jobs of `plan` and return the number of trials that failed or diverged.

    They run with Ray Tune; but one after the other in this process if they have no hosts and max_concurrent is 1, or if
    they have no hosts and Ray does not start. Early stopping and Optuna need Ray.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: Ray did not start and is needed, or its processes died too often.
        KeyboardInterrupt: The sweep was interrupted. Its trials have ended; the message says how to continue.
    """
    search = plan.space.search
    needs_ray = search.scheduler != "none" or search.kind == "optuna" or any(c.placement.hosts for c in plan.configs)
    if not needs_ray and search.max_concurrent == 1:
        return local_sweep.run_sweep(plan, quiet=quiet)
    try:
        try:
            from rayfed.distributed import tune
        except ImportError as error:
            raise RayNotStarted(f"Ray cannot be imported ({error}); install it with pip install 'ray[tune]'") from error
        return tune.run_sweep(plan, quiet=quiet)
    except RayNotStarted as error:
        if needs_ray:
            raise
        note(f"{error}; the trials run one after the other in this process, without Ray")
        return local_sweep.run_sweep(plan, quiet=quiet)
