"""MOON's authors (Li, He and Song 2021): their local training and their network with a projection head.

Their script's rounds are written out here, since it has no function for them: the mean of the models by training
examples, and the nets of the last round as previous nets, of which there are none in the first.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor, nn

from rayfed.algorithms.moon import Moon
from rayfed.core.trees import Weights
from references.checkout import Checkout, anything
from references.harness import Case, Feed, Models, Trace, client_weights, mean, pair, plain, server_weights

SOURCE = "moon"
TRIED = "8fcba3c"

NAMES = {"l1.": "projection.0.", "l2.": "projection.2.", "l3.": "head.", "features.": "model.features."}
"""Their names of the layers after the network's features, and rayfed's."""


@contextmanager
def watch(extra: dict[str, Any]) -> Iterator[None]:
    """Note the initial weights, those of the projection head included."""
    init = Moon.init

    def noting(self: Any, ctx: Any) -> Any:
        extra["initial"] = ctx.task.initial_weights()
        return init(self, ctx)

    with mock.patch.object(Moon, "init", noting):
        yield


def theirs(checkout: Checkout, trace: Trace) -> Models:
    """Return the server's model and the clients' previous nets after training with `train_net_fedcon`."""
    with checkout.importing(".", anything("datasets")) as load, _on_cpu():
        script = load("main")
        script.compute_accuracy = lambda *_, get_confusion_matrix=False, **__: (0,) * (2 + get_confusion_matrix)
        script.logger = SimpleNamespace(info=lambda text: None)
        setting, options = trace.setting, trace.setting.algorithm
        args = SimpleNamespace(reg=setting.more["local.weight_decay"])
        server, feed = _network(load("model", "ModelFedCon"), trace), Feed(trace)
        nets = [copy.deepcopy(server) for _ in trace.parts]
        previous: list[nn.Module] = []
        for round in range(1, setting.rounds + 1):
            feed.start(round)
            cohort = trace.cohort(round)
            server.eval().requires_grad_(False)
            for i in cohort:
                nets[i].load_state_dict(server.state_dict())
                of_client, loader = [previous[i]] if previous else [], feed.loader(i)
                script.train_net_fedcon(
                    *(i, nets[i], server, of_client, loader, [], setting.epochs, setting.lr, "sgd"),
                    *(options["mu"], options["tau"], args, round),
                )
            server.load_state_dict(mean({i: plain(nets[i]) for i in cohort}, trace))
            previous = [copy.deepcopy(net).eval().requires_grad_(False) for net in nets]
        feed.finish()
        kept = {f"client {i} previous": plain(previous[i], NAMES) for i in trace.clients}
        return {"server": plain(server, NAMES)} | kept


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Let `.cuda()` return what it is called on."""
    with (
        mock.patch.object(Tensor, "cuda", lambda self, *_: self),
        mock.patch.object(nn.Module, "cuda", lambda self, *_: self),
    ):
        yield


def _network(kind: Any, trace: Trace) -> nn.Module:
    """Return their network, with rayfed's network in the place of its features, and rayfed's initial weights."""
    initial: Weights = trace.extra["initial"]

    class Net(kind):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.features = copy.deepcopy(trace.initial.features)
            for name in ("l1", "l2", "l3"):
                weight = initial[NAMES[f"{name}."] + "weight"]
                setattr(self, name, nn.Linear(weight.shape[1], weight.shape[0]))

    net = Net()
    net.load_state_dict({own: initial[name] for own, name in zip(net.state_dict(), plain(net, NAMES), strict=True)})
    return net


def cases() -> list[Case]:
    """Return all comparisons with the authors' MOON."""
    more = {"local.momentum": 0.9, "local.weight_decay": 1e-4}
    return pair(
        "moon",
        SOURCE,
        {"mu": 1.0, "tau": 0.5},
        theirs,
        lambda trace: server_weights(trace) | client_weights(trace, "previous", label="previous"),
        watch=watch,
        variant="widths=null, with the projection head",
        lr=0.02,
        more=more,
    )
