"""PFLlib (Zhang et al. 2025), which implements most personalised methods: its servers and clients run whole.

Only what is around the methods is replaced: reading data, evaluation, saving, and the choice of clients. `args` is a
namespace with the fields that its `main.py` would fill. A server runs `global_rounds + 1` rounds.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rayfed.algorithms import fedgen
from rayfed.core.trees import Weights, without
from references.checkout import Checkout, Importer
from references.harness import (
    CLASSES,
    PARTIAL,
    Case,
    Feed,
    Models,
    Setting,
    Trace,
    client_weights,
    plain,
    server_weights,
)

SOURCE = "pfllib"
TRIED = "d832e76"

NAMES = {"base.": "features."}
"""PFLlib splits a network into `base` and `head`."""

STAND_INS = {"h5py": {}, "cvxpy": {}, "utils.dlg": {"DLG": None}}
"""For packages that the methods compared here import but do not need."""

Result = Callable[[Any, Trace], Models]
Mend = Callable[[Importer, Feed], Any]


def run(
    file: str, server: str, result: Result, mend: Mend | None = None, **options: Any
) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with PFLlib's `server` class and returns `result(server, trace)`.

    Args:
        file: The method's suffix in `flcore/servers/server*.py`.
        mend: Changes the imported modules beforehand, to find out whether anything else differs; may return a context.
        options: The method's fields of `args`.
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        with checkout.importing("system", STAND_INS) as load:
            feed = Feed(trace)
            split = load("flcore.trainmodel.models", "BaseHeadSplit")
            model = split(copy.deepcopy(trace.initial.features), copy.deepcopy(trace.initial.head))
            _patch_data(load, feed, file)
            kind = _quiet(load(f"flcore.servers.server{file}", server), feed)
            with (mend and mend(load, feed)) or nullcontext():
                made = kind(_arguments(trace, model, options), 0)
                made.train()
            feed.finish()
            return result(made, trace)

    return theirs


def _patch_data(load: Importer, feed: Feed, file: str) -> None:
    """Let clients read the recorded batches."""
    base = load("flcore.clients.clientbase")

    def read(dataset: str, client: int, is_train: bool = True, few_shot: int = 0) -> list[tuple[Tensor, Tensor]]:
        parts = [feed.trace.parts[client], feed.trace.held_out[client]] if is_train else []
        return [example for x, y in parts for example in zip(x, y, strict=True)]

    base.Client.load_train_data = lambda self, batch_size=None: feed.loader(self.id, batch_size or self.batch_size)
    for module in ("flcore.clients.clientbase", "flcore.servers.serverbase", f"flcore.clients.client{file}"):
        load(module).read_client_data = read


def _quiet(kind: type, feed: Feed) -> type:
    """Return a server that trains and does nothing else, with the clients that rayfed sampled."""

    class Quiet(kind):  # type: ignore[misc, valid-type]
        round = 0

        def set_clients(self, client: type) -> None:
            super().set_clients(client)
            if ("setup", 0) in feed.trace.draws:
                feed.start(0, "setup")

        def select_clients(self) -> list[Any]:
            self.round += 1
            feed.start(self.round)
            return [self.clients[i] for i in feed.trace.cohort(self.round)]

        def evaluate(self, *args: Any, **kwargs: Any) -> None:
            for name in vars(self):
                if name.startswith("rs_"):
                    getattr(self, name).append(0.0)

        evaluate_personalized = evaluate_one_step = evaluate

        def save_results(self) -> None:
            pass

        save_global_model = save_results

    return Quiet


def _arguments(trace: Trace, model: torch.nn.Module, options: dict[str, Any]) -> SimpleNamespace:
    setting = trace.setting
    clients = len(setting.sizes)
    common: dict[str, Any] = {
        "model": model,
        "algorithm": "lockstep",
        "dataset": "lockstep",
        "device": "cpu",
        "save_folder_name": "items",
        "num_classes": CLASSES,
        "batch_size": setting.batch_size,
        "local_learning_rate": setting.lr,
        "local_epochs": setting.epochs,
        "global_rounds": setting.rounds - 1,
        "num_clients": clients,
        "join_ratio": (setting.cohort or clients) / clients,
        "learning_rate_decay": False,
        "learning_rate_decay_gamma": 1.0,
        "time_threthold": float("inf"),
        "eval_gap": 1,
        "dlg_gap": 1,
        **dict.fromkeys(("random_join_ratio", "time_select", "auto_break", "dlg_eval"), False),
        **dict.fromkeys(("few_shot", "goal", "top_cnt", "batch_num_per_client"), 0),
        **dict.fromkeys(("client_drop_rate", "train_slow_rate", "send_slow_rate"), 0.0),
        **dict.fromkeys(("num_new_clients", "fine_tuning_epoch_new"), 0),
    }
    return SimpleNamespace(**(common | options))


# What is compared


def global_model(server: Any, trace: Trace) -> Models:
    """Return the server's model, as far as rayfed's server has its weights."""
    names = trace.server["weights"]
    return {
        "server": plain(
            server.global_model if hasattr(server.global_model, "base") else _body(server), NAMES, names.__contains__
        )
    }


def _body(server: Any) -> torch.nn.Module:
    return torch.nn.ModuleDict({"base": server.global_model})


def of_clients(name: str, entry: str = "weights", label: str = "") -> Result:
    """Return a function that takes a module of every client that took part, as far as rayfed keeps its weights.

    Args:
        name: The client's attribute in PFLlib.
        entry: The entry of a client's state in rayfed.
    """

    def result(server: Any, trace: Trace) -> Models:
        return {
            _named(i, label): plain(getattr(server.clients[i], name), NAMES, state[entry].__contains__)
            for i, state in trace.clients.items()
        }

    return result


def _named(client: int, label: str) -> str:
    return f"client {client}{label and ' ' + label}"


def both(*results: Result) -> Result:
    """Return a function that returns the models of all `results`."""
    return lambda server, trace: {name: model for result in results for name, model in result(server, trace).items()}


def ours(*parts: Callable[[Trace], Models]) -> Callable[[Trace], Models]:
    """Return a function that returns the models of all `parts` of rayfed's trace."""
    return lambda trace: {name: model for part in parts for name, model in part(trace).items()}


def kept(entry: str = "weights", label: str = "") -> Callable[[Trace], Models]:
    """Return a function that returns an entry of every client's state in rayfed."""
    return lambda trace: client_weights(trace, entry, label=label)


def vector(parameters: Any, trace: Trace) -> Weights:
    """Return a list of parameters under their names."""
    names = [name for name, _ in trace.initial.named_parameters()]
    return dict(zip(names, parameters, strict=True))


def of_list(name: str, label: str) -> Result:
    """Return a function that takes a list of tensors, one per parameter, of every client that took part."""
    return lambda server, trace: {
        _named(i, label): vector(getattr(server.clients[i], name), trace) for i in trace.clients
    }


def unflattened(flat: Tensor, trace: Trace) -> Weights:
    """Return a vector of all parameters under their names."""
    sizes = [parameter.numel() for parameter in trace.initial.parameters()]
    pairs = zip(flat.split(sizes), trace.initial.named_parameters(), strict=True)
    return {name: part.view_as(parameter) for part, (name, parameter) in pairs}


# FedRoD


def personal_heads(server: Any, trace: Trace) -> Models:
    heads = {i: server.clients[i].head.state_dict() for i in trace.clients}
    return {
        _named(i, ""): {f"personal.head.{name}": value for name, value in head.items()} for i, head in heads.items()
    }


# APFL


def alphas(server: Any, trace: Trace) -> Models:
    return {_named(i, "alpha"): {"alpha": torch.tensor(server.clients[i].alpha)} for i in trace.clients}


# FedDyn


def dyn_states(server: Any, trace: Trace) -> Models:
    gradients = {_named(i, "g"): unflattened(server.clients[i].old_grad, trace) for i in trace.clients}
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
        models[_named(i, "")] = {f"dbe.{name}": value.detach().clone() for name, value in values.items()}
    return models


# APPLE


def apple_models(server: Any, trace: Trace) -> Models:
    cores = {f"core {i}": plain(client.model_c, NAMES) for i, client in enumerate(server.clients)}
    return cores | {_named(i, "p"): {"p": torch.tensor(client.ps)} for i, client in enumerate(server.clients)}


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
    found: list[Case] = []

    def add(
        method: str,
        theirs: Callable[..., Models],
        compared: Callable[[Trace], Models],
        *,
        partial: bool = True,
        algorithm: dict[str, Any] | None = None,
        variant: str = "",
        differs: str = "",
        watch: Any = None,
        **setting: Any,
    ) -> None:
        for shares in ({}, PARTIAL) if partial else ({},):
            chosen = Setting({"name": method, **(algorithm or {})}, **(setting | shares))
            found.append(Case(method, SOURCE, chosen, theirs, compared, watch, variant, differs))

    add("fedavg", run("avg", "FedAvg", global_model), server_weights)
    add(
        "fedavg",
        run("avg", "FedAvg", both(global_model, of_clients("model"))),
        ours(server_weights, kept()),
        variant="batch norm, batch_norm=local_statistics",
        network="mlp_bn",
        more={"batch_norm": "local_statistics"},
    )
    add("fedprox", run("prox", "FedProx", global_model, mu=0.3), server_weights, algorithm={"mu": 0.3})
    add(
        "scaffold",
        run("scaffold", "SCAFFOLD", both(global_model, of_list("client_c", "c")), server_learning_rate=0.7),
        ours(server_weights, kept("c", "c")),
        algorithm={"server_lr": 0.7},
    )
    add(
        "moon",
        run("moon", "MOON", both(global_model, of_clients("old_model", "previous")), mu=1.0, tau=0.5),
        ours(server_weights, kept("previous")),
        algorithm={"widths": [], "mu": 1.0, "tau": 0.5},
    )
    dyn = both(global_model, dyn_states)
    ours_dyn = ours(server_weights, kept("g", "g"), lambda trace: {"server h": trace.server["h"]})
    add("feddyn", run("dyn", "FedDyn", dyn, alpha=0.1), ours_dyn, algorithm={"alpha": 0.1}, differs="norm")
    add(
        "feddyn",
        run("dyn", "FedDyn", dyn, squared_norm, alpha=0.1),
        ours_dyn,
        algorithm={"alpha": 0.1},
        variant="their norm squared",
    )
    add(
        "fedbn",
        run("bn", "FedBN", both(global_model, of_clients("model"))),
        ours(server_weights, kept()),
        network="mlp_bn",
    )
    add("fedper", run("per", "FedPer", both(global_model, of_clients("model"))), ours(server_weights, kept()))
    add(
        "fedrep",
        run("rep", "FedRep", both(global_model, of_clients("model")), plocal_epochs=3),
        ours(server_weights, kept()),
        algorithm={"head_epochs": 3},
    )
    add("fedrod", run("rod", "FedROD", both(global_model, personal_heads)), ours(server_weights, kept()))
    babu = both(global_model, of_clients("model", "model"))
    ours_babu, tune = ours(server_weights, kept("model")), {"finetune_epochs": 3}
    add(
        "fedbabu",
        run("babu", "FedBABU", babu, final_stage, fine_tuning_epochs=3),
        ours_babu,
        algorithm=tune,
        differs="x",
    )
    add(
        "fedbabu",
        run("babu", "FedBABU", babu, download_first, fine_tuning_epochs=3),
        ours_babu,
        algorithm=tune,
        variant="their clients download the last aggregate before they fine-tune",
    )
    add(
        "ditto",
        run("ditto", "Ditto", both(global_model, of_clients("model_per", "model")), mu=0.5, plocal_epochs=3),
        ours(server_weights, kept("model")),
        algorithm={"mu": 0.5, "personal_epochs": 3},
    )
    add(
        "apfl",
        run("apfl", "APFL", both(global_model, of_clients("model_per", "model"), alphas), alpha=0.5),
        ours(server_weights, kept("model"), kept("alpha", "alpha")),
        algorithm={"alpha": 0.5, "alpha_updates": "step"},
    )
    me = {"lam": 15.0, "inner_steps": 5, "personal_lr": 0.05, "beta": 0.8}
    args = {"lamda": 15.0, "K": 5, "p_learning_rate": 0.05, "beta": 0.8}
    add("pfedme", run("pFedMe", "pFedMe", global_model, **args), server_weights, algorithm=me, lr=0.02)
    add(
        "pfedme",
        run("pFedMe", "pFedMe", of_list("personalized_params", ""), **args),
        kept("model"),
        algorithm=me,
        lr=0.02,
        variant="personal models",
        differs="aliasing",
    )
    add(
        "pfedme",
        run("pFedMe", "pFedMe", of_list("personal", ""), keep_personal, **args),
        kept("model"),
        algorithm=me,
        lr=0.02,
        variant="personal models, before theirs are overwritten",
    )
    add("per_fedavg", run("peravg", "PerAvg", global_model, local_epochs=1), server_weights)
    add(
        "fedfomo",
        run("fomo", "FedFomo", fomo_models, fomo_loaders, M=4),
        our_fomo_models,
        partial=False,
        algorithm={"models": 4},
        sizes=(25, 50, 75, 100),
    )
    add(
        "fedproto",
        run("proto", "FedProto", both(of_clients("model"), prototypes), lamda=1.0),
        ours(kept(), our_prototypes),
    )
    add(
        "dbe",
        run("dbe", "FedDBE", both(global_model, dbe_states), kl_weight=5.0, momentum=0.7),
        ours(server_weights, kept()),
        algorithm={"kappa": 5.0, "mu": 0.7},
    )
    gen = {"noise": 4, "hidden": 8, "server_steps": 5, "server_lr": 0.005}
    args_gen = {"noise_dim": 4, "hidden_dim": 8, "server_epochs": 5, "generator_learning_rate": 0.005}
    for leave_out in (False, True):
        add(
            "fedgen",
            run(
                "gen",
                "FedGen",
                both(global_model, generators),
                share_noise(leave_out),
                localize_feature_extractor=False,
                **args_gen,
            ),
            ours(server_weights, our_generator),
            algorithm=gen,
            watch=watch_generator,
            variant="no generated features in their first round" * leave_out,
            differs="" if leave_out else "x",
        )
    add(
        "apple",
        run("apple", "APPLE", apple_models, dr_learning_rate=0.001, mu=0.1, L=1.0),
        our_apple_models,
        algorithm={"initial": "uniform", "pull_schedule": "cosine", "pull_rounds": 1.0, "relation_lr": 0.001},
        partial=False,
        differs="x",
        lr=0.02,
    )
    return found
