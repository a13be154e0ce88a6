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

from references.checkout import Checkout, Importer
from references.harness import CLASSES, Case, Feed, Models, Setting, Trace, client_weights, plain, server_weights

SOURCE = "pfllib"
TRIED = "d832e76"

NAMES = {"base.": "features."}
"""PFLlib splits a network into `base` and `head`."""

STAND_INS = {"h5py": {}, "cvxpy": {}, "utils.dlg": {"DLG": None}}
"""For packages that the methods compared here import but do not need."""

Result = Callable[[Any, Trace], Models]
Mend = Callable[[Importer], Any]


def run(file: str, server: str, result: Result, mend: Mend | None = None, **options: Any) -> Callable[[Checkout, Trace], Models]:
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
            with (mend and mend(load)) or nullcontext():
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


# What is compared of PFLlib's objects


def global_model(server: Any, trace: Trace) -> Models:
    """Return the server's model, with the weights that rayfed's server has."""
    names = trace.server["weights"]
    return {"server": plain(server.global_model, NAMES, names.__contains__)}


def cases() -> list[Case]:
    """Return all comparisons with PFLlib."""
    full = Setting({"name": "fedavg"})
    return [Case("fedavg", SOURCE, full, run("avg", "FedAvg", global_model), server_weights)]


_ = client_weights
