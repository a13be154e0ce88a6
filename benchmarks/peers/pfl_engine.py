"""Runs a job on pfl-research with `torchrun`: two processes of one thread each."""

import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from peers.job import Job, Outcome, arguments, parameters_of


class Net(nn.Module):
    """A network with the loss and the metrics that pfl asks for; it counts its training steps."""

    def __init__(self, layers: nn.Module):
        super().__init__()
        self.layers = layers
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when each round is over, with its evaluation, and knows the number of the present one."""

    def __init__(self, job: Job, net: nn.Module) -> None:
        self.job, self.net = job, net
        self.round = 1
        self.stamps: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if self.job.is_evaluated(self.round):
            self.job.accuracy_of(self.net)
        self.round += 1
        self.stamps.append(time.perf_counter())
        return False, Metrics()


class Client(Dataset):
    """The data of a client, in the batches of one round."""

    def __init__(self, data: tuple[Tensor, Tensor], batches: Tensor, user_id: int):
        super().__init__(data, user_id=str(user_id))
        self.batches = batches

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.raw_data
        for rows in self.batches:
            yield x[rows], y[rows]


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    np.random.seed(0)  # all processes must sample the same clients
    job = Job.load(args.job)
    clients = range(len(job.sizes))
    net = Net(job.model())
    clock = Clock(job, net)
    job.initial.clear()  # memory that the engine does not need
    data = {}

    def make_client(client: int) -> Client:
        if client not in data:
            data[client] = job.data(client)
        return Client(data[client], job.batches(client, clock.round), client)

    # "minimize_reuse" takes the clients one after the other, so a cohort of all clients has each of them once. The
    # sizes let pfl balance the two processes; users that are drawn have one size.
    sampler = get_user_sampler("random" if job.cohort else "minimize_reuse", clients)
    sizes = None if job.cohort else {client: int(job.sizes[client]) for client in clients}
    dataset = FederatedDataset(make_client, sampler, user_id_to_weight=sizes)
    model = PyTorchModel(
        model=net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds + 1,  # only in the first round, which warms up
            train_cohort_size=job.participants,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    steps = torch.tensor(net.steps, device=job.device)
    torch.distributed.all_reduce(steps)
    if torch.distributed.get_rank() == 0:
        Outcome(version=version("pfl"), stamps=clock.stamps, steps=int(steps), parameters=parameters_of(net)).save(
            args.outcome
        )
    torch.distributed.destroy_process_group()  # or a thread that still runs may abort the process at its exit


if __name__ == "__main__":
    main()
