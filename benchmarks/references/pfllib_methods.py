"""The methods of PFLlib: what is compared of each, and the changes that show where a difference comes from."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rayfed.algorithms import fedgen
from rayfed.core.trees import without
from references.checkout import Importer
from references.harness import CLASSES, Case, Feed, Models, Setting, Trace, client_weights, pair, plain, server_weights
from references.pfllib import (
    NAMES,
    SOURCE,
    TRIED,
    Mend,
    both,
    global_model,
    kept,
    named,
    of_clients,
    of_list,
    ours,
    run,
    unflattened,
)

__all__ = ["SOURCE", "TRIED", "cases"]


# FedRoD


def personal_heads(server: Any, trace: Trace) -> Models:
    heads = {i: server.clients[i].head.state_dict() for i in trace.clients}
    return {named(i): {f"personal.head.{name}": value for name, value in head.items()} for i, head in heads.items()}


# APFL


def alphas(server: Any, trace: Trace) -> Models:
    return {named(i, "alpha"): {"alpha": torch.tensor(server.clients[i].alpha)} for i in trace.clients}


# FedDyn


def dyn_states(server: Any, trace: Trace) -> Models:
    gradients = {named(i, "g"): unflattened(server.clients[i].old_grad, trace) for i in trace.clients}
    return gradients | {"server h": plain(server.server_state, NAMES)}


def squared_norm(load: Importer, feed: Feed) -> Any:
    """Give `clientdyn` a `torch.norm` that returns the squared norm."""
    module = load("flcore.clients.clientdyn")
    return mock.patch.object(module, "torch", Changed(torch, norm=lambda x, p: x.square().sum()))


class Changed:
    """A module with some names changed."""

    def __init__(self, module: Any, **changes: Any):
        self._module = module
        vars(self).update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# pFedMe


def keep_personal(load: Importer, feed: Feed) -> None:
    """Note the personal parameters before the end of `train` overwrites them with the local ones."""
    client = load("flcore.clients.clientpFedMe", "clientpFedMe")
    update = client.update_parameters

    def noting(self: Any, model: Any, new_params: Any) -> None:
        self.personal = [parameter.detach().clone() for parameter in self.personalized_params]
        update(self, model, new_params)

    client.update_parameters = noting


# FedBABU


def download_first(load: Importer, feed: Feed) -> None:
    """Send the last aggregate to the clients before they fine-tune."""
    server = load("flcore.servers.serverbabu", "FedBABU")
    client = load("flcore.clients.clientbabu", "clientBABU")
    fine_tune, aggregate = client.fine_tune, server.aggregate_parameters

    def aggregated(self: Any) -> None:
        aggregate(self)
        for each in self.clients:
            each.last = self.global_model

    def tuned(self: Any) -> None:
        _final(feed)
        self.set_parameters(self.last)
        fine_tune(self)

    server.aggregate_parameters, client.fine_tune = aggregated, tuned


def final_stage(load: Importer, feed: Feed) -> None:
    """Begin the final stage when the first client fine-tunes."""
    client = load("flcore.clients.clientbabu", "clientBABU")
    fine_tune = client.fine_tune

    def tuned(self: Any) -> None:
        _final(feed)
        fine_tune(self)

    client.fine_tune = tuned


def _final(feed: Feed) -> None:
    last = feed.trace.setting.rounds + 1
    if feed.when != f"final {last}":
        feed.start(last, "final")


# FedFomo


def fomo_loaders(load: Importer, feed: Feed) -> None:
    """Let clients train on the recorded batches, and rate models on the examples that rayfed holds out."""
    client = load("flcore.clients.clientfomo", "clientFomo")
    size = feed.trace.setting.batch_size

    def loaders(self: Any, batch_size: int | None = None) -> Any:
        x, y = feed.trace.held_out[self.id]
        return feed.loader(self.id), list(zip(x.split(size), y.split(size), strict=True))

    client.load_train_data = loaders


def fomo_models(server: Any, trace: Trace) -> Models:
    return {"ratings": {"P": server.P}} | {
        f"client {i}": plain(model, NAMES) for i, model in enumerate(server.client_models)
    }


def our_fomo_models(trace: Trace) -> Models:
    models = {f"client {i}": weights for i, weights in enumerate(trace.server["models"])}
    return {"ratings": {"P": trace.server["ratings"]}} | models


# FedProto


def prototypes(server: Any, trace: Trace) -> Models:
    width = trace.server["prototypes"]["means"].shape[1]
    means = [server.global_protos[c] if c in server.global_protos else torch.zeros(width) for c in range(CLASSES)]
    return {"prototypes": {"means": torch.stack(means)}}


def our_prototypes(trace: Trace) -> Models:
    return {"prototypes": {"means": trace.server["prototypes"]["means"]}}


# DBE


def dbe_states(server: Any, trace: Trace) -> Models:
    models = {}
    for i in trace.clients:
        client = server.clients[i]
        values = {"bias": client.client_mean, "mean": client.running_mean, "consensus": client.global_mean}
        models[named(i)] = {f"dbe.{name}": value.detach().clone() for name, value in values.items()}
    return models


# APPLE


def apple_models(server: Any, trace: Trace) -> Models:
    cores = {f"core {i}": plain(client.model_c, NAMES) for i, client in enumerate(server.clients)}
    return cores | {named(i, "p"): {"p": torch.tensor(client.ps)} for i, client in enumerate(server.clients)}


def our_apple_models(trace: Trace) -> Models:
    cores = trace.server["cores"]
    return {f"core {i}": {name: value[i] for name, value in cores.items()} for i in trace.clients} | client_weights(
        trace, "p", label="p"
    )


# FedGen


@contextmanager
def watch_generator(extra: dict[str, Any]) -> Iterator[None]:
    """Note the initial generator, and the classes and the noise of every batch that is generated."""
    extra["drawn"] = []
    init, forward = fedgen.FedGen.init, fedgen.FeatureGenerator.forward

    def initial(self: Any, ctx: Any) -> Any:
        state = init(self, ctx)
        extra["generator"] = {name: value.clone() for name, value in state["generator"].items()}
        return state

    def noting(self: Any, y: Tensor, noise: Tensor) -> Tensor:
        extra["drawn"].append((y.clone(), noise.clone()))
        return forward(self, y, noise)

    with (
        mock.patch.object(fedgen.FedGen, "init", initial),
        mock.patch.object(fedgen.FeatureGenerator, "forward", noting),
    ):
        yield


GENERATOR = {"fc1.": "layers.", "fc.": "layers.3."}
"""PFLlib's names of the generator's layers, and rayfed's."""


def share_noise(without_first_round: bool) -> Mend:
    """Return a change that gives PFLlib's generator rayfed's initial weights, classes and noise.

    Args:
        without_first_round: Whether clients leave out the generator's term in the first round, in which rayfed draws
            nothing for it; otherwise they draw by themselves there.
    """

    def mend(load: Importer, feed: Feed) -> None:
        module, client = load("flcore.servers.servergen"), load("flcore.clients.clientgen", "clientGen")
        generate, train, extra = module.Generative, client.train, feed.trace.extra
        in_first_round: list[bool] = []

        class Shared(generate):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any):
                super().__init__(*args)
                names = {name: _renamed(name) for name, _ in self.named_parameters()}
                self.load_state_dict({name: extra["generator"][new] for name, new in names.items()}, strict=False)

            def forward(self, labels: Tensor) -> Tensor:
                if in_first_round:
                    return super().forward(labels)
                y, noise = extra["drawn"].pop(0)
                labels.copy_(y)
                with mock.patch.object(module, "torch", Changed(torch, rand=lambda shape, device: noise)):
                    return super().forward(labels)

        def trained(self: Any) -> None:
            if feed.when != "round 1":
                train(self)
                return
            in_first_round.append(True)
            loss, calls = self.loss, itertools.count()
            if without_first_round:  # the second loss of each step is that of generated features
                self.loss = lambda logits, y: 0.0 if next(calls) % 2 else loss(logits, y)
            train(self)
            self.loss = loss
            in_first_round.pop()

        module.Generative, client.train = Shared, trained

    return mend


def _renamed(name: str) -> str:
    for prefix, new in GENERATOR.items():
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    raise KeyError(name)


def generators(server: Any, trace: Trace) -> Models:
    weights = {_renamed(name): value.detach() for name, value in server.generative_model.named_parameters()}
    return {"generator": without(weights, (IDLE,))}


def our_generator(trace: Trace) -> Models:
    return {"generator": without(trace.server["generator"], (IDLE,))}


IDLE = "layers.0.bias"
"""Batch norm removes this bias again, so its gradient is rounding noise, which Adam brings to the size of a step."""


def cases() -> list[Case]:
    """Return all comparisons with PFLlib."""
    return [*_standard(), *_personal_layers(), *_personal_models(), *_other()]


def _standard() -> list[Case]:
    """Methods that train one model."""
    dyn = both(global_model, dyn_states)
    ours_dyn = ours(server_weights, kept("g", "g"), lambda trace: {"server h": trace.server["h"]})
    moon = both(global_model, of_clients("old_model", "previous", "previous"))
    return [
        *pair("fedavg", SOURCE, {}, run("avg", "FedAvg", global_model), server_weights),
        *pair(
            "fedavg",
            SOURCE,
            {},
            run("avg", "FedAvg", both(global_model, of_clients("model"))),
            ours(server_weights, kept()),
            variant="batch norm with batch_norm=local_statistics",
            network="mlp_bn",
            more={"batch_norm": "local_statistics"},
        ),
        *pair("fedprox", SOURCE, {"mu": 0.3}, run("prox", "FedProx", global_model, mu=0.3), server_weights),
        *pair(
            "scaffold",
            SOURCE,
            {"server_lr": 0.7},
            run("scaffold", "SCAFFOLD", both(global_model, of_list("client_c", "c")), server_learning_rate=0.7),
            ours(server_weights, kept("c", "c")),
        ),
        *pair(
            "moon",
            SOURCE,
            {"widths": [], "mu": 1.0, "tau": 0.5},
            run("moon", "MOON", moon, mu=1.0, tau=0.5),
            ours(server_weights, kept("previous", "previous")),
            variant="widths=[]",
        ),
        *pair("feddyn", SOURCE, {"alpha": 0.1}, run("dyn", "FedDyn", dyn, alpha=0.1), ours_dyn, differs=NORM),
        *pair(
            "feddyn",
            SOURCE,
            {"alpha": 0.1},
            run("dyn", "FedDyn", dyn, squared_norm, alpha=0.1),
            ours_dyn,
            variant="their norm squared",
        ),
    ]


def _personal_layers() -> list[Case]:
    """Methods that keep a part of the model."""
    both_parts = both(global_model, of_clients("model"))
    rep = run("rep", "FedRep", both_parts, plocal_epochs=3)
    babu = both(global_model, of_clients("model", "model", "tuned"))
    ours_babu = ours(server_weights, kept("model", "tuned"))
    return [
        *pair("fedbn", SOURCE, {}, run("bn", "FedBN", both_parts), ours(server_weights, kept()), network="mlp_bn"),
        *pair("fedper", SOURCE, {}, run("per", "FedPer", both_parts), ours(server_weights, kept())),
        *pair("fedrep", SOURCE, {"head_epochs": 3}, rep, ours(server_weights, kept())),
        *pair(
            "fedrod",
            SOURCE,
            {},
            run("rod", "FedROD", both(global_model, personal_heads)),
            ours(server_weights, kept()),
        ),
        *pair(
            "fedbabu",
            SOURCE,
            {"finetune_epochs": 3},
            run("babu", "FedBABU", babu, final_stage, fine_tuning_epochs=3),
            ours_babu,
            differs=NO_DOWNLOAD,
        ),
        *pair(
            "fedbabu",
            SOURCE,
            {"finetune_epochs": 3},
            run("babu", "FedBABU", babu, download_first, fine_tuning_epochs=3),
            ours_babu,
            variant="their clients download the last aggregate before they fine-tune",
        ),
    ]


def _personal_models() -> list[Case]:
    """Methods that keep a model, or adapt one."""
    ditto = both(global_model, of_clients("model_per", "model", "personal"))
    apfl = both(global_model, of_clients("model_per", "model", "personal"), alphas)
    own = {"lam": 15.0, "inner_steps": 5, "personal_lr": 0.05, "beta": 0.8}
    args = {"lamda": 15.0, "K": 5, "p_learning_rate": 0.05, "beta": 0.8}
    return [
        *pair(
            "ditto",
            SOURCE,
            {"mu": 0.5, "personal_epochs": 3},
            run("ditto", "Ditto", ditto, mu=0.5, plocal_epochs=3),
            ours(server_weights, kept("model", "personal")),
        ),
        *pair(
            "apfl",
            SOURCE,
            {"alpha": 0.5, "alpha_updates": "step"},
            run("apfl", "APFL", apfl, alpha=0.5),
            ours(server_weights, kept("model", "personal"), kept("alpha", "alpha")),
            variant="alpha_updates=step",
        ),
        *pair("pfedme", SOURCE, own, run("pFedMe", "pFedMe", global_model, **args), server_weights, lr=0.02),
        *pair(
            "pfedme",
            SOURCE,
            own,
            run("pFedMe", "pFedMe", of_list("personalized_params", "personal"), **args),
            kept("model", "personal"),
            lr=0.02,
            variant="personal models",
            differs=OVERWRITTEN,
        ),
        *pair(
            "pfedme",
            SOURCE,
            own,
            run("pFedMe", "pFedMe", of_list("personal", "personal"), keep_personal, **args),
            kept("model", "personal"),
            lr=0.02,
            variant="personal models, theirs before they are overwritten",
        ),
        *pair("per_fedavg", SOURCE, {}, run("peravg", "PerAvg", global_model, local_epochs=1), server_weights),
    ]


def _other() -> list[Case]:
    """Methods that send something else, or mix models."""
    gen = {"noise": 4, "hidden": 8, "server_steps": 5, "server_lr": 0.005}
    args = {"noise_dim": 4, "hidden_dim": 8, "server_epochs": 5, "generator_learning_rate": 0.005}
    args |= {"localize_feature_extractor": False}
    trained = both(global_model, generators)
    ours_gen = ours(server_weights, our_generator)
    apple = {"initial": "uniform", "pull_schedule": "cosine", "pull_rounds": 1.0, "relation_lr": 0.001}
    fomo = Setting({"name": "fedfomo", "models": 4}, sizes=(25, 50, 75, 100))
    return [
        Case("fedfomo", SOURCE, fomo, run("fomo", "FedFomo", fomo_models, fomo_loaders, M=4), our_fomo_models),
        Case(
            "apple",
            SOURCE,
            Setting({"name": "apple", **apple}, lr=0.02),
            run("apple", "APPLE", apple_models, dr_learning_rate=0.001, mu=0.1, L=1.0),
            our_apple_models,
            variant="initial=uniform, cosine pull",
            differs=OTHER_RULE,
        ),
        *pair(
            "fedproto",
            SOURCE,
            {},
            run("proto", "FedProto", both(of_clients("model"), prototypes), lamda=1.0),
            ours(kept(), our_prototypes),
        ),
        *pair(
            "fedgen",
            SOURCE,
            gen,
            run("gen", "FedGen", trained, share_noise(without_first_round=False), **args),
            ours_gen,
            watch=watch_generator,
            differs=UNTRAINED,
        ),
        *pair(
            "fedgen",
            SOURCE,
            gen,
            run("gen", "FedGen", trained, share_noise(without_first_round=True), **args),
            ours_gen,
            watch=watch_generator,
            variant="theirs without generated features in the first round",
        ),
        *pair(
            "dbe",
            SOURCE,
            {"kappa": 5.0, "mu": 0.7},
            run("dbe", "FedDBE", both(global_model, dbe_states), kl_weight=5.0, momentum=0.7),
            ours(server_weights, kept()),
        ),
    ]


# Why some differ

NORM = (
    "rayfed follows the paper, whose Eq. 1 has (α/2)‖w − w_t‖², like the authors' code. `clientdyn.py`, line 45, has "
    "`torch.norm(...)` without the square, so that the pull has the length α/2 at any distance. With the square, they "
    "agree."
)
NO_DOWNLOAD = (
    "rayfed follows the paper, whose evaluation fine-tunes the last global model. `serverbabu.py`, line 61, calls "
    "`fine_tune()` without sending it, so each client goes on from its own body of its last round, or from an older "
    "download. The servers agree."
)
OVERWRITTEN = (
    "rayfed keeps v_i, as Alg. 1 of the paper does. In PFLlib `personalized_params` are the parameters of the model "
    "themselves (`fedoptimizer.py`, line 47, returns `group['params']`), which `clientpFedMe.py`, line 68, overwrites "
    "with w_i at the end of training. What it scores as personal is w_i. (The authors' `userpFedMe.py` reads the "
    "same.) The servers agree."
)
UNTRAINED = (
    "rayfed follows the authors, whose `serverpFedGen.py`, line 89, has `regularization= glob_iter > 0`: clients use "
    "the generator once it has been trained. PFLlib's clients use it from the first round on (`clientgen.py`, line "
    "59)."
)
OTHER_RULE = (
    "rayfed follows the paper and agrees with the authors' code. `clientapple.py` multiplies the learning rate by the "
    "number of clients (line 18), takes means of products by layer for the inner product ⟨g, w_j⟩ (line 62), and sends "
    "the mixture, not the core model (line 77). No options of rayfed give that."
)
