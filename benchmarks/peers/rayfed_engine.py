"""Runs a job on rayfed with two Ray hosts of one thread each, or in this process on a GPU."""

import tempfile
import time

import ray
from ray.util.placement_group import placement_group

import rayfed
from peers.job import PROCESSES, Job, Outcome, arguments
from peers.jobs import plan_of
from rayfed.distributed.cluster import start_here
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.recorder_actor import RemoteRecorder, start_recorder
from rayfed.distributed.server_trials import simulation_on
from rayfed.experiments.capacity import reserved
from rayfed.experiments.plan import Plan
from rayfed.experiments.simulation import Simulation, simulation_here
from rayfed.records.recorder import Recorder
from rayfed.reports.read import read


def _on_hosts(plan: Plan) -> Simulation:
    """Return the simulation of `plan` on a Ray cluster, which it starts."""
    config = plan.config
    start_here(num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False)
    group = placement_group([bundle for bundle in reserved(config) if bundle], strategy="PACK")
    ray.get(group.ready())
    recorder = RemoteRecorder(start_recorder(config.results, config.experiment, in_sweep=False))
    return simulation_on(plan, recorder, HostPool(reserved(config), group))


def main() -> None:
    args = arguments(__doc__)
    job = Job.load(args.job)
    job.initial.clear()  # memory that the engine does not need
    with tempfile.TemporaryDirectory(prefix="rayfed-peers-") as folder:
        plan = plan_of(job, hosts=0 if job.gpu else PROCESSES, results=folder)
        config, names = plan.config, [name for name, _ in plan.blueprint.model.named_parameters()]
        if job.gpu:
            simulation = simulation_here(plan, Recorder(config.results, config.experiment))
        else:
            simulation = _on_hosts(plan)
        del plan  # whose model is now in the object store
        stamps = []
        with simulation.global_settings():
            for _ in simulation:  # its record has been sent to the recorder
                stamps.append(time.perf_counter())
        weights = simulation.server_state["weights"]
        metrics = read(config.results, config.experiment).metrics
        if not job.gpu:
            ray.shutdown()
    parameters = [weights[name].cpu().contiguous().numpy() for name in names]
    losses = metrics[(metrics.metric == "loss") & (metrics.split == "train")]  # one row per client and round
    steps = int((losses.n // job.batch_size).sum())
    Outcome(version=rayfed.__version__, stamps=stamps, steps=steps, parameters=parameters).save(args.outcome)


if __name__ == "__main__":
    main()
