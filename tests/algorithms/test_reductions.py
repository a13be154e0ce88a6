"""Without what it adds, a method is the one on which it builds; with it, it is not."""

import pytest
import torch

from helpers.federations import net
from helpers.reference import population, run
from rayfed.algorithms.dann import DANN
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.ditto import Ditto
from rayfed.algorithms.fed_irm import FedIRM
from rayfed.algorithms.fedavg import FedAvg, PFedAvg, Solo
from rayfed.algorithms.feddebias import FedDebias
from rayfed.algorithms.fedmix import FedMix
from rayfed.algorithms.fedproto import FedProto
from rayfed.algorithms.fedprox import FedProx
from rayfed.algorithms.fedrod import FedRoD
from rayfed.algorithms.moon import Moon
from rayfed.algorithms.server_optimizers import FedAvgM
from rayfed.algorithms.vhl import VHL
from rayfed.algorithms.weights_by_losses import AFL, VM

SMALL_VHL = {"virtual_examples": 40, "virtual_batch_size": 6}


@pytest.mark.parametrize(
    ("reduced", "base", "whole"),
    [
        (AFL(lambda_lr=0.0), FedAvg(), AFL(lambda_lr=0.5)),
        (DANN(weight_adversary=0.0), FedAvg(), DANN()),
        (DBE(kappa=0.0, prbm=False), FedAvg(), DBE(kappa=0.0)),
        (DBE(mr=False, prbm=False), FedAvg(), DBE(mr=False)),
        (Ditto(mu=3.0), FedAvg(), None),  # the common model, whatever μ is
        (FedAvgM(momentum=0.0), FedAvg(), FedAvgM(momentum=0.5)),
        (FedDebias(lam=0.0, mu=0.0, transfer="once"), FedAvg(), FedDebias(lam=0.0)),
        (FedDebias(lam=0.0, mu=0.0), FedAvg(), FedDebias(mu=0.0)),
        (FedIRM(beta=0.0, beta_start=0.0), FedAvg(), FedIRM()),
        (FedMix(lam=0.0, mean_examples=4), FedAvg(), FedMix(lam=0.5, mean_examples=4)),
        (FedProx(mu=0.0), FedAvg(), FedProx(mu=0.1)),
        (FedProto(lam=0.0), Solo(), FedProto(lam=1.0)),
        (FedRoD(gamma=0.0), FedAvg(), FedRoD(gamma=1.0)),
        (Moon(mu=0.0, widths=[]), FedAvg(), Moon(mu=5.0, widths=[])),
        (PFedAvg(), FedAvg(), None),
        (VHL(alpha=0.0, align=0.0, **SMALL_VHL), FedAvg(), VHL(**SMALL_VHL)),
        (VM(beta=0.0), FedAvg(), VM(beta=1.0)),
    ],
    ids=lambda algorithm: getattr(algorithm, "name", ""),
)
def test_a_method_is_its_base_without_what_it_adds(reduced, base, whole):
    expected, found = (weights(algorithm) for algorithm in (base, reduced))
    atol = 1e-6 if isinstance(reduced, Ditto | FedAvgM) else 0.0  # these two add in another order
    torch.testing.assert_close({path: found[path] for path in expected}, expected, rtol=0, atol=atol)
    if whole is not None:
        changed = weights(whole)
        assert any(not torch.allclose(changed[path], value, rtol=1e-4, atol=1e-5) for path, value in expected.items())


def weights(algorithm):
    """Return the weights of the server and of every client after three rounds, by owner and name."""
    server = run(algorithm, population(), net(batch_norm=False), rounds=3)
    owners = {"server": server.state, **server.fleet.states}
    return {f"{owner} {name}": value for owner, state in owners.items() for name, value in state["weights"].items()}
