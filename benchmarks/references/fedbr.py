"""FedDebias's authors (Guo, Tang and Lin; FedBR is its published version): their steps, projector and aggregation.

Pseudo-data, networks and data loaders are rayfed's. Clients take all their local steps before each aggregation; in the
script of the authors the first round has a single step.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from rayfed.algorithms.feddebias import FedDebias
from references import fedmix
from references.checkout import Checkout, anything
from references.harness import CLASSES, FEATURES, INPUTS, Case, Feed, Models, Trace, pair, plain

SOURCE = "fedbr"
TRIED = "6c4c539"

WIDTHS = [2 * FEATURES, 2 * FEATURES, FEATURES]
"""Of the authors' projector, for features of that width."""

LAYERS = {"input.": "0.", "hiddens.0.": "2.", "output.": "4."}
_THEIRS = {ours: theirs for theirs, ours in LAYERS.items()}
NETWORK = {"featurizer.": "features.", "classifier.": "head."}

MENDED = {
    "all_self_z = self.featurizer(all_x)": "all_self_z = self.featurizer(all_x); "
    "corrected = all_unlabeled_z - (q * all_y).sum(1, keepdim=True) * all_self_z; "
    "self.all_global_unlabeled_z = self.original_feature(all_unlabeled).detach()",
    "embedding3 = self.discriminator(all_self_z.clone().detach())": "embedding3 = self.discriminator("
    "all_self_z.detach()); embedding4 = self.discriminator(corrected.detach())",
    "embedding3 = self.discriminator(all_self_z)": "embedding3 = self.discriminator(all_self_z); "
    "embedding4 = self.discriminator(corrected)",
    "self.sim(embedding1, embedding3)": "self.sim(embedding4, embedding3)",
}
"""φ_g of the mixtures of every batch, and the negative pair of Eq. 6."""


@contextmanager
def watch(extra: dict[str, Any]) -> Iterator[None]:
    """Note the initial weights of the projector."""
    init = FedDebias.init

    def noting(self: Any, ctx: Any) -> Any:
        server = init(self, ctx)
        extra["projector"] = copy.deepcopy(server.get("projector"))
        return server

    with mock.patch.object(FedDebias, "init", noting):
        yield


def run(changes: Mapping[str, str] | None = None, *, mixes: bool = False) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with their `FedBR.update` and aggregates with their `FedAvg`.

    Args:
        changes: Texts of `update` to replace.
        mixes: Whether pseudo-data are mixed with local data.
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        stand_ins = anything("fedbr.src", "fedbr.lib.misc", "backpack.extensions")
        with checkout.importing(".", stand_ins) as load:
            algorithms, federated = load("fedbr.algorithms"), load("fedbr.algorithms_fed")
            algorithms.networks.Featurizer = lambda shape, hparams: _features(trace)
            algorithms.networks.Classifier = lambda *_: copy.deepcopy(trace.initial.head)
            algorithms.FedBR.update = load.mended(algorithms.FedBR.update, changes or {})
            if mixes:
                algorithms.torch = _Torch()
            server, feed = federated.FedAvg(_algorithm(algorithms.FedBR, trace, mixes)), Feed(trace)
            for round in range(1, trace.setting.rounds + 1):
                feed.start(round)
                clients = [_train(federated.FedAvg, server, feed, i) for i in trace.cohort(round)]
                shares = [1.0 / len(clients)] * len(clients)
                server.global_update([client.gradients for client in clients], shares, {"global_lr": 1.0})
            feed.finish()
            weights = plain(server.algorithm, NETWORK, lambda name: name.startswith(("features.", "head.")))
            models = {"server": weights, "projector": plain(server.algorithm.discriminator, LAYERS)}
            return models if trace.extra["projector"] else {"server": weights}

    return theirs


def _features(trace: Trace) -> nn.Module:
    features = copy.deepcopy(trace.initial.features)
    features.n_outputs = features.n_outputs_feature = FEATURES
    return features


def _algorithm(kind: Any, trace: Trace, mixes: bool) -> Any:
    options = {"lr": trace.setting.lr, "weight_decay": 0.0, "nonlinear_classifier": False, "mlp_dropout": 0.0}
    options |= {"use_Mixture": mixes, "use_Mixup": False, "mlp_width": 0, "mlp_depth": 3}
    algorithm = kind((INPUTS,), CLASSES, len(trace.parts), options)
    for name, value in (trace.extra["projector"] or {}).items():
        layer, _, part = name.partition(".")
        algorithm.discriminator.state_dict()[_THEIRS[f"{layer}."] + part].copy_(value)
    return algorithm


def _train(kind: Any, server: Any, feed: Feed, number: int) -> Any:
    """Return a client after its local steps."""
    client = kind(copy.deepcopy(server.algorithm))
    client.algorithm.if_updated = True
    pseudo = list(feed.trace.clients[number]["pseudo"].split(1))
    for _ in range(feed.trace.setting.epochs):
        for batch in feed.loader(number):
            client.update([batch], pseudo)
    return client


class _Torch:
    """Stands for torch in their module: the j-th example that is mixed with row i is row i + j of the batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randint(self, low: int, high: int, size: Sequence[int]) -> Tensor:
        self.calls += 1
        return torch.tensor([self.calls % high])


def ours(trace: Trace) -> Models:
    models = {"server": trace.server["weights"], "projector": trace.server.get("projector")}
    return {name: weights for name, weights in models.items() if weights}


def without_statistics(models: Models) -> Models:
    """Return the models without the running statistics of batch norm."""
    keep = "running_", "num_batches"
    return {
        model: {name: value for name, value in weights.items() if not any(word in name for word in keep)}
        for model, weights in models.items()
    }


ALIKE = (
    "rayfed weighs clients by their examples, as Eq. 1 does. The code gives each the same weight, as Alg. 1 does "
    "(`algorithms_fed.py`, line 81, and `scripts/train_fed.py`, line 394); that is `weighting=equal`."
)
DIVIDED = (
    "Eq. 5 divides by τ. The code (`algorithms.py`, line 1136) multiplies, as rayfed does by default; so its τ = 2 is "
    "`tau_mode=divide` with 0.5."
)
FIRST_BATCH = (
    "rayfed follows Eq. 6, which corrects the negative pair of a mixture, and takes φ_g of each batch's mixtures. The "
    "code has no Eq. 6 (`algorithms.py`, line 1136), and line 1123 keeps φ_g of the round's first mixtures, since line "
    "1127 is a comment. With both, they agree."
)


def cases() -> list[Case]:
    """Return all comparisons with the authors' code."""
    by_examples = {"widths": WIDTHS, "transfer": "once"}
    rsm = by_examples | {"weighting": "equal"}
    mixture = rsm | {"pseudo": "mixture", "proxy": "noise"}
    divided = rsm | {"tau_mode": "divide"}
    halves = divided | {"tau1": 0.5, "tau2": 0.5}
    labels, contrast = run({"mu = 0.5": "mu = 0.0"}), run({"lam = 1.0": "lam = 0.0"})

    def case(options: Any, theirs: Any, variant: str = "", differs: str = "") -> list[Case]:
        return pair("feddebias", SOURCE, options, theirs, ours, watch=watch, variant=variant, differs=differs)

    return [
        *case(by_examples, run(), "", ALIKE),
        *case(rsm, run(), "weighting=equal"),
        *case(rsm | {"mu": 0.0}, labels, "weighting=equal, mu=0, theirs too"),
        *case(rsm | {"lam": 0.0}, contrast, "weighting=equal, lam=0, theirs too"),
        *case(divided, run(), "weighting=equal, tau_mode=divide", DIVIDED),
        *case(halves, run(), "weighting=equal, tau_mode=divide, tau1=tau2=0.5"),
        *case(mixture, run(mixes=True), "weighting=equal, pseudo=mixture", FIRST_BATCH),
        *case(
            mixture,
            run(MENDED, mixes=True),
            "weighting=equal, pseudo=mixture, theirs with Eq. 6 and φ_g of every batch",
        ),
        *pair(
            "feddebias",
            SOURCE,
            rsm,
            lambda checkout, trace: without_statistics(run()(checkout, trace)),
            lambda trace: without_statistics(ours(trace)),
            watch=watch,
            variant="weighting=equal, batch norm without its running statistics",
            network="mlp_bn",
        ),
        *fedmix.cases(),
    ]
