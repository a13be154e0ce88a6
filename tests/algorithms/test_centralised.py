"""The centralised twins against plain central loops with torch.optim on one model."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import blobs, blueprint, net
from helpers.reference import CLIENTS, assert_weights, data, population, run
from rayfed.algorithms.centralised import ERM, IRM, CentralGroupDRO, MMREx, VREx
from rayfed.core.errors import UsageError
from rayfed.core.ids import Moment
from rayfed.core.optim import SGD, Adam
from rayfed.core.rng import generator
from rayfed.experiments.checks import check_trial

STEPS = 6


class Rules:
    """Losses [n] of the domains and the step's number (from 1) to the value that is minimised."""

    q = torch.ones(3, dtype=torch.float64)

    @staticmethod
    def erm(f, step):
        return f.mean()

    def group_dro(self, f, step):
        self.q = self.q * torch.exp(0.3 * f.detach())
        self.q = self.q / self.q.sum()
        return (self.q * f).sum()

    @staticmethod
    def mm_rex(f, step):
        return (1 + 3 * 0.5) * f.max() - 0.5 * f.sum()

    @staticmethod
    def v_rex(f, step):
        return f.mean() + (0.2 if step <= 2 else 1.5) * (f - f.mean()).square().mean()


def central(model, people, rule, make, *, renew=None, penalty=None, size=None):
    """Training of one model, a batch of every domain in a step."""
    model = copy.deepcopy(model).train()
    optimizer = make(model.parameters())
    for step in range(1, STEPS + 1):
        if step == renew:
            optimizer = make(model.parameters())
        losses = []
        for i in CLIENTS:
            x, y = data(people, i)
            if size:
                rng = generator(0, "batches", Moment("round", step), phase=0, client=i)
                rows = torch.from_numpy(rng.permutation(len(x))[:size])
                x, y = x[rows], y[rows]
            features = model.features(x)
            logits = model.head(features)
            loss = F.cross_entropy(logits, y)
            losses.append(penalty(loss, features, logits, y, step) if penalty else loss)
        optimizer.zero_grad()
        rule(torch.stack(losses).double(), step).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("algorithm", "rule", "renew"),
    [
        (ERM(), Rules.erm, None),
        (CentralGroupDRO(q_lr=0.3), "group_dro", None),
        (MMREx(lambda_min=-0.5), Rules.mm_rex, None),
        (VREx(beta=1.5, beta_start=0.2, anneal=2), Rules.v_rex, 3),
    ],
    ids=["erm", "group_dro", "mm_rex", "v_rex"],
)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("width", [1, 3])
def test_rounds_are_central_steps(algorithm, rule, renew, optimizer, width):
    people, model = population(), net(batch_norm=False)
    ours = Adam(lr=0.01) if optimizer == "adam" else SGD(lr=0.1, momentum=0.9)
    server = run(
        algorithm, people, model, optimizer=ours, rounds=STEPS, batch_size=6, drop_last=True, vmap_clients=width
    )

    def make(parameters):
        if optimizer == "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    rule = getattr(Rules(), rule) if isinstance(rule, str) else rule
    by_hand = central(model, people, rule, make, renew=renew, size=6)
    assert_weights(server.state["weights"], by_hand, atol=2e-5)
    assert not torch.allclose(server.state["weights"]["fc.weight"], model.fc.weight, atol=1e-2)


@pytest.mark.parametrize("kind", ["scale", "weights"])
def test_irm(kind):
    people, model = population(), net(batch_norm=False)
    algorithm = IRM(beta=9.0, beta_start=0.5, anneal=2, penalty=kind)
    server = run(algorithm, people, model, optimizer=Adam(lr=0.01), rounds=STEPS)

    def penalty(loss, features, logits, y, step):
        beta = 0.5 if step <= 2 else 9.0
        probabilities = logits.softmax(1)
        if kind == "scale":
            gradient = ((probabilities * logits).sum(1) - logits.gather(1, y[:, None])[:, 0]).mean()
        else:
            gradient = (probabilities - F.one_hot(y, 3)).T @ features / len(y)
        return (loss + beta * gradient.square().sum()) / max(beta, 1)

    def make(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    by_hand = central(model, people, Rules.erm, make, renew=3, penalty=penalty)
    assert_weights(server.state["weights"], by_hand, atol=2e-5)


@pytest.mark.parametrize("algorithm", [MMREx(), VREx()])
def test_what_is_advised_for_negative_weights_is_not_refused_in_its_turn(algorithm):
    """Neither averaged nor local statistics will do, so that both messages name the one policy that does."""
    for policy in ("aggregate", "local_statistics", "local"):
        with pytest.raises(UsageError, match=rf"^batch_norm={policy}: .*; use batch_norm=frozen(, or a model .*)?$"):
            check_trial(blueprint(algorithm, blobs(), batch_norm=policy), blobs())
    check_trial(blueprint(algorithm, blobs(), batch_norm="frozen"), blobs())
    check_trial(blueprint(algorithm, blobs(), model=net(batch_norm=False)), blobs())
