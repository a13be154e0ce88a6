"""PFLlib (Zhang et al. 2025), which implements most personalised methods: its servers and clients run whole.

Only what is around the methods is replaced: reading data, evaluation, saving, and the choice of clients. `args` is a
namespace with the fields that its `main.py` would fill. A server runs `global_rounds + 1` rounds.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rayfed.core.trees import Weights
from references.checkout import Checkout, Importer
from references.harness import CLASSES, Feed, Models, Trace, client_weights, plain

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

    class Quiet(kind):
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
    model = server.global_model
    whole = model if hasattr(model, "base") else torch.nn.ModuleDict({"base": model})  # FedPer's has the body only
    return {"server": plain(whole, NAMES, trace.server["weights"].__contains__)}


def of_clients(name: str, entry: str = "weights", label: str = "") -> Result:
    """Return a function that takes a module of every client that took part, as far as rayfed keeps its weights.

    Args:
        name: The client's attribute in PFLlib.
        entry: The entry of a client's state in rayfed.
    """

    def result(server: Any, trace: Trace) -> Models:
        return {
            named(i, label): plain(getattr(server.clients[i], name), NAMES, state[entry].__contains__)
            for i, state in trace.clients.items()
        }

    return result


def named(client: int, label: str = "") -> str:
    """Return the name of a client's model in a comparison."""
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


def by_name(parameters: Any, trace: Trace) -> Weights:
    """Return a list of parameters under their names."""
    names = [name for name, _ in trace.initial.named_parameters()]
    return dict(zip(names, parameters, strict=True))


def of_list(name: str, label: str) -> Result:
    """Return a function that takes a list of tensors, one per parameter, of every client that took part."""
    return lambda server, trace: {
        named(i, label): by_name(getattr(server.clients[i], name), trace) for i in trace.clients
    }


def unflattened(flat: Tensor, trace: Trace) -> Weights:
    """Return a vector of all parameters under their names."""
    sizes = [parameter.numel() for parameter in trace.initial.parameters()]
    pairs = zip(flat.split(sizes), trace.initial.named_parameters(), strict=True)
    return {name: part.view_as(parameter) for part, (name, parameter) in pairs}
