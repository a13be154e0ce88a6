"""APFL's authors (Deng, Kamani and Mahdavi 2020; FedTorch): their training of clients and server in one process.

Reading data, evaluation and logging are replaced, and their optimisers by plain SGD with the same interface.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from references.checkout import Checkout, anything
from references.harness import Case, Feed, Models, Trace, client_weights, pair, plain, server_weights

SOURCE = "fedtorch"
TRIED = "ab8068d"

TRAININGS = "fedtorch.comms.trainings.federated"

STAND_INS = anything(
    *(f"{TRAININGS}.{name}" for name in ("main", "apfl", "drfa", "afl")),
    *(f"{TRAININGS}.centered.{name}" for name in ("main", "drfa", "afl", "perfedme")),
    "fedtorch.comms.utils.eval_centered",
    "fedtorch.logs.logging",
    "fedtorch.logs.checkpoint",
) | {
    "fedtorch.logs.meter": {"define_local_training_tracker": dict},
    "fedtorch.components.dataset": {"load_data_batch": lambda args, x, y, tracker: (x, y)},
    "fedtorch.components.scheduler": {"adjust_learning_rate": lambda args, optimizer, scheduler: optimizer.lr},
}


def run(together: bool) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with `train_and_validate_apfl_centered`.

    Args:
        together: Whether a client's w takes its step together with v, as in the paper, and not before it.
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        with checkout.importing(".", STAND_INS) as load:
            script = load(f"{TRAININGS}.centered.apfl")
            feed, setting = Feed(trace), trace.setting
            clients = [_client(trace, feed, i, together) for i in range(len(trace.parts))]
            server = _server(trace)

            def cohort(args: Any) -> list[int]:
                feed.start(args.rounds_comm)
                return trace.cohort(args.rounds_comm)

            script.set_online_clients_centered = cohort
            server.args.num_comms = setting.rounds
            script.train_and_validate_apfl_centered(clients, server)
            feed.finish()
            personal = {f"client {i} personal": plain(clients[i].model_personal) for i in trace.clients}
            return {"server": plain(server.model)} | personal

    return theirs


class Sgd:
    """Plain SGD with the interface of their optimisers, which on the server moves along a difference of models."""

    def __init__(self, model: nn.Module, lr: float, before: "Sgd | None" = None, *, waits: bool = False):
        self.parameters, self.lr, self.before, self.waits = list(model.parameters()), lr, before, waits
        self.waiting: list[Tensor] = []

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self, *, apply_lr: bool, **_: Any) -> None:
        """Take a step; one that waits is taken with the next step of the optimiser that it comes `before`."""
        if self.before is not None:
            self.before.take()
        self.waiting = [parameter.grad.clone() * (self.lr if apply_lr else 1.0) for parameter in self.parameters]
        if not self.waits:
            self.take()

    def take(self) -> None:
        for parameter, change in zip(self.parameters, self.waiting, strict=False):
            parameter.data.sub_(change)
        self.waiting = []


def _client(trace: Trace, feed: Feed, number: int, together: bool) -> SimpleNamespace:
    setting = trace.setting
    model, personal = copy.deepcopy(trace.initial), copy.deepcopy(trace.initial)
    optimizer = Sgd(model, setting.lr, waits=together)
    args = SimpleNamespace(
        local_index=0,
        local_data_seen=0,
        growing_batch_size=False,
        num_batches_train_per_device_per_epoch=trace.examples(number) // setting.batch_size,
        local_steps=[0],
        federated_sync_type="epoch",
        num_epochs_per_comm=setting.epochs,
        in_momentum=False,
        fed_adaptive_alpha=False,
        fed_personal_alpha=setting.algorithm["alpha"],
        debug=False,
    )
    return SimpleNamespace(
        args=args,
        model=model,
        model_personal=personal,
        optimizer=optimizer,
        optimizer_personal=Sgd(personal, setting.lr, before=optimizer),
        scheduler=None,
        criterion=nn.CrossEntropyLoss(),
        metrics=(1,),
        train_loader=feed.loader(number),
        val_loader=None,
    )


def _server(trace: Trace) -> SimpleNamespace:
    model = copy.deepcopy(trace.initial)
    graph = SimpleNamespace(n_nodes=len(trace.parts))
    args = SimpleNamespace(
        **dict.fromkeys(("rounds_comm", "local_index", "global_index"), 0),
        **dict.fromkeys(("fed_personal", "quantized", "out_momentum"), False),
        federated_type="apfl",
        graph=graph,
        lr_scale_at_sync=1.0,
    )
    unused = dict.fromkeys(("local_val_tracker", "global_val_tracker", "criterion", "metrics"))
    optimizer = Sgd(model, 1.0)
    return SimpleNamespace(
        args=args,
        model=model,
        optimizer=optimizer,
        zero_grad=optimizer.zero_grad,
        reset_tracker=lambda _: None,
        **unused,
    )


OUTPUTS = (
    "rayfed's `variant=paper` follows Alg. 1. Line 102 of `centered/apfl.py` and line 36 of `eval.py` mix the outputs "
    "of v and w, not their weights as Eq. 7 does, and w has taken its step by then. With a linear model, where the "
    "first makes no difference, and with both steps at once, they agree. (Its server averages without weights, and "
    "rayfed's by examples, so clients have equal sizes here.)"
)


def cases() -> list[Case]:
    """Return all comparisons with the authors' APFL."""

    def ours(trace: Trace) -> Models:
        return server_weights(trace) | client_weights(trace, "model", label="personal")

    options = {"variant": "paper", "alpha": 0.4, "adapt_alpha": False}
    sizes = (20, 20, 20, 20)
    fixed = "variant=paper, α fixed, clients of equal size"
    linear = f"{fixed}; a linear model, theirs with w's step together with v's"
    return [
        *pair("apfl", SOURCE, options, run(False), ours, variant=fixed, differs=OUTPUTS, sizes=sizes),
        *pair("apfl", SOURCE, options, run(True), ours, variant=linear, sizes=sizes, network="linear"),
    ]
