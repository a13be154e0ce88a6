"""ADCOL with differential privacy: accounting over all rounds, DP-SGD by hand, and what a curious server receives."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from scipy import stats

import rayfed
from helpers.federations import blobs, blueprint, simulate
from rayfed.algorithms.adcol import divergence
from rayfed.algorithms.common.networks import mlp
from rayfed.algorithms.dp_adcol import DPAdcol, LocalDPAdcol
from rayfed.channel.accounting import epsilon_spent, noise_multiplier
from rayfed.channel.mechanisms import laplace_like, to_half_l1_ball, to_unit_range, train_privately
from rayfed.core.network import weights_of
from rayfed.core.optim import SGD
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.run_summary import run_summary

N = 120  # representations of all four clients


def small(**options):
    return DPAdcol(**({"hidden": [16], "server_batch_size": 30} | options))


def local(**options):
    return LocalDPAdcol(**({"hidden": [16], "server_batch_size": 30} | options))


# The mechanisms


def test_laplace_noise_has_its_distribution():
    torch.manual_seed(0)
    noise = laplace_like(torch.zeros(20_000), 3.0)
    assert noise.dtype == torch.float32
    assert stats.kstest(noise.numpy(), stats.laplace(scale=3.0).cdf).pvalue > 0.01


def test_normalisations():
    z = torch.tensor([[1.0, 3.0, 2.0], [-4.0, 0.0, 4.0], [5.0, 5.0, 5.0]])
    assert to_unit_range(z).tolist() == [[0, 1, 0.5], [0, 0.5, 1], [0, 0, 0]]
    halved = to_half_l1_ball(to_unit_range(z))
    torch.testing.assert_close(halved.abs().sum(1), torch.tensor([0.5, 0.5, 0.0]))
    pairs = (halved[:, None] - halved[None]).abs().sum(2)
    assert pairs.max() <= 1 + 1e-6


def test_dp_sgd_clips_each_example_and_divides_by_the_expected_batch():
    torch.manual_seed(0)
    z, y, clip = 3 * torch.randn(12, 4), torch.randint(3, (12,)), 0.3
    module = mlp([4, 5, 3])
    start = weights_of(module)
    how = {"optimizer": SGD(lr=0.5), "rate": 1.0, "steps": 1, "clip": clip}
    found = train_privately(mlp([4, 5, 3]), start, z, y, sigma=0.0, **how)
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    clipped = 0
    for row, label in zip(z, y, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(module(row[None]), label[None]), list(module.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        clipped += int(norm > clip)
        for name, grad in zip(start, grads, strict=True):
            total[name] += grad * min(1.0, clip / norm.item())
    assert clipped
    for name, value in start.items():
        torch.testing.assert_close(found[name], value - 0.5 * total[name] / 12, rtol=1e-4, atol=1e-5)
    assert torch.equal(weights_of(module)["0.weight"], start["0.weight"])


def test_dp_sgd_adds_noise_of_sigma_times_the_bound():
    torch.manual_seed(0)
    start = weights_of(mlp([50, 40]))
    x, y = torch.zeros(20, 50), torch.zeros(20, dtype=torch.long)  # no gradient reaches the weights
    how = {"optimizer": SGD(lr=1.0), "rate": 0.5, "steps": 1, "clip": 0.2}
    found = train_privately(mlp([50, 40]), start, x, y, sigma=4.0, **how)
    noise = (found["0.weight"] - start["0.weight"]) * 10  # the expected size of a batch
    assert noise.std().item() == pytest.approx(4.0 * 0.2, rel=0.05)


def test_the_noise_is_the_least_that_keeps_to_the_budget():
    sigma = noise_multiplier(5.0, 0.01, rate=0.1, steps=200)
    assert 4.9 < epsilon_spent(sigma, 0.01, rate=0.1, steps=200) <= 5.0
    assert epsilon_spent(sigma, 0.01, rate=0.1, steps=100) < 4.9
    assert epsilon_spent(sigma, 0.01, rate=0.1, steps=0) == 0


def test_what_is_spent_is_between_the_exact_epsilon_and_a_bound_by_hand():
    """Without sampling, steps of the Gaussian mechanism make one of μ = √T/σ, of which δ(ε) is known exactly."""

    def exact(e, mu):
        return stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)

    for sigma, delta, steps in ((6.37, 0.01, 100), (2.0, 1e-5, 1), (50.0, 1e-5, 20)):
        found = epsilon_spent(sigma, delta, rate=1.0, steps=steps)
        mu = math.sqrt(steps) / sigma
        assert exact(found, mu) <= delta < exact(0.8 * found, mu)
    # With it: Mironov et al. 2019, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", section 3.3
    for sigma, q, delta, steps in ((1.14, 0.1, 0.01, 200), (2.0, 0.05, 1e-5, 500)):
        bounds = []
        for a in range(2, 64):
            k = np.arange(a + 1)
            logs = np.log([math.comb(a, int(i)) for i in k]) + (a - k) * np.log(1 - q) + k * np.log(q)
            rdp = np.logaddexp.reduce(logs + (k * k - k) / 2 / sigma**2) / (a - 1)
            bounds.append(steps * rdp - math.log(delta * a) / (a - 1) + math.log((a - 1) / a))
        assert 0.9 * min(bounds) < epsilon_spent(sigma, delta, rate=q, steps=steps) <= min(bounds) + 1e-9


# Trusted server


def test_the_budget_lasts_for_all_rounds_and_is_spent_step_by_step():
    people, algorithm = blobs(), small(epsilon=4.0, server_epochs=2)
    server, records = simulate(blueprint(algorithm, people, rounds=3), people)
    private = {name: float(value) for name, value in server.state["accounting"].items()}
    assert private["rate"] == pytest.approx(30 / N)
    assert private["steps"] == 3 * 2 * 4
    for done, record in enumerate(records, 1):
        accountant = RDPAccountant()
        for _ in range(8 * done):
            accountant.step(noise_multiplier=private["sigma"], sample_rate=30 / N)
        assert record.epsilon == pytest.approx(accountant.get_epsilon(0.01), rel=1e-6)
    assert records[0].epsilon < records[1].epsilon < records[2].epsilon <= 4.0
    assert records[2].epsilon > 3.9


@pytest.mark.usefixtures("few_orders")
def test_a_larger_round_keeps_rate_and_steps():
    people, algorithm = blobs(), small()
    ctx = blueprint(algorithm, people, rounds=4).context(people, "cpu").at(cohort=(0, 1))
    torch.manual_seed(0)
    state = algorithm.init(ctx)
    for n in (60, 90):
        state |= algorithm.train_discriminator(
            ctx, state, state["discriminator"], torch.randn(n, 8), torch.randint(4, (n,))
        )
    assert float(state["accounting"]["rate"]) == 0.5
    assert float(state["accounting"]["steps"]) == 4


# Curious server


@pytest.mark.parametrize("guarantee", ["coordinate", "strict"])
def test_uploads_are_normalised_and_noisy(guarantee):
    people, algorithm = blobs(), local(epsilon=2.0, guarantee=guarantee)
    server, _ = simulate(blueprint(algorithm, people, rounds=1), people)
    parts = server.fleet.host.data.parts
    client = server.fleet.states[3]
    ctx = server.ctx.at(client=3, examples=41, round=2)
    down = algorithm.broadcast(ctx, server.state)
    work = algorithm.start(ctx, client, down)
    torch.manual_seed(0)
    sent = [
        algorithm.finish(ctx, work, client, down, type(ctx.data)(parts(3)["train"], None))[1]["representations"]
        for _ in range(50)
    ]
    z = ctx.task.represent(work["weights"], torch.from_numpy(people.clients[3].train.x))[client["order"]]
    clean = to_unit_range(z) if guarantee == "coordinate" else to_half_l1_ball(to_unit_range(z))
    noise = (torch.stack(sent) - clean).flatten()
    assert stats.kstest(noise.numpy(), stats.laplace(scale=0.5).cdf).pvalue > 0.001


def test_the_local_divergence_sees_the_same_normalisation_without_noise():
    people, algorithm = blobs(), local(mu=0.7)
    ctx = blueprint(algorithm, people).context(people, "cpu")
    discriminator = mlp([8, 16, 4])
    down = {"weights": {}, "discriminator": weights_of(discriminator)}
    from rayfed.core.task import Batch

    batch = Batch(torch.from_numpy(people.clients[0].train.x), torch.from_numpy(people.clients[0].train.y))
    client = algorithm.join(ctx.at(client=0, examples=20))
    work = algorithm.start(ctx, client, down)
    z = ctx.task.forward(work["weights"], batch.x).features
    expected = divergence(discriminator(to_unit_range(z)))
    _, metrics = algorithm.step(ctx, {**work, "weights": dict(work["weights"])}, down, batch)
    assert metrics["divergence"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_records_are_drawn_without_replacement_across_rounds():
    algorithm = local(sampling=0.4)
    people = blobs()
    ctx = blueprint(algorithm, people).context(people, "cpu").at(client=0, examples=10)
    torch.manual_seed(0)
    client, drawn = algorithm.join(ctx), []
    for _ in range(5):
        client, rows = algorithm.select_records(ctx, client, 10)
        drawn += rows.tolist()
    assert len(drawn) == 20
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sampling": 0.5, "guarantee": "strict"}, [2, 2, 4, 4]),
        ({"sampling": 0.25, "guarantee": "strict"}, [2, 2, 2, 2]),
        ({"sampling": 1.0, "guarantee": "strict"}, [2, 4, 6, 8]),
        ({"sampling": 0.5}, [2, 2, 4, 4]),
    ],
)
def test_privacy_spent_counts_passes_and_names_the_unit(options, expected):
    people = blobs(sizes=(20, 24, 32, 40))
    _, records = simulate(blueprint(local(epsilon=2.0, **options), people, rounds=4), people)
    assert [record.epsilon for record in records] == pytest.approx(expected)
    unit = "representation" if "guarantee" in options else "rescaled coordinate"
    assert {record.privacy_unit for record in records} == {unit}


# Notes, records and refusals


@pytest.mark.usefixtures("few_orders")
def test_the_rounds_table_and_the_summary_have_epsilon(tmp_path):
    rng = np.random.default_rng(0)
    clients = [
        {part: (rng.normal(size=(20, 6)).astype(np.float32), rng.integers(0, 2, 20)) for part in ("train", "test")}
        for _ in range(2)
    ]
    settings = {"model": {"name": "mlp", "hidden": [8]}, "rounds": 2, "results": str(tmp_path)}
    options = {"name": "dp_adcol", "hidden": [8], "epsilon": 3, "server_batch_size": 20}
    private = {f"algorithm.{key}": value for key, value in options.items()}
    result = rayfed.run(settings | private, clients=clients)
    assert result.rounds.epsilon.is_monotonic_increasing
    assert 2.9 < result.rounds.epsilon.iloc[-1] <= 3
    assert set(result.rounds.privacy_unit) == {"representation"}

    plan = make_plan(Config.read(settings | private), Given(clients=clients))
    assert "note  ε=3 at δ=0.01 protects what the server sends; uploads are not protected" in run_summary(plan)
