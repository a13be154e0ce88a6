"""A trial without hosts: its server and its clients are in this process, and Ray is not needed."""

import torch

from rayfed.core.machine import memory_bytes
from rayfed.engine.device import device_for
from rayfed.engine.fleet import LocalFleet
from rayfed.experiments.capacity import servers_gpus
from rayfed.experiments.plan import Plan
from rayfed.experiments.trial import Sink, run_trial
from rayfed.records.checkpoints import Saved


def local_fleet(plan: Plan, device: torch.device, gpus: float) -> LocalFleet:
    """Return a fleet that trains the clients of `plan` in this process, which has reserved `gpus`."""
    memory = plan.config.state.memory
    state_memory = memory_bytes() / 4 if memory is None else memory * 2**30
    return LocalFleet(plan.blueprint, plan.population, device, gpus=gpus, state_memory=state_memory)


def run_here(plan: Plan, sink: Sink, saved: Saved) -> str:
    """Run `plan`, from the checkpoints `saved` if there are any, and return a hash of the final state."""
    gpus = servers_gpus(plan.config)
    device = device_for(gpus, plan.blueprint.model)
    return run_trial(plan, sink, lambda: local_fleet(plan, device, gpus), device, saved=saved)
