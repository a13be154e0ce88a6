"""Runs a job as the bare PyTorch loop of `benchmarks/_bare.py`, in two processes with one thread each."""

import time

import torch
from _bare import BareLoop

from peers.job import PROCESSES, Job, Outcome, arguments
from peers.jobs import plan_of


def main() -> None:
    args = arguments(__doc__)
    job = Job.load(args.job)
    job.initial.clear()  # memory that the engine does not need
    plan = plan_of(job, hosts=0, results="results")
    stamps = []
    with BareLoop(plan.blueprint, plan.population, processes=PROCESSES, channels_last=job.channels_last) as loop:
        for _ in range(job.rounds):
            loop.round()
            stamps.append(time.perf_counter())
    parameters = [loop.state[name] for name, _ in plan.blueprint.model.named_parameters()]
    version = f"torch {torch.__version__}"
    Outcome(version=version, stamps=stamps, steps=loop.steps * job.rounds, parameters=parameters).save(args.outcome)


if __name__ == "__main__":
    main()
