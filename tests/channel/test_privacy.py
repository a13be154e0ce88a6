"""Privacy of clients: accounting beside other libraries and papers, the noise, clipping, and adaptive bounds."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from scipy import stats
from scipy.optimize import brentq

from helpers.federations import Point, blobs, blueprint, net, new_server, quadratic, quadratics, simulate
from helpers.nine_updates import NINE
from rayfed.algorithms.common.channelled import Channelled
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.scaffold import Scaffold
from rayfed.channel.accounting import epsilon_spent, noise_multiplier
from rayfed.channel.attacks import Ipm
from rayfed.channel.channel import Channel
from rayfed.channel.privacy import ADDED, REPLACED, Composition, Gaussian, Laplace
from rayfed.channel.robust import CentredClipping, Krum, Mean
from rayfed.channel.updates import clipped
from rayfed.core.errors import UsageError
from rayfed.core.optim import SGD
from rayfed.sampling.base import Poisson, WithoutReplacement

PLAIN = net(batch_norm=False)


def channelled(method=None, **parts):
    return Channelled(base=method or FedAvg(weighting="equal"), channel=Channel(**parts))


def flat(weights):
    return torch.cat([value.flatten() for value in weights.values() if value.is_floating_point()])


# Accounting


@pytest.mark.parametrize(("rate", "steps", "sigma", "delta"), [(0.1, 100, 1.0, 1e-5), (1.0, 10, 5.0, 1e-5)])
def test_epsilon_is_that_of_opacus(rate, steps, sigma, delta):
    for kind, name in ((RDPAccountant, "rdp"), (PRVAccountant, "prv")):
        theirs = kind()
        theirs.history = [(sigma, rate, steps)]
        ours = epsilon_spent(sigma, delta, rate=rate, steps=steps, accountant=name)
        assert ours == pytest.approx(theirs.get_epsilon(delta), rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "steps", "sigma", "delta", "rdp", "prv"),
    [
        (0.1, 100, 1.0, 1e-5, 7.90385, 7.04732),
        (0.01, 1000, 0.8, 1e-6, 4.29346, 3.70629),
        (1.0, 10, 5.0, 1e-5, 2.81365, 2.59449),
        (0.5, 20, 3.0, 1e-3, 2.68265, 2.33386),
    ],
)
def test_epsilon_beside_pfl(rate, steps, sigma, delta, rdp, prv):
    """ε by the accountants of pfl 0.6.0, which are those of dp-accounting and of Gopi et al."""
    assert epsilon_spent(sigma, delta, rate=rate, steps=steps) == pytest.approx(rdp, rel=2e-3)
    # opacus adds its bound of the error, 0.01
    assert epsilon_spent(sigma, delta, rate=rate, steps=steps, accountant="prv") == pytest.approx(prv, abs=0.012)


TABLE = {  # McMahan et al. 2018, table 1: users, expected sample, then ε after 1, 10, … 10⁶ rounds with z = 1
    (1e5, 1e2): [0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50],
    (1e6, 1e3): [1.17, 1.17, 1.20, 1.28, 1.39, 2.44, 8.13],
    (1e6, 1e4): [1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01],
    (1e7, 1e4): [1.36, 1.37, 1.39, 1.49, 1.60, 2.67, 8.76],
}


@pytest.mark.parametrize("users", TABLE, ids=str)
def test_epsilon_beside_the_table_of_dp_fedavg(users):
    """The paper turns moments of order λ ≤ 32 into ε by log(1/δ)/λ; today's conversion is tighter."""
    clients, sample = users
    delta, rate, orders = clients**-1.1, sample / clients, list(range(2, 34))
    per_round = np.array(compute_rdp(q=rate, noise_multiplier=1.0, steps=1, orders=orders))
    for place, published in enumerate(TABLE[users]):
        rounds = 10**place
        theirs = min(per_round * rounds + math.log(1 / delta) / (np.array(orders) - 1))
        assert theirs == pytest.approx(published, abs=0.006)
        assert epsilon_spent(1.0, delta, rate=rate, steps=rounds) < published


def exact_epsilon(sigma, delta, steps):
    """Return ε of `steps` Gaussian mechanisms together (Balle and Wang 2018)."""
    mu, cdf = math.sqrt(steps) / sigma, stats.norm.cdf
    return brentq(lambda e: cdf(mu / 2 - e / mu) - math.exp(e) * cdf(-mu / 2 - e / mu) - delta, 0, 300)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_sigma_is_the_least_that_gives_epsilon(accountant):
    privacy = Gaussian(epsilon=3.0, delta=1e-4, accountant=accountant)
    sigma = privacy.multiplier(Composition(1.0, 20))
    assert 0.995 * 3 < privacy.spent(sigma, Composition(1.0, 20)) <= 3
    assert exact_epsilon(sigma, 1e-4, 20) <= 3
    sampled = privacy.multiplier(Composition(0.1, 20))
    assert sampled < sigma / 2
    tighter = noise_multiplier(3.0, 1e-4, rate=1.0, steps=20, accountant="prv")
    assert tighter <= noise_multiplier(3.0, 1e-4, rate=1.0, steps=20)


@pytest.mark.parametrize(
    ("parts", "cohort", "steps", "rate", "neighbours"),
    [
        ({}, 2, [1, 2, 3, 4], 1.0, REPLACED),
        ({"sampling": "without_replacement"}, 2, [1, 1, 2, 2], 1.0, REPLACED),
        ({"sampling": "poisson", "cohort": 2}, 2, [1, 2, 3, 4], 0.5, ADDED),
        ({"exchanges": 2}, 4, [2, 4, 6, 8], 1.0, REPLACED),
    ],
)
def test_epsilon_of_a_round_counts_what_used_a_clients_data_until_then(parts, cohort, steps, rate, neighbours):
    people = blobs()
    privacy = Gaussian(sigma=2.0, delta=1e-2)
    sampler = {"poisson": Poisson(), "without_replacement": WithoutReplacement()}.get(parts.get("sampling"))
    how = {"cohort": cohort, "rounds": 4, "model": PLAIN} | ({"sampler": sampler} if sampler else {})
    _, records = simulate(blueprint(channelled(privacy=privacy, **parts), people, **how), people)
    expected = [epsilon_spent(2.0, 1e-2, rate=rate, steps=number) for number in steps]
    assert [record.epsilon for record in records] == pytest.approx(expected)
    said = {(r.privacy_unit, r.delta, r.accountant, r.neighbours) for r in records}
    assert said == {("client", 1e-2, "rdp", neighbours)}


def test_laplace_noise_splits_epsilon_over_the_rounds():
    people = blobs()
    method = channelled(privacy=Laplace(epsilon=6.0))
    _, records = simulate(blueprint(method, people, rounds=3, model=PLAIN), people)
    assert [record.epsilon for record in records] == pytest.approx([2, 4, 6])
    assert {record.delta for record in records} == {0.0}


def test_clipping_alone_gives_no_epsilon():
    people = blobs()
    _, records = simulate(blueprint(channelled(privacy=Gaussian(sigma=0.0)), people, model=PLAIN), people)
    assert {record.epsilon for record in records} == {None}


# Noise


def noise_of(parts, people, **how):
    """The difference that noise makes to the server's model after a round, over several seeds, and the model's size."""
    drawn = []
    for seed in range(20):
        plan = blueprint(channelled(**parts), people, model=PLAIN, rounds=1, seed=seed, **how)
        quiet = replace(plan, algorithm=channelled(**without_noise(parts)))
        models = [flat(simulate(one, people)[0].state["weights"]) for one in (plan, quiet)]
        drawn.append(models[0] - models[1])
    return torch.cat(drawn).double().numpy()


def without_noise(parts):
    privacy = parts["privacy"]
    return parts | {"privacy": Gaussian(sigma=0.0, clip=privacy.clip, local=privacy.local)}


@pytest.mark.parametrize(
    ("parts", "how", "std"),
    [
        ({"privacy": Gaussian(sigma=0.7, delta=1e-2, clip=0.4)}, {}, 0.7 * 2 * 0.4 / 4),
        ({"privacy": Gaussian(sigma=0.7, delta=1e-2, clip=0.4)}, {"cohort": 2}, 0.7 * 2 * 0.4 / 2),
        ({"privacy": Gaussian(sigma=0.7, delta=1e-2, clip=0.4, noise_cohort=50)}, {}, 0.7 * 2 * 0.4 / 50),
        ({"privacy": Gaussian(sigma=0.7, delta=1e-2, clip=0.4, local=True)}, {}, 0.7 * 2 * 0.4 / math.sqrt(4)),
        ({"privacy": Gaussian(sigma=0.7, delta=1e-2, clip=0.4), "rule": Krum()}, {}, 0.7 * 2 * 0.4),
        (
            {"privacy": Gaussian(sigma=0.7, delta=1e-2, clip=0.4), "rule": CentredClipping(radius=0.1)},
            {},
            0.7 * 2 * 0.1 / 4,
        ),
        (
            {"privacy": Gaussian(sigma=0.7, delta=1e-2, clip=0.4), "sampling": "poisson", "cohort": 2},
            {"cohort": 2, "sampler": Poisson()},
            0.7 * 0.4 / 2,
        ),
    ],
    ids=["fixed", "cohort", "noise_cohort", "local", "krum", "centred clipping", "poisson"],
)
def test_the_variance_of_the_noise_is_within_its_interval(parts, how, std):
    noise = noise_of(parts, blobs(4, sizes=(20,)), **how)
    n, statistic = len(noise), (noise**2).sum() / std**2
    low, high = stats.chi2.ppf([0.0005, 0.9995], n)
    assert low < statistic < high
    assert stats.kstest(noise / std, "norm").pvalue > 1e-4


def test_every_field_that_is_averaged_gets_noise():
    people = blobs(4, sizes=(20,))
    privacy = Gaussian(sigma=1.0, delta=1e-2, clip=0.3)
    how = {"model": PLAIN, "rounds": 1}
    states = []
    for part in (privacy, Gaussian(sigma=0.0, clip=0.3)):
        states.append(simulate(blueprint(channelled(Scaffold(), privacy=part), people, **how), people)[0].state)
    std = 2 * 0.3 / 4
    for name in ("weights", "c"):
        noise = (flat(states[0][name]) - flat(states[1][name])).double().numpy() / std
        low, high = stats.chi2.ppf([0.0005, 0.9995], len(noise))
        assert low < (noise**2).sum() < high


# Clipping


def test_one_norm_over_all_fields_is_clipped():
    sent = {"a": {"x": torch.tensor([3.0])}, "b": {"y": torch.tensor([4.0]), "n": torch.tensor(2)}}
    base = {"a": {"x": torch.zeros(1)}, "b": {"y": torch.zeros(1), "n": torch.tensor(0)}}
    assert clipped(sent, base, 1.0, 2)["a"]["x"].item() == pytest.approx(0.6)
    assert clipped(sent, base, 3.5, 1)["b"]["y"].item() == pytest.approx(2.0)
    assert clipped(sent, base, 9.0, 2)["b"]["y"].item() == 4.0


def test_clipping_beside_pfl():
    """The mean that pfl 0.6.0 makes of these updates in two arrays, each clipped to a norm of 2."""
    base = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
    sent = [torch.tensor(row, dtype=torch.float64) for row in NINE]
    short = [clipped({"a": row[:3], "b": row[3:]}, base, 2.0, 2) for row in sent]
    mean = torch.stack([torch.cat([one["a"], one["b"]]) for one in short]).mean(0)
    pfl = [-0.20996512267748968, -0.5107385828571283, -0.18782108931335387, -0.06180768241321493]
    np.testing.assert_allclose(mean.numpy(), pfl, atol=1e-7)


def test_clipped_fedavg_ends_where_the_clipped_steps_cancel():
    """Quadratics h/2 (w − a)² and one step of size η: client i moves by clip(η h (a − w)), and far ones by ±C.

    With optima 0, 1 and 100, C = 0.05 and η = 0.1, the server stops where clip(−w) + clip(1 − w) + C = 0 in units of η:
    at w between 0.5 and 1 the first is −C, so that 1 − w = 0 and w = 1.
    """
    people = quadratics((1.0, 0.0), (1.0, 1.0), (1.0, 100.0))
    method = channelled(privacy=Gaussian(sigma=0.0, clip=0.05))
    how = {"model": Point(), "loss": quadratic, "optimizer": SGD(lr=0.1), "batch_size": 1, "rounds": 300}
    server, _ = simulate(blueprint(method, people, **how), people)
    assert server.state["weights"]["w"].item() == pytest.approx(1.0, abs=1e-4)
    plain, _ = simulate(blueprint(FedAvg(weighting="equal"), people, **how), people)
    assert plain.state["weights"]["w"].item() == pytest.approx(101 / 3, abs=1e-2)


def test_integers_are_sent_as_they_were_received():
    people = blobs()
    server, _ = simulate(blueprint(channelled(privacy=Gaussian(sigma=0.0)), people), people)
    assert server.state["weights"]["body.1.num_batches_tracked"] == 0
    server, _ = simulate(blueprint(channelled(Scaffold(), privacy=Gaussian(sigma=0.0)), people), people)
    assert server.state["weights"]["body.1.num_batches_tracked"] == 0


def test_running_statistics_count_as_updates_wherever_they_are_sent():
    """SCAFFOLD sends running means in a field of their own; what was received has them among the weights."""
    people = blobs()
    server, _ = simulate(blueprint(channelled(Scaffold(), privacy=Gaussian(sigma=0.0, clip=1e-6)), people), people)
    initial = server.ctx.task.initial_weights()
    for name, value in server.state["weights"].items():
        torch.testing.assert_close(value.float(), initial[name].float(), atol=1e-5, rtol=0)


def test_noise_keeps_running_variances_at_zero_or_above():
    people = blobs()
    privacy = Gaussian(sigma=5.0, delta=1e-2, clip=10.0)
    server, _ = simulate(blueprint(channelled(privacy=privacy), people, rounds=3), people)
    assert server.state["weights"]["body.1.running_var"].min() == 0


# The adaptive bound


@pytest.mark.parametrize("crafts", [False, True])
def test_the_bound_follows_the_quantile(crafts):
    """Without noise, C ← C exp(−η (b − γ)), with b the share of updates within C, computed from the norms."""
    people = blobs(4, sizes=(20,))
    privacy = Gaussian(sigma=0.0, clip=0.3, quantile=0.5, clip_lr=0.7)
    method = channelled(privacy=privacy, attack=Ipm(share=0.0) if crafts else None)
    bound, start = 0.3, PLAIN.state_dict()
    for rounds in (1, 2, 3):
        plan = blueprint(method, people, model=PLAIN, rounds=rounds)
        lengths = lengths_from(people, plan, start, rounds)
        bound *= math.exp(-0.7 * (np.mean(np.array(lengths) <= bound) - 0.5))
        server, records = simulate(plan, people)
        start = server.state["weights"]
        assert float(server.state["channel"]["0"]["clip"]) == pytest.approx(bound, rel=1e-5)
        up = {"weights": 4 * 4 * 215} | ({} if crafts else {"channel": 4})
        assert records[-1].bytes_up == up  # a byte of each client for its bit
    assert records[-1].bytes_down == {"weights": 4 * 4 * 215} | ({} if crafts else {"channel": 16})


def lengths_from(people, plan, start, number):
    """The norms of the clients' updates from `start` in round `number`, before clipping."""
    lengths = []

    class Seen(FedAvg):
        def finish(self, ctx, work, client, down, data):
            kept, up = super().finish(ctx, work, client, down, data)
            lengths.append(float((flat(up["weights"]) - flat(down["weights"])).norm()))
            return kept, up

    server = new_server(replace(plan, algorithm=Seen(weighting="equal"), rounds=number), people)
    server.state, server.round = {"weights": {name: value.detach() for name, value in start.items()}}, number - 1
    list(server.run())
    return lengths


def test_the_bits_take_their_part_of_the_noise():
    """Andrew et al. 2021, theorem 1: z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2) where clients are added or removed."""
    privacy = Gaussian(sigma=1.2, delta=1e-2, quantile=0.5)
    assert privacy.of_updates(1.2, 5.0, 0.5) == pytest.approx((1.2**-2 - (2 * 5.0) ** -2) ** -0.5)
    assert privacy.noise_on_bits(100) == 5.0
    assert replace(privacy, bits_noise=3.0).noise_on_bits(100) == 3.0
    with pytest.raises(UsageError, match=r"^privacy.bits_noise=0.5: must be more than 0.6 "):
        privacy.of_updates(1.2, 0.5, 0.5)


def test_the_bound_has_noise_on_its_bits():
    people = blobs(4, sizes=(20,))
    privacy = Gaussian(sigma=0.5, delta=1e-2, clip=0.3, quantile=0.5, bits_noise=2.0, clip_lr=1.0)
    bounds = []
    for seed in range(60):
        plan = blueprint(channelled(privacy=privacy), people, model=PLAIN, rounds=1, seed=seed)
        server, _ = simulate(plan, people)
        share = 0.5 - math.log(float(server.state["channel"]["0"]["clip"]) / 0.3)
        bounds.append(share)
    spread = np.std(bounds, ddof=1) / (2.0 / 4)
    assert math.sqrt(stats.chi2.ppf(0.0005, 59) / 59) < spread < 1.3 * math.sqrt(stats.chi2.ppf(0.9995, 59) / 59)


# Poisson sampling


def test_poisson_rounds_divide_by_the_expected_number():
    """Clip alone: the model moves by Σ Δ_i / (qN) over those who were drawn, whoever many they are."""
    people = blobs(6, sizes=(20,))
    how = {"model": PLAIN, "rounds": 1, "cohort": 2, "sampler": Poisson()}
    method = channelled(privacy=Gaussian(sigma=0.0, clip=0.2), sampling="poisson", cohort=2)
    sizes = set()
    for seed in range(8):
        plan = blueprint(method, people, seed=seed, **how)
        server, (record,) = simulate(plan, people)
        start = flat(PLAIN.state_dict())
        moved = flat(server.state["weights"]) - start
        drawn = server.sample(1) if record.sampled else ()
        sizes.add(len(drawn))
        expected = torch.zeros_like(start)
        for client in drawn:
            alone = replace(plan, algorithm=channelled(privacy=Gaussian(sigma=0.0, clip=0.2)), cohort=6)
            expected += update_of(people, alone, client) / 2
        torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-4)
    assert len(sizes) > 2


def update_of(people, plan, client):
    """What a client sends, clipped."""
    sent = {}

    class Seen(FedAvg):
        def finish(self, ctx, work, state, down, data):
            kept, up = super().finish(ctx, work, state, down, data)
            sent[ctx.client] = clipped(up, {"weights": down["weights"]}, 0.2, 2)
            return kept, up

    method = Channelled(base=Seen(weighting="equal"), channel=Channel())
    list(new_server(replace(plan, algorithm=method), people).run())
    return flat(sent[client]["weights"]) - flat(PLAIN.state_dict())


@pytest.mark.parametrize("method", [FedAvg(weighting="equal"), Scaffold()])
def test_a_round_without_clients_changes_nothing_but_by_noise(method):
    people = blobs(4, sizes=(20,))
    how = {"model": PLAIN, "rounds": 1, "cohort": 2, "sampler": Poisson()}
    seed = next(s for s in range(200) if not _draws(people, method, how, s))
    for privacy, moves in ((None, False), (Gaussian(sigma=0.0), False), (Gaussian(sigma=1.0, delta=1e-2), True)):
        algorithm = method
        if privacy is not None:
            algorithm = channelled(method, privacy=privacy, sampling="poisson", cohort=2)
        server, (record,) = simulate(blueprint(algorithm, people, seed=seed, **how), people)
        assert record.sampled == 0
        assert torch.equal(flat(server.state["weights"]), flat(PLAIN.state_dict())) != moves


def _draws(people, method, how, seed):
    server = new_server(blueprint(method, people, seed=seed, **how), people)
    return server.rounds.turn(1).sampled


def test_local_noise_does_not_depend_on_the_cohort():
    privacy = Gaussian(sigma=1.0, delta=1e-2, local=True)
    assert Channel(privacy=privacy, sampling="poisson", cohort=3).neighbours == REPLACED
    assert Channel(privacy=privacy, sampling="poisson", cohort=3).composition(5, 30, 3) == Composition(1.0, 5)
    assert Mean().sensitivity(1.0, 8, 0) == 0.25
