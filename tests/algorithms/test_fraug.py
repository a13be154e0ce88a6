"""FRAug: its parts, one local step by hand, what is sent and kept, and its switches."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

from helpers.comparison import equal
from helpers.federations import blobs, blueprint, net, simulate
from helpers.reference import batch
from rayfed.algorithm import Phase
from rayfed.algorithms.fraug import FRAug, Generator, RTNet, cycled_classes, entropy, mmd
from rayfed.core.network import weights_of
from rayfed.core.optim import SGD
from rayfed.core.trees import clone, nbytes
from rayfed.metrics.cost import cost
from rayfed.models.base import build_model

LR, LATENT = 0.05, 4


def small(**options):
    return FRAug(**({"latent": LATENT} | options))


def run(algorithm, **changes):
    return simulate(blueprint(algorithm, blobs(), **changes), blobs())


def client_at_work(algorithm, *, rounds=200, round=150, model=None):
    """(context, down, work) of a client after one earlier step, so that nothing is at its first value."""
    plan = blueprint(algorithm, blobs(), rounds=rounds, model=model, optimizer=SGD(lr=LR, momentum=0.5))
    ctx = plan.context(blobs(), "cpu").at(stage="round", round=round, client=0, examples=20)
    torch.manual_seed(1)
    client, down = algorithm.join(ctx), algorithm.broadcast(ctx, algorithm.init(ctx))
    work = clone(algorithm.start(ctx, client, down))
    work, _ = algorithm.step(ctx, work, down, batch(seed=7))
    return ctx, down, work


# Parts


def test_mmd_vectors():
    for distance in (1.0, 100.0, 1e-3):
        assert mmd(torch.tensor([[0.0]]), torch.tensor([[distance]])).item() == pytest.approx(6.18628, abs=1e-4)
    square = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1]])
    assert mmd(square[:2], square[2:]).item() == pytest.approx(3.56495, abs=1e-4)
    assert mmd(square, square).item() == pytest.approx(0, abs=1e-5)
    assert mmd(torch.ones(3, 2), torch.ones(4, 2)).item() == pytest.approx(0, abs=1e-5)  # and no 0/0


def test_entropy_is_positive_and_in_nats():
    assert entropy(torch.tensor([[2.0, 0.0, -1.0]])).item() == pytest.approx(0.52427, abs=1e-5)
    assert entropy(torch.zeros(2, 4)).item() == pytest.approx(math.log(4))


def test_classes_go_round_and_leave_out_unseen_ones():
    everything = torch.ones(5, dtype=torch.bool)
    for position in (0, 4, 13):
        assert cycled_classes(everything, torch.tensor(position), 7).tolist() == [(position + j) % 5 for j in range(7)]
    some = torch.tensor([False, True, False, True, True])
    assert cycled_classes(some, torch.tensor(2), 5).tolist() == [4, 1, 3, 4, 1]


def test_noise_of_the_authors_code_is_uniform():
    ctx = blueprint(small(), blobs()).context(blobs(), "cpu")
    torch.manual_seed(0)
    drawn = small(noise="uniform").draw_noise(ctx, 500, 8).flatten()
    assert stats.kstest(drawn.numpy(), stats.uniform.cdf).pvalue > 0.01


def test_networks_have_the_papers_sizes():
    sizes = [sum(p.numel() for p in kind(256, 512, 10).parameters()) for kind in (Generator, RTNet)]
    assert sizes == [401408, 267008]
    sizes = [sum(p.numel() for p in kind(256, 512, 0, False).parameters()) for kind in (Generator, RTNet)]
    assert sizes == [394240, 262912]  # 0.39 M and 0.26 M, table 4


@pytest.mark.parametrize(
    ("name", "options", "shape", "classes", "millions", "billions"),
    [("resnet18", {}, (3, 224, 224), 7, 11.18, 1.81), ("digits_cnn", {"pool": 3}, (3, 32, 32), 10, 18.15, 0.06)],
)
def test_models_have_the_sizes_of_table_4(name, options, shape, classes, millions, billions):
    """The parameters are the paper's; it has 1.84 and 0.08 billion multiply-accumulates."""
    found = cost(build_model(name, options, shape, classes), shape)
    assert round(found.parameters / 1e6, 2) == millions
    assert round(found.macs / 1e9, 2) == billions


def test_losses_and_the_rate_of_the_prototypes_as_printed_by_hand():
    """The mean of the batch, 2, and a term for each of the two classes that were seen, 4 and 5."""
    paper, ctx = small(variant="paper"), blueprint(small(), blobs(), rounds=10).context(blobs(), "cpu")
    sets = [(torch.tensor([1.0, 3.0]),), (torch.tensor([4.0, 5.0, 6.0]),)]
    seen = torch.tensor([True, False, True])
    assert paper.combined(lambda rows: rows.mean(), sets, seen).item() == 2 + 4 + 5
    assert small().combined(lambda rows: rows.mean(), sets, seen).item() == (2 + 5) / 2
    assert paper.prototype_rate(ctx.at(round=10)) == pytest.approx(0.3)
    assert paper.prototype_rate(ctx.at(round=5)) == pytest.approx(0.3 * math.exp(-1.25))
    assert small().prototype_rate(ctx.at(round=5)) == 0.3
    assert [paper.weight(ctx, 7), small(variant="paper", weighting="examples").weight(ctx, 7)] == [1.0, 7.0]


# What is sent and kept


@pytest.mark.parametrize(("options", "affine"), [({}, {"weight", "bias"}), ({"bn_mode": "stats"}, set())])
def test_clients_share_the_model_and_the_generator_but_neither_the_rtnet_nor_batch_norm(options, affine):
    """By default all of the batch norm stays with the clients, as in the paper; else its statistics do."""
    server, records = run(small(**options))
    algorithm, ctx, states = server.algorithm, server.ctx, server.fleet.states
    personal = {f"body.1.{kind}" for kind in {"running_mean", "running_var", "num_batches_tracked"} | affine}
    assert set(server.state) == {"weights", "generator"}
    assert set(server.state["weights"]) == set(net().state_dict()) - personal
    assert set(server.state["generator"]) == set(Generator(LATENT, 8, 3).state_dict())
    assert records[-1].bytes_up == {name: 4 * nbytes(value) for name, value in server.state.items()}
    assert records[-1].bytes_down == records[-1].bytes_up
    a, b = (algorithm.downloaded_model(ctx, states[i], server.state) for i in (0, 1))
    for name in a:
        assert torch.equal(a[name], b[name]) is (name not in personal)
    assert not equal(states[0]["rtnet"], states[1]["rtnet"])
    assert not torch.equal(states[0]["prototypes"], states[1]["prototypes"])
    assert states[0]["seen"].all()


def test_all_of_batch_norm_may_stay_with_the_client_and_the_generators_too():
    server, _ = run(small(generator_bn="local"))
    assert not any(name.startswith("body.1.") for name in server.state["weights"])
    local = {f"layers.{i}.{kind}" for i in (1, 4) for kind in weights_of(nn.BatchNorm1d(1))}
    assert set(server.state["generator"]) == set(Generator(LATENT, 8, 3).state_dict()) - local
    states = server.fleet.states
    assert set(states[0]["generator"]) == local
    assert not equal(states[0]["generator"], states[1]["generator"])
    assert server.algorithm.downloaded_model(server.ctx, states[0], server.state).keys() == net().state_dict().keys()


def test_the_three_optimisers_go_on_from_round_to_round_unless_told_otherwise():
    parts = {"optimizer", "optimizer_generator", "optimizer_rtnet"}
    server, _ = run(small(), optimizer=SGD(lr=LR, momentum=0.5))
    assert parts <= set(server.fleet.states[0])
    state = server.fleet.states[0]
    work = server.algorithm.start(server.ctx, state, server.state)
    assert all(work[part] is state[part] for part in parts)
    server, _ = run(small(), keep_optimizer=False)
    assert not parts & set(server.fleet.states[0])


def test_what_is_switched_off_is_neither_kept_nor_sent():
    server, records = run(small(use_generator=False))
    assert set(server.state) == set(records[-1].bytes_up) == {"weights"}
    assert "generator" not in server.fleet.states[0]
    server, _ = run(small(use_rtnet=False, conditional=False))
    assert "rtnet" not in server.fleet.states[0]
    assert server.state["generator"]["layers.0.weight"].shape == (8, LATENT)


class Quiet(FRAug):
    """Without noise, so that several clients at once can be held against one after the other."""

    def draw_noise(self, ctx, count, width):
        return torch.arange(float(count * width)).sin().view(count, width)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"use_rtnet": False}, {"use_generator": False}, {"distance_g": "prototype_mse", "distance_rt": "mse"}),
        {"variant": "paper", "module_bn": False, "beta": 0.1},
    ],
)
def test_several_clients_at_once_train_as_one_after_the_other(options):
    algorithm = Quiet(latent=LATENT, lr_g=0.01, lr_m=0.01, **options)
    ends = []
    for width in (1, 3):
        server, _ = run(algorithm, vmap_clients=width, local=Phase("train", steps=2))
        ends.append((server.state, server.fleet.states))
    (one, ones), (many, manies) = ends
    torch.testing.assert_close(one, many, atol=1e-3, rtol=1e-2)  # float32: BN and MMD amplify rounding
    for i in ones:
        torch.testing.assert_close(ones[i], manies[i], atol=1e-3, rtol=1e-2)  # float32: BN and MMD amplify rounding


# Plain noise in the networks' place


@pytest.mark.parametrize("augmenter", ["uniform", "laplace", "gaussian"])
def test_plain_noise_has_its_distribution_and_no_networks(augmenter):
    algorithm = small(augmenter=augmenter, noise_scale=0.3)
    ctx, down, work = client_at_work(algorithm)
    torch.manual_seed(0)
    anchors = torch.randn(2000, 8)
    delta = (algorithm.augmented(ctx, work, anchors, torch.zeros(2000, dtype=torch.long)) - anchors).flatten()
    law = {"uniform": stats.uniform(-0.3, 0.6), "laplace": stats.laplace(scale=0.3), "gaussian": stats.norm(scale=0.3)}
    assert stats.kstest(delta.numpy(), law[augmenter].cdf).pvalue > 0.01
    assert set(down) == {"weights"}
    assert not {"generator", "rtnet"} & set(work)
    _, metrics = algorithm.step(ctx.at(optimizer=SGD(lr=LR)), work, down, batch())
    assert set(metrics) == {"loss"}


def test_plain_noise_reaches_the_head_alone():
    algorithm = small(augmenter="gaussian", noise_scale=0.5, interpolate=False)
    ctx, down, work = client_at_work(algorithm)
    ctx = ctx.at(optimizer=SGD(lr=LR))
    grads, _, _ = ctx.task.gradients(work["weights"], batch())
    before = clone(work)
    work, _ = algorithm.step(ctx, work, down, batch())
    for name, grad in grads.items():
        real_alone = before["weights"][name] - LR * 0.5 * grad
        assert torch.allclose(work["weights"][name], real_alone, atol=1e-6) is not name.startswith("fc.")
