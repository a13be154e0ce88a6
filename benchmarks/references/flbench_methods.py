"""The methods of FL-bench: what is compared of each, and the changes that show where a difference comes from."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import server_batches
from rayfed.algorithms import adcol
from rayfed.algorithms.common import networks
from rayfed.algorithms.common.networks import mlp
from references.checkout import Importer
from references.flbench import SOURCE, TRIED, run, weights
from references.harness import (
    FEATURES,
    PARTIAL,
    Case,
    Models,
    Setting,
    Trace,
    client_weights,
    pair,
    plain,
    server_weights,
)
from references.pfllib_methods import Changed

__all__ = ["SOURCE", "TRIED", "cases"]


def global_model(server: Any, trace: Trace) -> Models:
    return {"server": weights(server.public_model_params)}


# Adaptive servers


def from_tau(server: Any) -> None:
    """Let the second moments of the server's optimiser start from τ²."""
    for velocity in server.adaptive_optimizer.velocities:
        velocity.fill_(TAU**2)


# ADCOL

WIDTHS = [16, 16]


@contextmanager
def watch_discriminator(extra: dict[str, Any]) -> Iterator[None]:
    """Note the initial discriminator, and the batches of its training."""
    extra["batches"] = []
    initial = adcol.Adcol.initial_discriminator

    def drawing(*args: Any) -> list[Tensor]:
        extra["batches"].append(list(server_batches(*args)))
        return extra["batches"][-1]

    def noting(*args: Any) -> Any:
        extra["discriminator"] = initial(*args)
        return extra["discriminator"]

    with (
        mock.patch.object(networks, "server_batches", drawing),
        mock.patch.object(adcol.Adcol, "initial_discriminator", noting),
    ):
        yield


def recorded_batches(load: Importer, trace: Trace) -> Any:
    """Let the discriminator read the recorded batches."""
    left = list(trace.extra["batches"])

    class Recorded:
        def __init__(self, data: Any, **_: Any):
            self.data = data

        def __iter__(self) -> Any:
            return ((self.data.feature[rows], self.data.index[rows]) for rows in left.pop(0))

    return mock.patch.object(load("src.server.adcol"), "DataLoader", Recorded)


@contextmanager
def as_in_the_paper(load: Importer, trace: Trace) -> Iterator[None]:
    """Keep models apart, feed features to the classifier as they are, and change the discriminator and its data."""
    server, client = load("src.server.adcol"), load("src.client.adcol")
    models: dict[int, Any] = {}

    def keep(self: Any, packages: dict[int, Any]) -> None:
        models.update({i: package["regular_model_params"] for i, package in packages.items()})

    def received(self: Any, client_id: int) -> dict[str, Any]:
        regular = models.get(client_id, self.public_model_params)
        return {"regular_model_params": regular, "personal_model_params": {}}

    def discriminator(base_model: nn.Module, client_num: int) -> nn.Module:
        network = mlp([FEATURES, *WIDTHS, client_num])
        network.load_state_dict(trace.extra["discriminator"])
        return network

    package = client.ADCOLClient.package

    def packed(self: Any) -> Any:
        self.model.eval()
        with torch.no_grad():
            self.features_list = [self.model.base(trace.parts[self.client_id][0])]
        return package(self)

    with ExitStack() as stack:
        for target, name, value in (
            (server.ADCOLServer, "aggregate_client_updates", keep),
            (server.ADCOLServer, "get_client_model_params", received),
            (server, "Discriminator", discriminator),
            (client, "F", Changed(F, relu=lambda x: x)),
            (client.ADCOLClient, "package", packed),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(recorded_batches(load, trace))
        yield


def own_models(server: Any, trace: Trace) -> Models:
    return {f"client {i}": weights(server.get_client_model_params(i)["regular_model_params"]) for i in trace.clients}


def with_discriminator(server: Any, trace: Trace) -> Models:
    return own_models(server, trace) | {"discriminator": plain(server.discriminator)}


def our_discriminator(trace: Trace) -> Models:
    return client_weights(trace) | {"discriminator": trace.server["discriminator"]}


# Why some differ

TAU = 0.02

STARTS_FROM_ZERO = (
    "rayfed follows the paper: Alg. 2 asks for an initial v of at least τ². `fedopt.py`, line 81, starts from 0. From "
    "τ² on, they agree."
)
NOT_THE_PAPERS = (
    "rayfed follows the paper. `src/server/adcol.py` averages all models (line 91), and its discriminator has batch "
    "norm and no biases (lines 22 to 28); `src/client/adcol.py` puts a ReLU before the classifier (line 30) and sends "
    "the features of the last epoch's training batches, which come from several versions of the model (line 52). With "
    "these four changed, they agree. Its server trains for three epochs without momentum or weight decay, which "
    "options of rayfed give."
)


def cases() -> list[Case]:
    """Return all comparisons with FL-bench."""
    found = []
    for partial in ({}, PARTIAL):
        setting = Setting({"name": "fedavgm", "momentum": 0.8, "nesterov": True}, **partial)
        theirs = run("fedavgm", "FedAvgMServer", {"server_momentum": 0.8}, global_model)
        found.append(Case("fedavgm", SOURCE, setting, theirs, server_weights, variant="nesterov=true, as theirs"))
        for name in ("adam", "yogi", "adagrad"):
            options = {"type": name, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.03, "tau": TAU}
            own = {"name": f"fed{name}", "beta1": 0.9, "server_lr": 0.03, "tau": TAU}
            setting = Setting(own | ({} if name == "adagrad" else {"beta2": 0.99}), **partial)
            theirs = run("fedopt", "FedOptServer", options, global_model)
            found.append(Case(f"fed{name}", SOURCE, setting, theirs, server_weights, differs=STARTS_FROM_ZERO))
            theirs = run("fedopt", "FedOptServer", options, global_model, prepare=from_tau)
            variant = "their v starts from τ²"
            found.append(Case(f"fed{name}", SOURCE, setting, theirs, server_weights, variant=variant))
    return found + adcol_cases()


def adcol_cases() -> list[Case]:
    """Return the comparisons of ADCOL."""
    plain_sgd = {"server_epochs": 3, "server_lr": 0.05, "server_momentum": 0.0, "server_weight_decay": 0.0}
    ours = {"mu": 0.5, "hidden": WIDTHS, "server_batch_size": 5, **plain_sgd}
    options = {"mu": 0.5, "dis_lr": 0.05, "dis_epoch": 3}
    as_it_stands = run("adcol", "ADCOLServer", options, own_models, recorded_batches)
    changed = run("adcol", "ADCOLServer", options, with_discriminator, as_in_the_paper)
    variant = "their models kept apart, no ReLU before their classifier, rayfed's discriminator and representations"
    watch = watch_discriminator
    return [
        *pair("adcol", SOURCE, ours, as_it_stands, client_weights, watch=watch, differs=NOT_THE_PAPERS),
        *pair("adcol", SOURCE, ours, changed, our_discriminator, watch=watch, variant=variant),
    ]
