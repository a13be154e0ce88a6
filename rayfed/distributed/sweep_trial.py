"""A trial of a sweep, in a process of Ray Tune that runs one trial after the other.

Starting a process and importing torch takes longer than a short trial, so a process stays for the next one. Nothing of
a trial may therefore outlive it: its random numbers come from streams of its own, and torch's global state is restored.
"""

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray import tune

from rayfed.core.working_folder import enter, working_folder
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.private_session import is_private
from rayfed.distributed.processes import lost_its_node
from rayfed.distributed.recording import RemoteRecorder
from rayfed.distributed.server_process import make_pool, steps_reserved
from rayfed.distributed.user_modules import SentFiles, install, register_user_modules
from rayfed.engine.device import breaks_device
from rayfed.experiments.capacity import reserved
from rayfed.experiments.config import Config
from rayfed.experiments.jobs import Job
from rayfed.experiments.plan import Given, Plan
from rayfed.experiments.sweep import Populations, failed_before_start, planned
from rayfed.experiments.trial import TrialRun

ENDED = "ended"
"""The entry of a result that says whether the trial has ended by itself, and was not stopped by a scheduler."""

GAIN = "gain"
"""The entry of a result that schedulers and searches maximise: the validation score, negative where lower is better."""


class SweepTrial(tune.Trainable):
    """Runs the trial of its configuration, a round per step; a step lasts until a round was scored.

    An error of a trial is recorded, and ends the trial without an error for Tune, which would otherwise try again. Tune
    sees only processes that die, and those whose GPU does not compute any more.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return what the trial reserves: its server and its hosts."""
        return tune.PlacementGroupFactory(reserved(config["job"]["config"]), strategy="PACK")

    def setup(
        self,
        config: dict[str, Any],
        actor: Any = None,
        files: SentFiles | None = None,
        given: Given | None = None,
        keep_state: bool = False,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the trial for the first step.

        Args:
            config: The job of the first trial.
            actor: The recorder.
            files: What the process is told about the user's files, such as the modules that configurations name.
            given: What was given in Python, for all trials.
            keep_state: Whether the final states are kept also with checkpoint.every=0.
            data: The data of trials by `data_key`, as objects; others are loaded from files on this machine.
        """
        install(files)
        self._files = files
        gc.freeze()  # what was imported, so that it need not be searched after every trial
        self._sink, sent = RemoteRecorder(actor), data or {}
        self._given, self._keep_state = given or Given(), keep_state
        self._populations = Populations(elsewhere=lambda key: ray.get(sent[key]) if key in sent else None)
        self._defaults = torch.get_default_dtype(), torch.get_num_threads()
        self._run: TrialRun | None = None
        self._pool: tuple[Any, HostPool] | None = None
        self._plan: Plan | None = None
        self._last: dict[str, Any] = {"round": 0}
        self._context = contextlib.ExitStack()
        self._job: Job = config["job"]
        self._first = str(self._job["trial"])

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Leave the trial before, and keep the next for the first step."""
        self._leave()
        enter(working_folder())  # Tune has changed the working directory to a folder of the trial
        self._last = {"round": 0}
        self._job = new_config["job"]
        return True

    def step(self) -> dict[str, Any]:
        """Run rounds until one was scored, and return its scores; ENDED is set when the trial is over."""
        try:
            ended = self._scored_round()
        except Exception as error:
            if lost_its_node(error):
                os._exit(1)  # Tune starts the trial again elsewhere
            if breaks_device(error):
                raise  # Tune starts the trial again in another process, since no other could run in this one
            if self._run is None or not self._run.begun:
                self._not_begun(error)
            ended = True
        if ended:
            self._leave()
        return {**self._last, "done": ended, ENDED: ended}

    def __repr__(self) -> str:  # for Ray's dashboard, which asks once
        return self._first

    def cleanup(self) -> None:
        self._leave()
        if self._pool is not None:
            self._pool[1].close()

    def _scored_round(self) -> bool:
        """Run rounds until one was scored; return whether the trial has ended."""
        if self._run is None:
            lost, begun = self._sink.attempts(self._job["trial"])
            config = self._job["config"]
            if lost > config.faults.restarts:
                return True  # recorded as failed where the loss was noticed
            print(self._job["trial"], file=sys.stderr, flush=True)  # in the log of this process
            self._context.enter_context(self._sink.signs_of_life(self._job["trial"]))
            self._plan = planned(self._job, self._given, self._populations, keep_state=self._keep_state)
            register_user_modules()  # the hosts are sent the plan from here
            saved = self._sink.saved(self._plan.trial) if begun or config.resume else ()
            self._run = steps_reserved(self._plan, self._sink, self._pool_for(config), saved)
        assert self._plan is not None
        selection, rounds = self._plan.evaluation.selection, self._plan.config.rounds
        while not self._run.done:
            record = self._run.step()
            if record is None:
                continue
            if scores := record.means(selection.metric, selection.point):
                gain = {GAIN: selection.gain(scores["val"])} if "val" in scores else {}
                self._last = {"round": record.round, **scores, **gain}
            # the last round waits for the end of the trial, since a scheduler may stop a trial that it sees
            if scores and record.round < rounds:
                break
        self._sink.settle()  # before the scheduler stops the trial, and the driver records that
        return self._run.done

    def _pool_for(self, config: Config) -> HostPool | None:
        """Return processes for the hosts; those of the trial before, if it reserved the same."""
        group = ray.util.get_current_placement_group()
        key = (reserved(config), group)
        if self._pool is not None and self._pool[0] != key:
            self._pool[1].close()
            self._pool = None
        if self._pool is None and (made := make_pool(config, group, keep=True, files=self._files)) is not None:
            made.name = repr(self)
            self._pool = key, made
        return None if self._pool is None else self._pool[1]

    def _not_begun(self, error: Exception) -> None:
        """Record that the trial could not begin."""
        where = "" if is_private() else f" (on {socket.gethostname()})"
        self._sink.end(self._job["trial"], failed_before_start(self._job, error, where))

    def _leave(self) -> None:
        """End what the trial holds: its hosts, its data on the device, and torch's global state."""
        if self._plan is None:
            return
        run, self._run, self._plan = self._run, None, None
        self._context.close()
        if run is not None:
            run.close()
        torch.set_default_dtype(self._defaults[0])
        torch.set_num_threads(self._defaults[1])
        del run
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
