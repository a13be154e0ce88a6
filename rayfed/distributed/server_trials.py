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

from rayfed.core.errors import HostLost, StorageError, breaks_device
from rayfed.core.round_record import Event, Record, Selection
from rayfed.data.population import Population
from rayfed.distributed.cluster import is_private, ray_nodes
from rayfed.distributed.host_actor import readable
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.liveness import this_process
from rayfed.distributed.ray_fleet import RayFleet
from rayfed.distributed.ray_internals import lost_its_node
from rayfed.distributed.recorder_actor import RemoteRecorder
from rayfed.distributed.shared import Shared, opened
from rayfed.distributed.start import Start
from rayfed.distributed.user_modules import register_user_modules
from rayfed.engine.device import device_for, release_memory
from rayfed.engine.fleet import Fleet
from rayfed.experiments.capacity import memory_share, reserved, servers_gpus
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan
from rayfed.experiments.simulation import Simulation, local_fleet
from rayfed.experiments.sweep import Job, Populations, failed_before_start, planned
from rayfed.experiments.tuning import check_changes
from rayfed.records.checkpoint_store import Saved
from rayfed.records.recorder import Recorder
from rayfed.records.round_report import RoundReport
from rayfed.records.trials import flattened

HYPERPARAMETERS_CHANGED = "hyperparameters changed"
# Entries of a result:
ENDED = "ended"  # whether the trial has ended by itself, and was not stopped by a scheduler
GAIN = "gain"  # the validation score of the round, negative where lower is better
LAST_GAIN = "last_gain"  # the last of them, which schedulers maximise: every round after the first evaluation has it
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
        where: What may change hyperparameters of a trial while it runs, for messages.
        raises: Whether the trials are those of a `Tuner` of the user's own: it sees their errors, and nobody else
            records that it stopped them.
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
        where: str = "search.scheduler",
        raises: bool = False,
    ):
        gc.freeze()  # imported objects need not be searched after every trial
        self._sent = data or {}
        self._sink = RemoteRecorder(actor)
        self._keep_state = keep_state
        self._at_once = at_once
        self._where = where
        self._raises = raises
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

    def step(self, start: Start, pool: HostPool | None) -> tuple[dict[str, Any], bool]:
        """Run the next round of a trial.

        An error of the trial is recorded and not raised here: Tune, or the command of a single run, would start the
        trial again. They see only lost processes: this one when it dies, and hosts that die or have a GPU that fails.

        Returns:
            The scores and costs of the round, with ENDED set when the trial is over; and whether an error ended it.
        """
        if self._simulation is None:
            self._job = _named(start)
            self._last: dict[str, Any] = {"round": 0}
        try:
            ended = self._next_round(start, pool)
        except Exception as error:
            if lost_its_node(error):
                os._exit(1)  # the trial starts again elsewhere
            if isinstance(error, HostLost) or breaks_device(error):
                self._settle()
                raise
            self._end_with(error)
            if self._raises:
                raise readable(error) from error
            result = {**self._last, BEST: None, "done": True, ENDED: True}
            if self._plan is not None:
                result[RAISED] = ray.cloudpickle.dumps(readable(error))
            return result, True
        if ended:
            self.leave(ended=True)
        return {**self._last, "done": ended, ENDED: ended}, False

    def _end_with(self, error: Exception) -> None:
        """Leave a trial that an error ended. The error of one that has not begun is recorded here."""
        if self._simulation is None or not self._simulation.begun:
            where = ""
            if not is_private():
                where = f" (on {socket.gethostname()})"
            self._sink.end(self._job["trial"], failed_before_start(self._job, error, where))
        self.leave(ended=True)

    def leave(self, *, ended: bool = False) -> None:
        """Release the fleet and the device's memory, and restore torch's global state.

        Args:
            ended: Whether the end of the trial is recorded.
        """
        simulation = self._simulation
        if simulation is None:
            return
        self._settle()
        if self._raises and not ended and simulation.begun:
            with contextlib.suppress(HostLost, StorageError):
                self._sink.end(simulation.plan.trial, {"status": "stopped"}, after_round=simulation.round)
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

    def save(self, start: Start) -> dict[str, Any]:
        """Save the present state, and return which checkpoint has it, for `Start.checkpoint`."""
        nothing = {"trial": start.trial}  # to go on from
        simulation = self._simulation
        if simulation is None:
            return nothing
        number = simulation.save()
        if number is None:
            return nothing
        trial = simulation.plan.trial
        self._sink.pin(trial, number)
        config = dict(flattened(simulation.plan.config.tree()))
        return {"trial": trial, "number": number, "config": config, "tuner_id": start.tuner_id}

    def _next_round(self, start: Start, pool: HostPool | None) -> bool:
        """Start the trial unless it runs, and run a round; return whether the trial has ended."""
        if self._simulation is None:
            self._simulation = self._started(start, pool)
            self._rounds = iter(self._simulation)
            self._settings.enter_context(self._simulation.global_settings())
        simulation = self._simulation
        record = next(self._rounds, None)
        if record is not None and simulation.report is not None:
            selection = simulation.plan.evaluation.selection
            self._last = result_of(simulation.report, selection, self._last.get(LAST_GAIN))
        self._last[BEST] = simulation.best
        return simulation.done

    def _started(self, start: Start, pool: HostPool | None) -> Simulation:
        """Plan the trial, and return its simulation before its first round."""
        print(start.trial, file=sys.stderr, flush=True)  # in the log of this process
        self._sink.runs_in(start.trial, this_process())
        job = self._job = _changed(self._job, start.changes, self._where)
        plan = self._plan or planned(job, self._given, self._populations, keep_state=self._keep_state)
        goes_on = bool(plan.config.resume) or self._sink.has_begun(plan.trial)
        if start.tuner_id:
            name, is_known = self._sink.name_for(plan.trial, start.tuner_id, _own_name(start))
            plan = replace(plan, trial=name)
            goes_on = bool(plan.config.resume) or is_known
        saved, change = self._saved(plan, start, goes_on=goes_on)
        return simulation_on(plan, self._sink, pool, saved, at_once=self._at_once, change=change)

    def _saved(self, plan: Plan, start: Start, *, goes_on: bool) -> tuple[Saved, Event | None]:
        """Return the checkpoints from which a trial goes on, and what that changes of its hyperparameters.

        Args:
            goes_on: Whether it goes on from its own last checkpoint if Tune names none.
        """
        pointer = start.checkpoint
        if pointer is None or "number" not in pointer:
            if goes_on:
                return self._sink.saved(plan.trial), None
            return (), None
        before = pointer["config"]
        check_changes([key for key, value in flattened(plan.config.tree()) if value != before.get(key)], self._where)
        saved, is_copied = self._sink.adopt(plan.trial, plan.configuration_hash, pointer["trial"], pointer["number"])
        if not is_copied:
            return saved, None
        values = ", ".join(f"{key}={value}" for key, value in start.values.items())
        detail = f"{values}; goes on from the state of {pointer['trial']}"
        return saved, Event(event=HYPERPARAMETERS_CHANGED, detail=detail)


def _own_name(start: Start) -> str | None:
    """Return the name of the trial in a checkpoint of its own; None without one."""
    pointer = start.checkpoint
    if pointer is None or pointer.get("tuner_id") != start.tuner_id:
        return None
    return str(pointer["trial"])


def _named(start: Start) -> Job:
    """Return the job with which a trial starts. After an exchange, it is that of another trial, with its name."""
    job: Job = ray.cloudpickle.loads(start.job)
    if start.trial == job["trial"] and not start.changes:
        return job
    identity = job["identity"]
    if not start.tuner_id:
        identity = {**identity, "trial": start.trial}
    return Job(trial=start.trial, config=job["config"], identity=identity)


def _changed(job: Job, changes: Mapping[str, Any], where: str) -> Job:
    """Return a job with the hyperparameters that a scheduler has changed."""
    if not changes:
        return job
    check_changes(changes, where)
    return Job(trial=job["trial"], config=Config.read(job["config"].tree(), changes), identity=job["identity"])


def result_of(report: RoundReport, selection: Selection, last_gain: float | None) -> dict[str, Any]:
    """Return what Tune is told of a round.

    Args:
        selection: What chooses rounds.
        last_gain: The last validation score before this round, as a gain.

    Returns:
        The round; the metric that chooses, by split; the gain; all scores as POINT/SPLIT/METRIC; the costs as
        round/NAME.
    """
    result: dict[str, Any] = {"round": report.record.round, "training_iteration": report.record.round}
    result |= report.without_domains()
    result |= report.means(selection.metric, selection.point)
    if "val" in result:
        last_gain = result[GAIN] = selection.gain(result["val"])
    if last_gain is not None:
        result[LAST_GAIN] = last_gain
    return result


def simulation_on(
    plan: Plan,
    sink: Recorder,
    pool: HostPool | None,
    saved: Saved = (),
    *,
    at_once: int = 1,
    change: Event | None = None,
) -> Simulation:
    """Return the simulation of `plan` with its server here and the hosts of `pool`; without it, one host here.

    Args:
        at_once: The most trials that run at once, among which the memory is divided.
        change: See `Simulation`.
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

    return Simulation(plan, sink, fleet, device, saved=saved, replaceable=True, change=change)
