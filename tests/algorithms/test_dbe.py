"""DBE: its setup, one step by hand, what is sent and kept, and the bases that it wraps."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.comparison import equal
from helpers.federations import Maps, blobs, blueprint, net, new_server, simulate
from helpers.reference import batch
from rayfed.algorithm import ClientData
from rayfed.algorithms.dbe import BIAS, CONSENSUS, DBE, MEAN
from rayfed.algorithms.ditto import Ditto
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedproto import FedProto
from rayfed.algorithms.mixup import Mixup
from rayfed.algorithms.personal_heads import FedBABU, FedRep
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.errors import UsageError
from rayfed.core.optim import SGD
from rayfed.core.trees import clone
from rayfed.experiments.checks import check_trial

LR = 0.05


def stepwise(algorithm, population=None, **changes):
    """The server, and its rounds one after the other."""
    population = population or blobs()
    plan = blueprint(algorithm, population, **changes)
    check_trial(plan, population)
    server = new_server(plan, population, points=(algorithm.traits.default_eval_point,))
    return server, server.run()


def client_at_work(algorithm, *, bias=0.3, consensus=0.2, **changes):
    """(context, client, down, work) of a client in round 1 whose bias and consensus are constants."""
    population = blobs()
    plan = blueprint(algorithm, population, **({"optimizer": SGD(lr=LR)} | changes))
    ctx = plan.context(population, "cpu").at(stage="round", round=1, client=0, examples=20)
    client = algorithm.join(ctx)
    values = {BIAS: bias, CONSENSUS: consensus}
    filled = {name: torch.full_like(value, values.get(name, 9.0)) for name, value in client["weights"].items()}
    client = client | {"weights": filled}
    down = algorithm.broadcast(ctx, algorithm.init(ctx))
    return ctx, client, down, clone(algorithm.start(ctx, client, down))


def by_hand(bias, consensus, mean, data, *, kappa, mu, model=None):
    """(gradients by name, the bias's, the next running mean, features) with plain autograd on the original model."""
    model = copy.deepcopy(model or net(batch_norm=False)).train()
    z_p = torch.full((8,), bias, requires_grad=True)
    features = model.features(data.x)
    m = (1 - mu) * mean + mu * features.mean(0)
    loss = F.cross_entropy(model.head(features + z_p), data.y) + kappa * 0.5 * F.mse_loss(
        m, torch.full((8,), consensus)
    )
    named = dict(model.named_parameters())
    *grads, bias_grad = torch.autograd.grad(loss, [*named.values(), z_p])
    return dict(zip(named, grads, strict=True)), bias_grad, m.detach(), loss.detach()


@pytest.mark.parametrize("base", [FedAvg(), Scaffold(), Ditto()])
def test_the_setup_leaves_the_weights_and_the_bases_state_as_they_were(base):
    server, rounds = stepwise(DBE(base=base), optimizer=SGD(lr=LR, momentum=0.5), keep_optimizer=True)
    before = base.init(server.ctx)
    assert next(rounds).stage == "setup"
    assert equal(server.state["weights"], before["weights"])
    assert not server.state["consensus"].eq(0).all()
    for i, state in server.fleet.states.items():
        fresh = base.join(server.ctx.at(client=i))
        assert state.keys() == fresh.keys()
        assert torch.equal(state["weights"][CONSENSUS], server.state["consensus"])
        assert torch.equal(state["weights"][BIAS], torch.zeros(8))
        assert "c" not in state or equal(state["c"], fresh["c"])
    next(rounds)
    assert not equal(server.state["weights"], before["weights"])


def test_what_travels_is_what_fedavg_sends_but_for_one_mean_each_way():
    population = blobs()
    _, plain = simulate(blueprint(FedAvg(), population, cohort=2), population)
    server, records = simulate(blueprint(DBE(), population, cohort=2), population)
    setup, *rounds = records
    once = 4 * 8 * 4  # of every client, whether it takes part in the first round or not
    assert setup.bytes_up == {"mean": once}
    assert setup.bytes_down == {"weights": 2 * plain[0].bytes_down["weights"], "consensus": once}
    for ours, theirs in zip(rounds, plain, strict=True):
        assert ours.bytes_up == theirs.bytes_up
        assert ours.bytes_down == theirs.bytes_down
    assert set(server.state["weights"]) == set(net().state_dict())


class Data:
    def __init__(self, *batches):
        self.parts = batches

    def batches(self, size, rows=None):
        return iter(self.parts)


def test_the_mean_sent_may_be_that_of_all_data_and_noisy():
    algorithm = DBE(init_mean="full", noise_scale=0.5, noise_mix=0.2)
    ctx, client, down, work = client_at_work(algorithm)
    data = ClientData(Data(batch(7), batch(4, seed=1)), None)
    torch.manual_seed(3)
    _, up = algorithm.setup_exchanges[0].finish(ctx.at(stage="setup"), work, client, down, data)
    x = torch.cat([batch(7).x, batch(4, seed=1).x])
    mean = net().eval().features(x).mean(0).detach()
    torch.manual_seed(3)
    torch.testing.assert_close(up["mean"], 0.8 * mean + 0.5 * torch.randn(8))


def test_scaffold_corrects_the_weights_and_never_the_bias():
    algorithm = DBE(base=Scaffold(), kappa=50.0, mu=1.0)
    ctx, client, down, _ = client_at_work(algorithm, model=net(batch_norm=False))
    assert BIAS not in client["c"]
    down = down | {"c": {name: torch.full_like(value, 0.7) for name, value in down["c"].items()}}
    work = clone(algorithm.start(ctx, client, down))
    grads, bias_grad, _, _ = by_hand(0.3, 0.2, torch.zeros(8), batch(), kappa=50.0, mu=1.0)
    work, _ = algorithm.step(ctx, work, down, batch())
    for name, grad in grads.items():
        torch.testing.assert_close(work["weights"][name], down["weights"][name] - LR * (grad + 0.7))
    torch.testing.assert_close(work["weights"][BIAS], 0.3 - LR * bias_grad)
    kept, up = algorithm.finish(ctx, work, client, down, ClientData(None, None))
    torch.testing.assert_close(kept["c"]["fc.weight"], grads["fc.weight"], atol=1e-5, rtol=1e-4)
    assert BIAS not in up["delta"]
    assert not {BIAS, MEAN, CONSENSUS} & set(up["buffers"])


def test_what_is_scored():
    assert DBE().traits.default_eval_point == "downloaded"
    assert DBE(kappa=0.0).traits.default_eval_point == "downloaded"
    assert DBE(prbm=False).traits.default_eval_point == "global"
    assert DBE(base=FedRep(), prbm=False).traits.default_eval_point == "downloaded"
    _, records = simulate(blueprint(DBE(prbm=False), blobs()), blobs())
    assert {score.point for score in records[-1].scores} == {"global", "trained"}  # `trained`: the training loss
    _, records = simulate(blueprint(DBE(), blobs(), rounds=1), blobs(), points=("global", "downloaded"))
    by_point = {(s.point, s.client, s.split): s.value for s in records[-1].scores if s.metric == "loss"}
    assert by_point["global", 0, "test"] != by_point["downloaded", 0, "test"]  # without and with the bias


@pytest.mark.parametrize("width", [1, 2])
def test_features_may_be_maps(width):
    torch.manual_seed(0)
    model = Maps()
    server, _ = simulate(blueprint(DBE(kappa=1.0, mu=0.1), blobs(), model=model, vmap_clients=width), blobs())
    assert set(server.state["weights"]) == set(model.state_dict())

    for weights in (state["weights"] for state in server.fleet.states.values()):
        assert weights[BIAS].shape == weights[CONSENSUS].shape == (2, 4)
        assert weights[BIAS].abs().sum() > 0


@pytest.mark.parametrize("inner", [{}, {"prbm": False}, {"mr": False}])
def test_one_inside_another_is_refused_wherever_it_is(inner):
    for base in (DBE(**inner), Mixup(base=DBE(**inner))):
        with pytest.raises(UsageError, match=r"^algorithm.base=dbe: DBE cannot wrap another DBE"):
            check_trial(blueprint(DBE(base=base), blobs()), blobs())
    check_trial(blueprint(Mixup(base=DBE(**inner)), blobs()), blobs())


@pytest.mark.parametrize("key", ["noise_scale", "noise_mix"])
@pytest.mark.parametrize(("off", "words"), [({"mr": False}, "mr=false"), ({"kappa": 0.0}, "kappa=0")])
def test_noise_on_means_that_nobody_sends_is_refused(key, off, words):
    with pytest.raises(UsageError, match=rf"^algorithm.{key}=0.05: .* with algorithm.{words} no client sends one; use"):
        check_trial(blueprint(DBE(**{key: 0.05}, **off), blobs()), blobs())
    check_trial(blueprint(DBE(**{key: 0.05}), blobs()), blobs())


@pytest.mark.parametrize("base", [FedBABU(), FedProto(share_model=True)])
def test_a_bias_that_would_not_be_trained_or_not_be_used_is_refused(base):
    for wrapped in (base, Mixup(base=base)) if isinstance(base, FedBABU) else (base,):
        with pytest.raises(UsageError, match=rf"^algorithm.base={base.name}: .* use algorithm.prbm=false, MR alone$"):
            check_trial(blueprint(DBE(base=wrapped), blobs()), blobs())
    check_trial(blueprint(DBE(base=base, prbm=False), blobs()), blobs())
