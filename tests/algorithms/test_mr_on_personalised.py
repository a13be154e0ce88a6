"""DBE's mean regulariser over personalised methods: in the loss of the model that is aggregated, and nowhere else.

Compared are the first steps with and without it, from the same weights: what it must leave alone is equal bit for bit.
"""

import pytest
import torch

from helpers.federations import blobs, blueprint, net
from helpers.reference import batch
from rayfed.algorithms.apfl import APFL
from rayfed.algorithms.dbe import CONSENSUS, DBE, MEAN
from rayfed.algorithms.ditto import Ditto
from rayfed.algorithms.fedfomo import FedFomo
from rayfed.algorithms.fedrod import FedRoD
from rayfed.algorithms.personal_heads import FedBABU, FedPer, FedRep
from rayfed.core.ids import Moment
from rayfed.core.trees import clone
from rayfed.engine.fleet import Request
from rayfed.engine.host import Host
from rayfed.experiments.checks import check_trial

LR, KAPPA, MU, GOAL = 0.05, 40.0, 0.3, 0.2
HEAD = "fc.weight"


def one_step(base, kappa, **now):
    """Return the work of client 0 after one step of round 1 whose consensus is GOAL."""
    people = blobs()
    algorithm = DBE(base=base, prbm=False, kappa=kappa, mu=MU)
    plan = blueprint(algorithm, people, model=net(batch_norm=False))
    check_trial(plan, people)
    host = Host(plan, people, "cpu")
    ctx = host._with_data(host._context(0, Request(moment=Moment("round", 1), cohort=(0,), clients=(0,))))
    client = algorithm.join(ctx)
    goal = torch.full((8,), GOAL)
    client = client | {"weights": client["weights"] | {CONSENSUS: goal}}
    down = algorithm.broadcast(ctx, algorithm.init(ctx))
    return algorithm.step(ctx.at(**now), clone(algorithm.start(ctx, client, down)), down, batch())[0]


def regulariser_gradient():
    """Of κ/2 · mean((μ · batch mean − GOAL)²) with respect to the weights of the body, by autograd."""
    model = net(batch_norm=False)
    loss = KAPPA / 2 * (MU * model.features(batch().x).mean(0) - GOAL).square().mean()
    names = [name for name, _ in model.body.named_parameters(prefix="body")]
    return dict(zip(names, torch.autograd.grad(loss, list(model.body.parameters())), strict=True))


BASES = {
    "ditto": (Ditto(), {"phase": "train"}),
    "fedper": (FedPer(), {}),
    "fedrep": (FedRep(), {"phase": "body"}),
    "fedrod": (FedRoD(), {}),
    "fedbabu": (FedBABU(), {"phase": "train"}),
    "apfl": (APFL(), {}),
    "fedfomo": (FedFomo(), {}),
}


@pytest.mark.parametrize("name", BASES)
def test_the_step_of_the_aggregated_model_has_its_gradient_on_top(name):
    base, now = BASES[name]
    without, with_it = (one_step(base, kappa, **now) for kappa in (1e-30, KAPPA))
    for weight, grad in regulariser_gradient().items():
        assert grad.abs().max() > 1e-3
        torch.testing.assert_close(
            with_it["weights"][weight], without["weights"][weight] - LR * grad, atol=1e-6, rtol=0
        )
    features = net(batch_norm=False).features(batch().x).mean(0).detach()
    torch.testing.assert_close(with_it["weights"][MEAN], MU * features)
    torch.testing.assert_close(with_it["weights"][HEAD], without["weights"][HEAD])
