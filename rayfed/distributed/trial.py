"""The trials of a server's process, one after the other.

Starting a process and importing torch takes longer than a short trial, so a process stays for the next trial of a
sweep. Nothing of a trial may therefore outlive it: its random numbers come from streams of its own, and torch's global
state is restored.
"""

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray
import torch

from rayfed.core.errors import HostLost, StorageError
from rayfed.core.records import Record
from rayfed.data.population import Population
from rayfed.distributed.cluster import is_private, ray_nodes
from rayfed.distributed.fleet import RayFleet
from rayfed.distributed.host_actor import readable
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.liveness import this_process
from rayfed.distributed.ray_internals import lost_its_node
from rayfed.distributed.recorder_actor import RemoteRecorder
from rayfed.distributed.shared import Shared, opened
from rayfed.distributed.user_modules import register_user_modules
from rayfed.engine.device import breaks_device, device_for, release_memory
from rayfed.engine.fleet import Fleet
from rayfed.experiments.capacity import memory_share, reserved, servers_gpus
from rayfed.experiments.plan import Given, Plan
from rayfed.experiments.sweep import Job, Populations, failed_before_start, planned
from rayfed.experiments.trial import Simulation, local_fleet
from rayfed.records.checkpoints import Saved
from rayfed.records.recorder import Recorder

# Entries of a result:
ENDED = "ended"  # whether the trial has ended by itself, and was not stopped by a scheduler
GAIN = "gain"  # what schedulers maximise: the validation score, negative where lower is better
BEST = "best"  # what searches maximise: the best gain of a trial so far, None before the first one and after an error
RAISED = "raised"  # the error that ended a single run, pickled


class Trials:
    """Runs trials in this process, one after the other.

    Args:
        actor: The recorder.
        given: The pieces given in Python, for all trials: a `Given`, as `share` sends it.
        keep_state: Whether the final states are kept also with checkpoint.every=0.
        data: Data by `data_key`, in the same way. Other data are loaded from files on this machine.
        plan: The `Plan` of a single run, in the same way; its error is returned to the command. Without it, jobs are
            planned here.
        at_once: The most trials of the command that run at once.
    """

    def __init__(
        self,
        actor: Any,
        *,
        given: Shared | None = None,
        keep_state: bool = False,
        data: Mapping[str, Shared] | None = None,
        plan: Shared | None = None,
        at_once: int = 1,
    ):
        gc.freeze()  # imported objects need not be searched after every trial
        self._sent = data or {}
        self._sink = RemoteRecorder(actor)
        self._keep_state, self._at_once = keep_state, at_once
        self._given = Given()
        if given is not None:
            self._given = opened(given)
        self._plan: Plan | None = None
        if plan is not None:
            self._plan = opened(plan)
        self._populations = Populations(elsewhere=self._sent_population)
        self._defaults = torch.get_default_dtype(), torch.get_num_threads()
        self._simulation: Simulation | None = None
        self._rounds: Iterator[Record] = iter(())
        self._settings = contextlib.ExitStack()  # of the simulation under way

    def step(self, packed: bytes, pool: HostPool | None) -> tuple[dict[str, Any], bool]:
        """Run rounds of the trial of a pickled `Job` until one was scored.

        An error of the trial is recorded and hidden from Tune, which would start the trial again. Tune sees only lost
        processes: this one when it dies, and hosts that die or whose GPU fails.

        Returns:
            The scores, with ENDED set when the trial is over; and whether an error ended it.
        """
        if self._simulation is None:
            self._job: Job = ray.cloudpickle.loads(packed)
            self._last: dict[str, Any] = {"round": 0}
        try:
            ended = self._scored_round(pool)
        except Exception as error:
            if lost_its_node(error):
                os._exit(1)  # Tune starts the trial again elsewhere
            if isinstance(error, HostLost) or breaks_device(error):
                self._settle()
                raise
            if self._simulation is None or not self._simulation.begun:
                where = "" if is_private() else f" (on {socket.gethostname()})"
                self._sink.end(self._job["trial"], failed_before_start(self._job, error, where))
            raised = {} if self._plan is None else {RAISED: ray.cloudpickle.dumps(readable(error))}
            self.leave()
            return {**self._last, BEST: None, **raised, "done": True, ENDED: True}, True
        if ended:
            self.leave()
        return {**self._last, "done": ended, ENDED: ended}, False

    def leave(self) -> None:
        """Release the fleet and the device's memory, and restore torch's global state."""
        if self._simulation is None:
            return
        self._settle()
        self._simulation = None
        self._rounds = iter(())
        self._settings.close()
        torch.set_default_dtype(self._defaults[0])
        torch.set_num_threads(self._defaults[1])
        release_memory()

    def _sent_population(self, key: str) -> Population | None:
        """Return the data of a `data_key`, if the command has sent them."""
        if key not in self._sent:
            return None
        population: Population = opened(self._sent[key])
        return population

    def _settle(self) -> None:
        """Wait until the recorder has all rounds, because this process may be killed next."""
        with contextlib.suppress(HostLost, StorageError):
            self._sink.settle()

    def _scored_round(self, pool: HostPool | None) -> bool:
        """Start the trial unless it runs, and run rounds until one was scored; return whether it has ended."""
        if self._simulation is None:
            self._simulation = self._started(pool)
            self._rounds = iter(self._simulation)
            self._settings.enter_context(self._simulation.global_settings())
        simulation = self._simulation
        selection = simulation.plan.evaluation.selection
        for record in self._rounds:
            scores = record.means(selection.metric, selection.point)
            if not scores:
                continue
            self._last = {"round": record.round, **scores}
            if "val" in scores:
                self._last[GAIN] = selection.gain(scores["val"])
            # a scheduler that saw the scores of the last round could stop the trial before it is recorded as done
            if record.round < simulation.plan.config.rounds and not simulation.done:
                break
        self._last[BEST] = simulation.best
        return simulation.done

    def _started(self, pool: HostPool | None) -> Simulation:
        """Plan the trial, and return its simulation before its first round."""
        job = self._job
        print(job["trial"], file=sys.stderr, flush=True)  # in the log of this process
        self._sink.runs_in(job["trial"], this_process())
        plan = self._plan or planned(job, self._given, self._populations, keep_state=self._keep_state)
        saved: Saved = ()
        if job["config"].resume or self._sink.has_begun(plan.trial):
            saved = self._sink.saved(plan.trial)
        return simulation_on(plan, self._sink, pool, saved, at_once=self._at_once)


def simulation_on(
    plan: Plan, sink: Recorder, pool: HostPool | None, saved: Saved = (), *, at_once: int = 1
) -> Simulation:
    """Return the simulation of `plan` with its server here and the hosts of `pool`; without it, one host here.

    Args:
        at_once: The most trials that run at once, among which the memory is divided.
    """
    register_user_modules()  # the hosts are sent the plan from here
    gpus = servers_gpus(plan.config)
    device = device_for(gpus, plan.blueprint.model)
    sent = None
    if pool is not None:
        sent = ray.put(plan.blueprint)
        plan = replace(plan, blueprint=ray.get(sent))  # with the weights in the memory that the hosts read, too

    def fleet() -> Fleet:
        if pool is None:
            (bundle,) = reserved(plan.config)
            here = ray_nodes()[this_process().node]
            return local_fleet(plan, device, gpus, share=memory_share(bundle, here, at_once))
        return RayFleet(
            plan.blueprint,
            plan.population,
            sent=sent,
            device=device,
            pool=pool,
            patience=60 * plan.config.faults.patience,
            hosts_at_once=at_once * len(pool.actors),
        )

    return Simulation(plan, sink, fleet, device, saved=saved, replaceable=True)
