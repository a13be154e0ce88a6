"""HarmoFL's authors (Jiang, Wang and Dou 2022): their local training, their perturbation, their aggregation and their
amplitude normalisation.

The latter is written in Cython. Its source is translated to Python when it is imported, by leaving out the types.
"""

import copy
import re
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from references.checkout import Checkout, Importer, anything
from references.harness import Case, Feed, Models, Setting, Trace, plain

SOURCE = "harmofl"
TRIED = "63182fe"

TYPE = r"(?:np\.ndarray\[[^]]*\]|unsigned int|double|float|bint|int)"


def run(published: bool) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with `train_perturbation` and `communication`.

    Args:
        published: Whether amplitudes are normalised as the code does it: only the lowest frequency, by an amplitude
            that each client takes from its first batch. Otherwise its functions replace all frequencies, as the paper
            does, with a running mean that is complete before the first round.
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        stand_ins = {"utils.amp_utils": _without_types(checkout), "utils.dataset": anything("dataset")["dataset"]}
        with checkout.importing(".", stand_ins) as load:
            training, perturbed = load("federated.fed_train"), load("utils.weight_perturbation", "WPOptim")
            setting, feed, count = trace.setting, Feed(trace), len(trace.parts)
            server = _network(load, trace, published)
            clients = [copy.deepcopy(server) for _ in range(count)]
            optimizers = [
                perturbed(
                    params=client.parameters(),
                    base_optimizer=torch.optim.SGD,
                    lr=setting.lr,
                    alpha=setting.algorithm["alpha"],
                    momentum=0.9,
                    weight_decay=1e-4,
                )
                for client in clients
            ]
            shares = [1.0 / count] * count
            if not published:
                for i, client in enumerate(clients):
                    for x, _ in feed.loader(i):
                        client.amp_norm(x)
                server, clients = training.communication(None, server, clients, shares)
            for round in range(1, setting.rounds + 1):
                feed.start(round)
                for _ in range(setting.epochs):
                    for i, client in enumerate(clients):
                        arguments = (None, client, feed.loader(i), optimizers[i], nn.CrossEntropyLoss())
                        training.train_perturbation(*arguments, torch.device("cpu"))
                server, clients = training.communication(None, server, clients, shares)
            feed.finish()
            weights = plain(server, keep=lambda name: not name.startswith("amp_norm."))
            return {"server": weights, "amplitude": {"amplitude": server.amp_norm.running_amp}}

    return theirs


def _network(load: Importer, trace: Trace, published: bool) -> nn.Module:
    """Return rayfed's network behind their layer `AmpNorm`."""
    layers, amplitudes = load("utils.layers"), load("utils.amp_utils")
    process, normalize = amplitudes.process, amplitudes.normalize

    def on_copy(x: np.ndarray, amplitude: np.ndarray, momentum: float, fixed: bool) -> tuple[np.ndarray, np.ndarray]:
        """Process a copy, as on a GPU, and with `momentum` as an integer, as it is declared."""
        return process(x.copy(), amplitude, int(momentum) if published else momentum, fixed)

    layers.process = on_copy
    if not published:
        amplitudes.normalize = lambda image, amplitude, L: normalize(image, amplitude, L=0.5)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.amp_norm = layers.AmpNorm(input_shape=tuple(trace.parts[0][0].shape[1:]))
            self.features, self.head = copy.deepcopy(trace.initial.features), copy.deepcopy(trace.initial.head)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(self.amp_norm(x)))

    return Net()


def _without_types(checkout: Checkout) -> ModuleType:
    """Return the module that the Cython source would be without its types."""
    file = checkout.path / "utils" / "amp_utils.pyx"
    if not file.is_file():
        raise checkout.changed("utils/amp_utils.pyx is missing")
    source = re.sub(r"^cimport .*$", "", file.read_text(), flags=re.MULTILINE)
    source = re.sub(rf"^(\s*)cdef {TYPE} ([^=\n]*)$", r"\1pass", source, flags=re.MULTILINE)
    source = re.sub(rf"^(\s*)cdef {TYPE} ", r"\1", source, flags=re.MULTILINE)
    source = re.sub(rf"(?<=[(\s]){TYPE} (?=\w+[,)])", "", source)
    module = ModuleType("utils.amp_utils")
    exec(compile(source, str(file), "exec"), vars(module))
    return module


def ours(trace: Trace) -> Models:
    return {"server": trace.server["weights"], "amplitude": {"amplitude": trace.server["amplitude"]}}


LOWEST_FREQUENCY = (
    "rayfed follows the paper, which puts the mean amplitude in the place of the image's at all frequencies. "
    "`amp_utils.pyx`, line 59, calls `normalize` with L=0, which replaces the lowest frequency only; `process` "
    "declares `int momentum`, so that 0.1 is 0 and the first batch decides; and the amplitude is computed while round "
    "1 trains with it. With L=0.5, a momentum that counts and the amplitude complete before round 1, they agree."
)


def cases() -> list[Case]:
    """Return all comparisons with the authors' HarmoFL."""
    own = {"name": "harmofl", "alpha": 0.05}
    more = {"local.keep_optimizer": True, "local.momentum": 0.9, "local.weight_decay": 1e-4}
    setting = Setting(own, network="cnn", lr=0.02, more=more)
    variant = "local.keep_optimizer=true"
    return [
        Case("harmofl", SOURCE, setting, run(True), ours, variant=variant, differs=LOWEST_FREQUENCY),
        Case("harmofl", SOURCE, setting, run(False), ours, variant=f"{variant}, theirs with all frequencies"),
    ]
