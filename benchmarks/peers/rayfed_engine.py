"""Runs a job on rayfed with two Ray hosts of one thread each."""

import tempfile
import time

import ray
from ray.util.placement_group import placement_group

import rayfed
from peers.job import PROCESSES, Job, Outcome, arguments
from peers.jobs import plan_of
from rayfed.distributed.recording import DriversRecorder, RemoteRecorder
from rayfed.distributed.server_process import make_pool, steps_reserved
from rayfed.experiments.capacity import reserved
from rayfed.reports.read import read


def main() -> None:
    args = arguments(__doc__)
    job = Job.load(args.job)
    job.initial.clear()  # memory that the engine does not need
    with tempfile.TemporaryDirectory(prefix="rayfed-peers-") as folder:
        plan = plan_of(job, hosts=PROCESSES, results=folder)
        config = plan.config
        ray.init(address="local", num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False)
        group = placement_group([bundle for bundle in reserved(config) if bundle], strategy="PACK")
        ray.get(group.ready())
        recorder = DriversRecorder(config.results, config.experiment, restarts=0, patience=60.0, say=print)
        pool = make_pool(config, group, keep=False)
        run = steps_reserved(plan, RemoteRecorder(recorder.actor), pool)
        stamps = []
        while not run.done:
            if run.step() is not None:  # the record of a round has been sent to the recorder
                stamps.append(time.perf_counter())
        run.close()
        weights = run.server_state["weights"]
        metrics = read(config.results, config.experiment).metrics
        ray.shutdown()
    parameters = [weights[name].contiguous().numpy() for name, _ in plan.blueprint.model.named_parameters()]
    losses = metrics[(metrics.metric == "loss") & (metrics.split == "train")]  # one row per client and round
    steps = int((losses.n // job.batch_size).sum())
    Outcome(version=rayfed.__version__, stamps=stamps, steps=steps, parameters=parameters).save(args.outcome)


if __name__ == "__main__":
    main()
