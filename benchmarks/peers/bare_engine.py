"""Runs a job as the bare PyTorch loop of `benchmarks/_bare.py`, in two processes with one thread each."""

import torch
from _bare import BareLoop

from peers.job import PROCESSES, Job, Outcome, arguments
from peers.jobs import plan_of


def main() -> None:
    args = arguments(__doc__)
    job = Job.load(args.job)
    plan = plan_of(job, hosts=0, results="results")
    with BareLoop(plan.blueprint, plan.population, processes=PROCESSES, channels_last=job.channels_last) as loop:
        seconds = [loop.round() for _ in range(job.rounds)][1:]
    parameters = [loop.state[name] for name, _ in plan.blueprint.model.named_parameters()]
    version = f"torch {torch.__version__}"
    Outcome(version=version, seconds=seconds, steps=loop.steps * job.rounds, parameters=parameters).save(args.outcome)


if __name__ == "__main__":
    main()
