"""FL-bench (Tan and Wang 2023), for the methods with an optimiser on the server, which PFLlib lacks.

Its clients train and its servers aggregate; hydra's configuration, the data sets and the trainer that hands out clients
are replaced.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from references.checkout import Anything, Checkout, anything
from references.harness import PARTIAL, Case, Feed, Models, Setting, Trace, plain, server_weights

SOURCE = "flbench"
TRIED = "06e658b"

STAND_INS = anything("hydra.core.hydra_config", "omegaconf", "pynvml") | {"src.utils.trainer": Anything("trainer")}


def run(
    file: str, server: str, options: dict[str, Any], first_moment: float = 0.0
) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with FL-bench's `server` class and returns the server's model.

    Args:
        file: The module in `src/server`, which is also the name of the group of `options`.
        first_moment: The initial value of the second moments of an adaptive server.
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        with checkout.importing(".", STAND_INS) as load:
            base, client = load("src.server.fedavg", "FedAvgServer"), load("src.client.fedavg", "FedAvgClient")
            args = _arguments(trace, file, options)
            model = plain(trace.initial)
            feed = Feed(trace)

            def initialise(self: Any, args: Any) -> None:
                self.args, self.public_model_params = args, OrderedDict(model)

            base.__init__ = initialise
            made = load(f"src.server.{file}", server)(args)
            for velocity in made.adaptive_optimizer.velocities if file == "fedopt" else ():
                velocity.fill_(first_moment)
            worker = _client(client, trace, feed, args, made.return_diff)

            def train() -> dict[int, Any]:
                return {i: worker.train(_package(i, made, trace)) for i in trace.cohort(made.current_epoch)}

            made.trainer = SimpleNamespace(train=train)
            for round in range(1, trace.setting.rounds + 1):
                made.current_epoch = round
                feed.start(round)
                made.train_one_round()
            feed.finish()
            return {"server": dict(made.public_model_params)}

    return theirs


def _client(kind: Any, trace: Trace, feed: Feed, args: Any, return_diff: bool) -> Any:
    indices = [{"train": list(range(n)), "val": [], "test": []} for n in map(trace.examples, range(len(trace.parts)))]
    optimizer = functools.partial(torch.optim.SGD, lr=trace.setting.lr)
    dataset = SimpleNamespace(train=lambda: None, eval=lambda: None)
    module = trace.setting.model()
    client = kind(module, optimizer, None, args, dataset, indices, torch.device("cpu"), return_diff)

    class Current:
        """The loader of the client that the worker acts for at the moment."""

        def __iter__(self) -> Any:
            return iter(feed.loader(client.client_id))

    client.trainloader = Current()
    return client


def _package(client: int, server: Any, trace: Trace) -> dict[str, Any]:
    return {
        "client_id": client,
        "local_epoch": trace.setting.epochs,
        "optimizer_state": {},
        "lr_scheduler_state": {},
        "regular_model_params": server.public_model_params,
        "personal_model_params": {},
    }


def _arguments(trace: Trace, group: str, options: dict[str, Any]) -> SimpleNamespace:
    client = SimpleNamespace(train=False, val=False, test=False)
    common = SimpleNamespace(
        buffers="global",
        use_cuda=False,
        batch_size=trace.setting.batch_size,
        local_epoch=trace.setting.epochs,
        reset_optimizer_on_global_epoch=True,
        client_side_evaluation=False,
        test=SimpleNamespace(client=client),
    )
    return SimpleNamespace(common=common, **{group: SimpleNamespace(**options)})


STARTS_FROM_ZERO = (
    "rayfed follows the paper: Alg. 2 asks for an initial v of at least τ². `fedopt.py`, line 81, starts from 0. From "
    "τ² on, they agree."
)


def cases() -> list[Case]:
    """Return all comparisons with FL-bench."""
    found = []
    for partial in ({}, PARTIAL):
        setting = Setting({"name": "fedavgm", "momentum": 0.8, "nesterov": True}, **partial)
        theirs = run("fedavgm", "FedAvgMServer", {"server_momentum": 0.8})
        found.append(Case("fedavgm", SOURCE, setting, theirs, server_weights, variant="nesterov=true, as theirs"))
        for name in ("adam", "yogi", "adagrad"):
            options = {"type": name, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.03, "tau": 0.02}
            own = {"name": f"fed{name}", "beta1": 0.9, "server_lr": 0.03, "tau": 0.02}
            setting = Setting(own | ({} if name == "adagrad" else {"beta2": 0.99}), **partial)
            theirs = run("fedopt", "FedOptServer", options)
            found.append(Case(f"fed{name}", SOURCE, setting, theirs, server_weights, differs=STARTS_FROM_ZERO))
            theirs = run("fedopt", "FedOptServer", options, first_moment=0.02**2)
            variant = "their v starts from τ²"
            found.append(Case(f"fed{name}", SOURCE, setting, theirs, server_weights, variant=variant))
    return found
