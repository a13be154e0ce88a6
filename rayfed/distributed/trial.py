"""A trial on Ray: one of Ray Tune's trainables, whose process is the server actor.

Starting a process and importing torch takes longer than a short trial, so a process stays for the next trial of a
sweep. Nothing of a trial may therefore outlive it: its random numbers come from streams of its own, and torch's global
state is restored.
"""

import gc
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray import tune

from rayfed.core.errors import HostLost
from rayfed.core.paths import enter, working_folder
from rayfed.distributed.cluster import is_private
from rayfed.distributed.fleet import HostPool, RayFleet
from rayfed.distributed.host_actor import readable
from rayfed.distributed.ray_internals import lost_its_node
from rayfed.distributed.recorder_actor import RemoteRecorder
from rayfed.distributed.user_modules import SentFiles, install, register_user_modules
from rayfed.engine.device import breaks_device, device_for
from rayfed.engine.fleet import Fleet
from rayfed.experiments.capacity import reserved, servers_gpus
from rayfed.experiments.plan import Given, Plan
from rayfed.experiments.sweep import Job, Populations, failed_before_start, planned
from rayfed.experiments.trial import Sink, TrialRun, local_fleet
from rayfed.records.checkpoints import Saved

ENDED = "ended"
"""The entry of a result that says whether the trial has ended by itself, and was not stopped by a scheduler."""

GAIN = "gain"
"""The entry of a result that schedulers and searches maximise: the validation score, negative where lower is better."""

RAISED = "raised"
"""The entry of the last result of a single run that has the error that ended it, pickled."""


class ServerActor(tune.Trainable):
    """Runs the trial of its configuration, a round per step; a step lasts until a round was scored.

    An error of a trial is recorded and hidden from Tune, which would start the trial again. Tune sees only lost
    processes: this one when it dies, and hosts that die or whose GPU fails.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return what the trial reserves: its server and its hosts."""
        return tune.PlacementGroupFactory(_bundles(config), strategy="PACK")

    def setup(
        self,
        config: dict[str, Any],
        actor: Any = None,
        files: SentFiles | None = None,
        given: Given | None = None,
        keep_state: bool = False,
        data: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Keep the trial for the first step.

        Args:
            config: The job of the first trial as "job", and optionally what it reserves as "bundles".
            actor: The recorder.
            files: The user's folders and modules.
            given: The pieces given in Python, for all trials.
            keep_state: Whether the final states are kept also with checkpoint.every=0.
            data: Data by `data_key`, as objects. Other data are loaded from files on this machine.
            plan: The plan of a single run, whose error is returned to the command. Without it, jobs are planned here.
        """
        install(files)
        self._files, self._config, self._first = files, config, str(config["job"]["trial"])
        self._pool: tuple[Any, HostPool] | None = None
        self._hosts()  # their processes start while this one plans
        gc.freeze()  # imported objects need not be searched after every trial
        self._sink, sent = RemoteRecorder(actor), data or {}
        self._given, self._keep_state, self._run_plan = given or Given(), keep_state, plan
        self._populations = Populations(elsewhere=lambda key: ray.get(sent[key]) if key in sent else None)
        self._defaults = torch.get_default_dtype(), torch.get_num_threads()
        self._run: TrialRun | None = None
        self._last: dict[str, Any] = {"round": 0}

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Leave the previous trial, and keep the next one for the first step."""
        self._leave()
        enter(working_folder())  # Tune has changed the working directory to a folder of the trial
        self._last = {"round": 0}
        self._config = dict(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Run rounds until one was scored, and return its scores; ENDED is set when the trial is over."""
        try:
            ended = self._scored_round()
        except Exception as error:
            if lost_its_node(error):
                os._exit(1)  # Tune starts the trial again elsewhere
            if isinstance(error, HostLost) or breaks_device(error):
                raise
            if self._run is None or not self._run.begun:
                where = "" if is_private() else f" (on {socket.gethostname()})"
                self._sink.end(self._job["trial"], failed_before_start(self._job, error, where))
            if self._run_plan is not None:
                self._last[RAISED] = ray.cloudpickle.dumps(readable(error))
            self._close_pool()  # a host may still be at work
            ended = True
        if ended:
            self._leave()
        return {**self._last, "done": ended, ENDED: ended}

    def __repr__(self) -> str:  # for Ray's dashboard, which asks once
        return self._first

    def cleanup(self) -> None:
        self._leave()
        self._close_pool()

    @property
    def _job(self) -> Job:
        job: Job = self._config["job"]
        return job

    def _scored_round(self) -> bool:
        """Run rounds until one was scored; return whether the trial has ended."""
        run = self._run or self._started()
        selection, rounds = run.plan.evaluation.selection, run.plan.config.rounds
        while not run.done:
            record = run.step()
            if record is None:
                continue
            if scores := record.means(selection.metric, selection.point):
                gain = {GAIN: selection.gain(scores["val"])} if "val" in scores else {}
                self._last = {"round": record.round, **scores, **gain}
            # a scheduler that saw the scores of the last round could stop the trial before it is recorded as done
            if scores and record.round < rounds:
                break
        self._sink.settle()  # before the scheduler stops the trial and the command records that
        return run.done

    def _started(self) -> TrialRun:
        """Plan the trial and start it, after the last checkpoint of an earlier attempt."""
        job, pool = self._job, self._hosts()
        print(job["trial"], file=sys.stderr, flush=True)  # in the log of this process
        plan = self._run_plan or planned(job, self._given, self._populations, keep_state=self._keep_state)
        goes_on = job["config"].resume or self._sink.has_begun(plan.trial)
        self._run = run_of(plan, self._sink, pool, self._sink.saved(plan.trial) if goes_on else ())
        return self._run

    def _hosts(self) -> HostPool | None:
        """Return the hosts' processes, those of the previous trial if it reserved the same; None without hosts."""
        place, bundles = self._job["config"].placement, _bundles(self._config)
        if not place.hosts:
            return None
        group = ray.util.get_current_placement_group()
        key = place, bundles, group
        if self._pool is None or self._pool[0] != key:
            self._close_pool()
            self._pool = key, HostPool(place, bundles, group, self._files, repr(self))
        return self._pool[1]

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool[1].close()
            self._pool = None

    def _leave(self) -> None:
        """Release the fleet and the device's memory, and restore torch's global state."""
        if self._run is None:
            return
        self._run.close()
        self._run = None
        torch.set_default_dtype(self._defaults[0])
        torch.set_num_threads(self._defaults[1])
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def run_of(plan: Plan, sink: Sink, pool: HostPool | None, saved: Saved = ()) -> TrialRun:
    """Return the run of `plan` with its server in this process and the hosts of `pool`; without it, one host here."""
    register_user_modules()  # the hosts are sent the plan from here
    gpus = servers_gpus(plan.config)
    device = device_for(gpus, plan.blueprint.model)

    def make_fleet() -> Fleet:
        if pool is None:
            return local_fleet(plan, device, gpus)
        return RayFleet(plan.blueprint, plan.population, device=device, pool=pool)

    return TrialRun(plan, sink, make_fleet, device, saved=saved, replaceable=True)


def _bundles(config: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return what the trial of one of Tune's configurations reserves."""
    bundles: list[dict[str, float]] = config.get("bundles") or reserved(config["job"]["config"])
    return bundles
