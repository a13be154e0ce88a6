"""Runs a job on Flower's simulation engine with two Ray actors of one thread each."""

import time
from pathlib import Path

import flwr
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peers.flower_client import app
from peers.job import PROCESSES, Job, Outcome, arguments, parameters_of


def total_steps(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Return the sum of the clients' steps, in place of their weighted mean."""
    return MetricRecord({"steps": sum(int(reply["metrics"]["steps"]) for reply in replies)})


def main() -> None:
    args = arguments(__doc__)
    path = str(Path(args.job).resolve())
    job = Job.load(path)
    clients = len(job.sizes)
    server = ServerApp()
    stamps: list[float] = []
    outcomes: list[Outcome] = []

    def stamp(round: int, arrays: ArrayRecord) -> None:
        """Note when a round is over, with its evaluation; Flower calls this before the first round, too."""
        if job.is_evaluated(round):
            model = job.model()
            model.load_state_dict(arrays.to_torch_state_dict())
            job.accuracy_of(model)
        if round:
            stamps.append(time.perf_counter())

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        model = job.model()
        if not job.evaluate_every:
            job.initial.clear()  # memory that the engine does not need
        strategy = FedAvg(
            fraction_train=job.participants / clients,
            fraction_evaluate=0.0,
            min_train_nodes=job.participants,
            min_available_nodes=clients,
            train_metrics_aggr_fn=total_steps,
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=job.rounds,
            train_config=ConfigRecord({"job": path}),
            evaluate_fn=stamp,
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())
        steps = sum(int(metrics["steps"]) for metrics in result.train_metrics_clientapp.values())
        version = flwr.__version__
        outcomes.append(Outcome(version=version, stamps=stamps, steps=steps, parameters=parameters_of(model)))

    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 1 / PROCESSES if job.gpu else 0.0},
            "init_args": {"address": "local", "num_cpus": PROCESSES, "num_gpus": int(job.gpu), "log_to_driver": False},
        },
    )
    outcomes[0].save(args.outcome)


if __name__ == "__main__":
    main()
