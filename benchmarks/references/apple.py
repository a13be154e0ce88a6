"""APPLE's authors (Luo and Wu 2022): one round of their training, their mixture of core models and their penalty.

Their networks are classes of fixed shape, so the mixture `ClientNet` is subclassed, and `Net` is replaced by a network
of rayfed's shape, whose layers have the names that their code uses. PySyft, which only moves models, is replaced.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from references.checkout import Checkout, Importer
from references.harness import Case, Feed, Models, Setting, Trace, client_weights, plain

SOURCE = "apple"
TRIED = "8078196"

STAND_INS = {
    "syft": {"TorchHook": lambda module: None, "VirtualWorker": lambda hook, id: None},
    "utils.data_loader": {"get_federated_datasets_dict": None},
}

LAYERS = {"conv1": "features.fc1", "conv2": "features.fc2", "fc2": "head"}
"""Their names of layers, and rayfed's."""


def run(having: str) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with `train_one_round` and returns core models and relations.

    Args:
        having: What has momentum, 0.9, in their optimiser: "all", as it is; "weights", not the relations; "nothing".
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        with checkout.importing(".", STAND_INS) as load:
            training, models = load("train_APPLE"), load("utils.models")
            torch.autograd.set_detect_anomaly(False)  # their script turns it on
            net, mixture = _networks(load, trace)
            sizes = [trace.examples(i) for i in range(len(trace.parts))]
            relations = load("utils.apple").init_pss(sizes)
            cores = [net() for _ in sizes]
            clients = [mixture(len(sizes), p) for p in relations]
            feed = Feed(trace)
            sgd = training.optim.SGD

            def optimizer(groups: list[dict[str, Any]], lr: float, momentum: float) -> Any:
                *weights, coefficients = groups
                if having != "all":
                    coefficients = coefficients | {"momentum": 0.0}
                return sgd([*weights, coefficients], lr=lr, momentum=0.0 if having == "nothing" else momentum)

            with (
                mock.patch.object(models, "Net", net),
                mock.patch.object(training, "optim", SimpleNamespace(SGD=optimizer)),
            ):
                for round in range(trace.setting.rounds):
                    feed.start(round + 1)
                    loaders = [(None, feed.loader(i)) for i in range(len(sizes))]
                    cores, relations, clients = training.train_one_round(
                        _arguments(trace),
                        cores,
                        clients,
                        relations,
                        sizes,
                        None,
                        round,
                        nn.CrossEntropyLoss(),
                        torch.device("cpu"),
                        None,
                        loaders,
                    )
            feed.finish()
            mixed = {f"client {i} p": {"p": torch.tensor(p)} for i, p in enumerate(relations)}
            names = {f"{name}.": f"{new}." for name, new in LAYERS.items()}
            return {f"core {i}": plain(core, names) for i, core in enumerate(cores)} | mixed

    return theirs


def _networks(load: Importer, trace: Trace) -> tuple[type, type]:
    """Return stand-ins for `Net` and `ClientNet` with three linear layers, which start with rayfed's weights."""
    theirs = load("utils.models", "ClientNet")
    initial = trace.initial.state_dict()

    def layer(name: str) -> nn.Linear:
        weight, bias = (initial[f"{LAYERS[name]}.{part}"] for part in ("weight", "bias"))
        made = nn.Linear(weight.shape[1], weight.shape[0])
        made.load_state_dict({"weight": weight, "bias": bias})
        return made

    class Net(nn.Module):
        def __init__(self, in_channels: int = 0, num_classes: int = 0):
            super().__init__()
            self.conv1, self.conv2, self.fc2 = (layer(name) for name in LAYERS)

        def send(self, where: Any) -> None:
            """Stand for the method that PySyft gives to modules."""

        def get(self) -> None:
            """Stand for the method that PySyft gives to modules."""

    class Mixture(theirs):  # type: ignore[misc, valid-type]
        def __init__(self, n_client: int, ps: list[float]):
            nn.Module.__init__(self)
            self.in_channels = self.num_classes = 0
            for name in LAYERS:
                setattr(self, f"{name}s", nn.ModuleList([layer(name) for _ in range(n_client)]))
            self.fc1s = nn.ModuleList()
            self.ps = nn.Parameter(torch.tensor(ps))

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(self.superBlock(x, self.conv1s))
            return self.superBlock(self.superBlock(hidden, self.conv2s), self.fc2s)

    return Net, Mixture


def _arguments(trace: Trace) -> SimpleNamespace:
    setting, own = trace.setting, trace.setting.algorithm
    return SimpleNamespace(
        lr_net=setting.lr,
        lr_coef=own["relation_lr"],
        decay=1.0,
        num_local_epochs=setting.epochs,
        num_rounds=setting.rounds,
        reg_last_round_over_total_round=own["pull_rounds"],
        mu=own["mu"],
        scheduler=own["pull_schedule"],
        limit_downloaded_models=10000,
        log_step=100,
    )


def ours(trace: Trace) -> Models:
    """Return the core models and the clients' relations."""
    cores = trace.server["cores"]
    models = {f"core {i}": {name: value[i] for name, value in cores.items()} for i in trace.clients}
    return models | client_weights(trace, "p", label="p")


MOMENTUM = (
    "rayfed's local.momentum concerns the core model only; the step of the relations is plain, as in Alg. 1 of the "
    "paper. `train_APPLE.py`, line 52, gives both the momentum 0.9. Without it, or with it for the weights only, they "
    "agree."
)


def cases() -> list[Case]:
    """Return all comparisons with the authors' APPLE."""
    found = []
    own = {"name": "apple", "relation_lr": 0.01, "mu": 0.5, "pull_rounds": 1.0}
    for schedule in ("exponential", "cosine"):
        setting = Setting(own | {"pull_schedule": schedule}, rounds=3)
        variant = f"{schedule} pull, no momentum"
        found.append(Case("apple", SOURCE, setting, run("nothing"), ours, variant=variant))
    setting = Setting(own | {"pull_schedule": "exponential"}, rounds=3, more={"local.momentum": 0.9})
    variant = "momentum, in theirs for the weights only"
    found.append(Case("apple", SOURCE, setting, run("weights"), ours, variant=variant))
    found.append(Case("apple", SOURCE, setting, run("all"), ours, variant="momentum", differs=MOMENTUM))
    return found
