"""FedReg's authors (Xu et al. 2022): their server, their local step and their pseudo-data.

Their models have fixed shapes, so that of MNIST is subclassed and receives another network. They draw pseudo-data in a
pass over the data of its own, before training; here it meets the batches in the order in which training will.
"""

import copy
from functools import partial as partial_function
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from references.checkout import Checkout, Importer, Unused, anything
from references.harness import CLASSES, PARTIAL, Case, Feed, Models, Setting, Trace, plain, server_weights

SOURCE = "fedreg"
TRIED = "34b081f"

STAND_INS = anything("thop", "h5py") | {"loguru": {"logger": Unused()}}


def theirs(checkout: Checkout, trace: Trace, shown: int = 1) -> Models:
    """Return the server's model after training with `FedReg`, which sees the batches of `shown` epochs in advance."""
    with checkout.importing(".", STAND_INS) as load:
        sharing = torch.multiprocessing.get_sharing_strategy()
        feed = Feed(trace)
        model, client = _model(load, trace), load("FedUtils.fed.client", "Client")
        torch.multiprocessing.set_sharing_strategy(sharing)  # their module `client` changes it
        module, kind = load("FedUtils.fed.fedreg"), load("FedUtils.fed.fedreg", "FedReg")

        class Quiet(kind):  # type: ignore[misc, valid-type]
            def select_clients(self, seed: int, num_clients: int = 20) -> tuple[list[int], list[Any]]:
                feed.start(seed + 1)
                cohort = trace.cohort(seed + 1)
                self.clients_per_round = len(cohort)
                return cohort, [_client(client, self, feed, i, shown) for i in cohort]

            def test(self) -> tuple[Any, ...]:
                return ()

        config = {
            **dict.fromkeys(("model_param", "eval_train"), ()),
            "inner_opt": None,
            "clients_per_round": 0,
            "num_rounds": trace.setting.rounds,
            "eval_every": 100,
            "batch_size": trace.setting.batch_size,
            "drop_percent": 0.0,
            "num_epochs": trace.setting.epochs,
            "gamma": trace.setting.algorithm["gamma"],
        }
        with mock.patch.object(module, "decode_stat", return_value=None):
            server = Quiet(config, model, ([], [], {}, []))
            server.train()
        feed.finish()
        return {"server": plain(server.model.net)}


def _model(load: Importer, trace: Trace) -> Any:
    """Return their model class with rayfed's network and separate copies of a batch for the two sets of pseudo-data.

    `generate_fake` starts both from `x.detach()`. On a GPU they are copies, since the batch comes from the CPU; on a
    CPU both, and the batch, would be one tensor.
    """
    module = load("FedUtils.models.mnist.cnn")
    step = module.FSGM
    module.FSGM = lambda model, x, *rest: step(model, x.clone(), *rest)

    class Model(module.Model):  # type: ignore[name-defined]
        def __init__(self, optimizer: Any):
            torch.nn.Module.__init__(self)
            self.num_classes, self.softmax, self.net = CLASSES, torch.nn.Softmax(-1), copy.deepcopy(trace.initial)
            self.learning_rate, self.size, self.flop = trace.setting.lr, 0, 0
            eta = trace.setting.algorithm["eta_s"]
            self.p_iters, self.ps_eta, self.pt_eta = 10, eta, eta / 100

        def forward(self, data: Tensor) -> Tensor:
            return self.net(data)

    return Model


def _client(kind: Any, server: Any, feed: Feed, number: int, shown: int) -> Any:
    nothing = {"x": [0], "y": [0]}
    client = kind(number, None, nothing, [], server.cmodel, server.batch_size, None, None, None, None)
    client.train_data = TwoPasses(feed, number, shown)
    return client


class TwoPasses:
    """A loader whose first pass shows the batches of the next epochs, which the following passes use up."""

    def __init__(self, feed: Feed, client: int, shown: int):
        self.loader, self.shown, self.passes = feed.loader(client), shown, 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(self.loader if self.passes > 1 else self.loader.ahead(self.shown))


ORDER = (
    "`fedreg.py`, line 40, gives the k-th batch of each epoch the pseudo-data of the k-th batch of one pass before "
    "training, which shuffling makes another batch. (Here they are the same in the first epoch, and not in the "
    "second.) rayfed computes pseudo-data from the batch itself, so that the projection concerns the same examples; no "
    "option gives the other pairing. With pseudo-data for the batches of all epochs, theirs agrees."
)


def cases() -> list[Case]:
    """Return all comparisons with the authors' FedReg."""
    found = []
    for partial in ({}, PARTIAL):
        setting = Setting({"name": "fedreg", "eta_s": 0.1, "gamma": 0.5}, **partial)
        found.append(Case("fedreg", SOURCE, setting, theirs, server_weights, differs=ORDER))
        every = partial_function(theirs, shown=setting.epochs)
        variant = "with pseudo-data of its own for every batch of both epochs"
        found.append(Case("fedreg", SOURCE, setting, every, server_weights, variant=variant))
    return found
