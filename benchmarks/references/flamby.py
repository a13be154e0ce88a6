"""FLamby (Ogier du Terrail et al. 2022): six of its seven strategies, which call themselves once a round.

Its seventh, Cyclic, is left out: in this commit `perform_round` trains one client's own model, and no line hands it on.

Every client takes the same number of steps (`num_updates`), from a loader that goes on where it stopped. The server's
moments of FedAdam, FedYogi and FedAdagrad start from 0 there and from τ² in rayfed, so that they agree for a τ that is
small, as the 1e-8 of its published configurations. What remains is rounding: m / √v magnifies that of small updates, so
that these three are compared in float64, too.
"""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from references.checkout import Anything, Checkout, anything
from references.harness import Case, Feed, Models, Setting, Trace, plain, server_weights

SOURCE = "flamby"
TRIED = "edacf54"
STEPS = 12
LOG = "torch.utils.tensorboard"
ADAPTIVE = {"beta1": 0.9, "tau": 1e-8}


def theirs(
    checkout: Checkout, trace: Trace, *, module: str, name: str, options: Mapping[str, Any], from_tau: bool
) -> Models:
    """Return the server's weights after rounds of the strategy `name`, which all of its clients hold."""
    unused = anything("opacus") | {LOG: Anything(LOG)}
    with checkout.importing(".", unused) as load:
        strategy = load(f"flamby.strategies.{module}", name)
        setting, feed = trace.setting, Feed(trace)
        loaders = [feed.loader(client) for client in range(len(setting.sizes))]
        running = strategy(
            training_dataloaders=loaders,
            model=copy.deepcopy(trace.initial),
            loss=torch.nn.CrossEntropyLoss(),
            optimizer_class=torch.optim.SGD,
            learning_rate=setting.lr,
            num_updates=STEPS,
            nrounds=setting.rounds,
            **options,
        )
        if from_tau:
            running.v = [tau**2 for tau in running.tauarray]
        for round in range(1, setting.rounds + 1):
            feed.start(round)
            running.perform_round()
        feed.finish()
        held = [plain(model.model) for model in running.models_list]
    for weights in held[1:]:
        assert all(torch.equal(weights[name], held[0][name]) for name in weights)
    return {"server": held[0]}


def case(
    method: str,
    name: str,
    module: str,
    algorithm: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    variant: str = "",
    double: bool = False,
    from_tau: bool = False,
) -> Case:
    """Return the comparison of a strategy, in which all clients take part.

    Args:
        double: Whether both sides compute in float64.
        from_tau: Whether their second moments start from τ².
    """
    more = {"local.epochs": None, "local.steps": STEPS}
    setting = Setting({"name": method, **algorithm}, rounds=4, double=double, more=more)
    runs = partial(theirs, module=module, name=name, options=options, from_tau=from_tau)
    return Case(method, SOURCE, setting, runs, server_weights, variant=variant)


def cases() -> list[Case]:
    """Return all comparisons with FLamby."""
    server = {"server_learning_rate": 0.1, **ADAPTIVE}
    adaptive = {"server_lr": 0.1, **ADAPTIVE}
    moments = {"beta2": 0.999}
    found = [
        case("fedavg", "FedAvg", "fed_avg", {}, {}),
        case("fedprox", "FedProx", "fed_prox", {"mu": 0.1}, {"mu": 0.1}),
        case("scaffold", "Scaffold", "scaffold", {"weighting": "examples"}, {}, variant="weighting=examples"),
    ]
    found.append(case("fedadagrad", "FedAdagrad", "fed_opt", adaptive, server, variant="τ = 1e-8"))
    for name in ("Adam", "Yogi"):
        compared = partial(case, f"fed{name.lower()}", f"Fed{name}", "fed_opt", adaptive | moments, server | moments)
        found.append(compared(variant="τ = 1e-8"))
        found.append(compared(variant="τ = 1e-8, in float64", double=True))
        found.append(compared(variant="τ = 1e-8, in float64, their v starts from τ²", double=True, from_tau=True))
    return found
