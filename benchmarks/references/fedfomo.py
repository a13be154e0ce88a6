"""FedFomo's authors (Zhang et al. 2021): their clients train, and their server rates and mixes models.

Their main program, which reads data, chooses clients and writes files, is written out here. All clients take part, and
nobody explores at random.
"""

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from references.checkout import Checkout, Importer, anything
from references.harness import Case, Feed, Models, Setting, Trace, client_weights, plain

SOURCE = "fedfomo"
TRIED = "fe04f66"

STAND_INS: dict[str, Any] = anything("federated_datasets") | {"torch.utils.tensorboard": {}}

Mend = Callable[[Importer], Any]


def run(mend: Mend | None = None, averages: bool = True) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with the authors' server and clients and returns the clients' models.

    Args:
        mend: Changes the imported modules beforehand; may return a context.
        averages: Whether their averages of groups of clients and of all clients are among the models that are rated.
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        with checkout.importing(".", STAND_INS) as load, mock.patch.object(sys, "argv", ["main.py"]):
            args, config = load("federated.args", "args"), load("federated.configs", "cfg_fl")
            vars(args).update(
                optimizer="sgd", lr=trace.setting.lr, momentum=0.0, weight_decay=0.0, nesterov=False, ngpu=0, seed=0
            )
            vars(args).update(federation_epoch=trace.setting.epochs, federation_method="fomo", federation_round=0)
            vars(args).update(baseline_model="first_model", dataset="", experiment_name="")
            config.CLIENT_WEIGHT.EPSILON, config.CLIENT_WEIGHT.NUM_UPDATE_CLIENTS = 0.0, len(trace.parts) - 1
            load("federated.network").get_net = lambda *_: copy.deepcopy(trace.initial)
            load("federated.train").load_federated_dataset = lambda dataset, train: dataset
            for module in ("federated.train", "federation", "server"):
                load(module).tqdm = lambda items, **_: items
            with (mend and mend(load)) or nullcontext():
                feed = Feed(trace)
                clients = _clients(load("client", "Client"), feed)
                server = _server(load("server", "GlobalServer"), clients, args, config)
                for round in range(trace.setting.rounds):
                    server.round = round
                    feed.start(round + 1)
                    server.initialize_clients(round, clients)
                    server.local_train(clients, round)
                    server.update_server_models(clients, clients)
                    if not averages:
                        server.federated_model_dicts = []
                feed.finish()
            return {f"client {client.id}": plain(client.model) for client in clients}

    return theirs


def _clients(kind: Any, feed: Feed) -> list[Any]:
    population = SimpleNamespace(num_clients=len(feed.trace.parts))
    clients = [kind(client_id=i, dist_id=0, population=population) for i in range(population.num_clients)]
    population.clients = clients
    for client in clients:
        client.device, client.model = torch.device("cpu"), copy.deepcopy(feed.trace.initial)
        client.criterion = client.criterion_val = nn.CrossEntropyLoss()
        held_out = [feed.trace.held_out[client.id]]
        client.datasets = [feed.loader(client.id), held_out, held_out]
        client.init_client_weights()
    return clients


def _server(kind: Any, clients: list[Any], args: Any, config: Any) -> Any:
    server = object.__new__(kind)
    server.args, server.cfg, server.criterion = args, config, nn.CrossEntropyLoss()
    server.population = SimpleNamespace(clients=clients, distributions=[{"clients": clients}])
    server.num_federations, server.federated_model_dicts, server.global_model = 2, [], None
    return server


def euclidean(load: Importer) -> Any:
    """Let the distance of two models be the Euclidean one."""

    def distance(one: nn.Module, other: nn.Module, norm: str) -> float:
        vectors = [nn.utils.parameters_to_vector(model.parameters()).detach().double() for model in (one, other)]
        return float((vectors[0] - vectors[1]).norm())

    return mock.patch.object(load("federation"), "compute_parameter_difference", distance)


OTHER_DISTANCE = (
    "Eq. 3 of the paper divides by ‖θ_n − θ_i‖, which rayfed and PFLlib take as the Euclidean norm over all weights. "
    "`federated/utils.py`, line 143, knows the sum of absolute differences, its default, the sum of squares, and the "
    "sum of each tensor's norm. `federation.py`, line 316, also has averages over groups of clients and over all of "
    "them rated. With the Euclidean norm and without averages, they agree. All clients take part: `main.py`, line 269, "
    "seeds NumPy alike in every round, so that a smaller cohort is always the same."
)


def cases() -> list[Case]:
    """Return all comparisons with the authors' FedFomo."""
    setting = Setting({"name": "fedfomo", "models": 4}, sizes=(25, 50, 75, 100), rounds=3)
    variant = "their distances Euclidean, without averages of several clients"
    return [
        Case("fedfomo", SOURCE, setting, run(), client_weights, differs=OTHER_DISTANCE),
        Case("fedfomo", SOURCE, setting, run(euclidean, averages=False), client_weights, variant=variant),
    ]
