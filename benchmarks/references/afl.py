"""AFL in the code of q-FFL's authors (Li et al. 2020, "Fair Resource Allocation in Federated Learning"): its server.

Mohri et al. 2019 have published no code. That server asks clients for one gradient and one loss on all their data;
clients and their network, which are TensorFlow's there, are replaced.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from references.checkout import Anything, Checkout, anything
from references.harness import Case, Feed, Models, Setting, Trace

SOURCE = "fair"
TRIED = "f097971"

STAND_INS = anything("flearn.models.client", "flearn.utils.tf_utils") | {
    "tensorflow": Anything("tensorflow"),
    "tqdm": {"trange": lambda n, **_: range(n), "tqdm": None},
}


def run(before: bool) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with the agnostic server and returns its last model and λ.

    Args:
        before: Whether λ takes its step before the round's gradients are weighted (from the second round on), as in
            Alg. 1 of de Luca et al. 2022, not after that.
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        with checkout.importing(".", STAND_INS) as load:
            module = load("flearn.trainers.afl")
            feed = Feed(trace)

            class Server(module.Server):  # type: ignore[name-defined]
                def __init__(self) -> None:
                    self.num_rounds, self.eval_every, self.clients_per_round = trace.setting.rounds - 1, 10**9, 0
                    self.learning_rate, self.sampling = trace.setting.lr, 1
                    self.step = self.learning_rate_lambda = trace.setting.algorithm["lambda_lr"]
                    self.clients = [Client(feed, i) for i in range(len(trace.parts))]
                    self.latest_lambdas = np.ones(len(self.clients)) / len(self.clients)
                    self.latest_model = [p.detach().numpy().copy() for p in trace.initial.parameters()]
                    self.resulting_model = copy.deepcopy(self.latest_model)
                    self.client_model, self.rounds = Anything("model"), 0
                    if before:
                        self.learning_rate_lambda = 0.0

                def __del__(self) -> None:
                    pass

                def test_resulting_model(self) -> Any:
                    ones = [1] * len(self.clients)
                    return ones, ones, ones, ones

                def aggregate(self, solutions: list[Any]) -> Any:
                    self.rounds += 1
                    if before and self.rounds > 1:
                        losses = np.array([client.loss for client in self.clients])
                        self.latest_lambdas = module.project(self.latest_lambdas + self.step * losses)
                    gradients = [gradient for _, gradient in solutions]
                    return super().aggregate(list(zip(self.latest_lambdas, gradients, strict=True)))

            module.tqdm = _Silent
            module.gen_epoch = lambda data, rounds: iter(range(rounds))
            server = Server()
            server.train()
            feed.finish()
            names = [name for name, _ in trace.initial.named_parameters()]
            weights = {n: torch.from_numpy(np.asarray(v)) for n, v in zip(names, server.latest_model, strict=True)}
            return {"server": weights, "lambda": {"lambda": torch.tensor(np.asarray(server.latest_lambdas))}}

    return theirs


class _Silent:
    @staticmethod
    def write(text: str) -> None:
        pass


class Client:
    """Stands for their client: returns its gradient and its loss at the server's model."""

    def __init__(self, feed: Feed, number: int):
        self.feed, self.id, self.round, self.loss = feed, number, 0, 0.0
        self.train_data: dict[str, Any] = {}
        self.model = copy.deepcopy(feed.trace.initial)

    def set_params(self, parameters: list[np.ndarray]) -> None:
        for own, value in zip(self.model.parameters(), parameters, strict=True):
            own.data = torch.from_numpy(np.asarray(value, np.float32))

    def solve_sgd(self, batch: int) -> tuple[None, tuple[int, list[np.ndarray]], float]:
        self.round += 1
        if self.id == 0:
            self.feed.start(self.round)
        x, y = self.feed.next(self.id)
        loss = F.cross_entropy(self.model(x), y)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        self.loss = float(loss.detach())
        return None, (len(y), [gradient.numpy() for gradient in gradients]), self.loss


def ours(trace: Trace) -> Models:
    return {"server": trace.server["weights"], "lambda": {"lambda": trace.server["lambda"]}}


LAG = (
    "rayfed follows Alg. 1 of de Luca et al. 2022: λ takes a step along the losses of the model that is trained next. "
    "`afl.py`, line 55, steps after the aggregation along the losses before it, as in Alg. 1 of Mohri et al. 2019, "
    "where both steps are taken at the same point; so its λ is one round late. No option of rayfed gives that. That "
    "server also returns the mean of all models, and rayfed the last one. With λ's step first, they agree."
)


def cases() -> list[Case]:
    """Return all comparisons with that code."""
    own = {"name": "afl", "lambda_lr": 0.5}
    setting = Setting(own, sizes=(20, 20, 20, 20), batch_size=20, epochs=1, rounds=4)
    variant = "one step on all data, clients of equal size"
    return [
        Case("afl", SOURCE, setting, run(False), ours, variant=variant, differs=LAG),
        Case("afl", SOURCE, setting, run(True), ours, variant=f"{variant}; their λ takes its step first"),
    ]
