"""Runs a job on rayfed with two Ray hosts of one thread each."""

import tempfile
import time

import ray
from ray.util.placement_group import placement_group

import rayfed
from peers.job import PROCESSES, Job, Outcome, arguments, between
from peers.jobs import plan_of
from rayfed.core.records import Record
from rayfed.distributed import cluster
from rayfed.distributed.placement import bundles, run_reserved
from rayfed.results.read import read


class TimedRecorder(cluster.RemoteRecorder):
    """The recorder of a usual run, which also notes when each round is over."""

    def __init__(self, actor):
        super().__init__(actor)
        self.stamps: list[float] = []

    def record(self, trial: str, record: Record) -> None:
        super().record(trial, record)
        self.stamps.append(time.perf_counter())


def main() -> None:
    args = arguments(__doc__)
    job = Job.load(args.job)
    with tempfile.TemporaryDirectory(prefix="rayfed-peers-") as folder:
        plan = plan_of(job, hosts=PROCESSES, results=folder)
        config = plan.config
        ray.init(address="local", num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False)
        group = placement_group([bundle for bundle in bundles(config.placement) if bundle], strategy="PACK")
        ray.get(group.ready())
        recorder = TimedRecorder(cluster.remote_recorder(config.results, config.experiment).actor)
        _, state = run_reserved(plan, recorder, group, None)
        metrics = read(config.results, config.experiment).metrics
        ray.shutdown()
    weights = state["server"]["weights"]
    parameters = [weights[name].contiguous().numpy() for name, _ in plan.blueprint.model.named_parameters()]
    losses = metrics[(metrics.metric == "loss") & (metrics.split == "train")]  # one row per client and round
    steps = int((losses.n // job.batch_size).sum())
    seconds = between(recorder.stamps)
    Outcome(version=rayfed.__version__, seconds=seconds, steps=steps, parameters=parameters).save(args.outcome)


if __name__ == "__main__":
    main()
