"""DP-FedBN with a trusted server: clipping, the noise on the mean, and ε by round with all clients or some."""

import math

import pytest
import torch
from scipy import stats
from scipy.optimize import brentq

from helpers.federations import blobs, blueprint, simulate
from rayfed.algorithm import Replies, Reply
from rayfed.algorithms.fedbn import FedBN
from rayfed.algorithms.gaussian_dp_fedbn import GaussianDPFedBN
from rayfed.core.trees import zeros_like


def exact_epsilon(sigma, delta, steps):
    """Return ε of `steps` Gaussian mechanisms together: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), μ = √steps/σ."""
    mu, cdf = math.sqrt(steps) / sigma, stats.norm.cdf
    return brentq(lambda e: cdf(mu / 2 - e / mu) - math.exp(e) * cdf(-mu / 2 - e / mu) - delta, 0, 300)


@pytest.mark.parametrize("clip", [0.5, 1e3])
def test_updates_are_clipped_in_l2_and_sent_without_noise(clip):
    people, algorithm = blobs(), GaussianDPFedBN(clip=clip)
    ctx = blueprint(algorithm, people).context(people, "cpu").at(client=0, cohort=(0, 1, 2, 3), round=1)
    down, client = algorithm.broadcast(ctx, algorithm.init(ctx)), algorithm.join(ctx)
    work = algorithm.start(ctx, client, down)
    work["weights"] = {name: v + 0.1 if v.is_floating_point() else v for name, v in work["weights"].items()}
    sent = algorithm.finish(ctx, work, client, down, None)[1]["weights"]
    assert not any(name.startswith("body.1.") for name in sent)
    count = sum(value.numel() for value in sent.values())
    step = 0.1 * min(1.0, clip / (0.1 * math.sqrt(count)))
    for name, value in sent.items():
        torch.testing.assert_close(value, down["weights"][name] + step)


@pytest.mark.parametrize("weighting", [{}, {"weighting": "examples", "max_examples": 30}])
def test_the_noise_on_the_mean_covers_one_client_of_the_cohort(weighting):
    people, algorithm = blobs(), GaussianDPFedBN(epsilon=3.0, clip=0.7, **weighting)
    ctx = blueprint(algorithm, people, cohort=2, rounds=6).context(people, "cpu").at(cohort=(1, 3), round=1)
    torch.manual_seed(0)
    server = algorithm.init(ctx)
    replies = Replies({"weights": zeros_like(server["weights"])}, [Reply(1, 10, {}), Reply(3, 30, {})])
    server = server | {"weights": zeros_like(server["weights"])}
    drawn = [algorithm.aggregate(ctx, server, replies)["weights"]["body.0.weight"] for _ in range(200)]
    sigma = algorithm.sigma(ctx)  # each client takes part in three rounds of six
    assert exact_epsilon(sigma, 0.01, 3) > 2.4
    assert exact_epsilon(sigma, 0.01, 3) <= 3.0
    std = sigma * 2 * 0.7 / 2
    assert stats.kstest(torch.stack(drawn).flatten().numpy(), stats.norm(scale=std).cdf).pvalue > 0.001


def test_with_an_endless_budget_it_is_fedbn():
    people = blobs()
    pair = (GaussianDPFedBN(epsilon=1e12, clip=1e2), FedBN(weighting="equal"))
    ours, theirs = (simulate(blueprint(a, people), people)[0].state["weights"] for a in pair)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-3)


def test_without_noise_weights_by_examples_have_a_fixed_denominator():
    """Clients of 20, 26, 33 and 41 examples, on average 30, move the model 30/60 as far as in FedBN."""
    people = blobs()
    bounded = GaussianDPFedBN(epsilon=1e12, clip=1e2, weighting="examples", max_examples=60)
    server, _ = simulate(blueprint(bounded, people, rounds=1), people)
    theirs = simulate(blueprint(FedBN(), people, rounds=1), people)[0].state["weights"]
    start = server.ctx.task.initial_weights()
    for name, value in theirs.items():
        expected = start[name] + (value - start[name]) / 2
        torch.testing.assert_close(server.state["weights"][name], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_a_party_replaced_by_one_of_any_size_moves_the_mean_by_what_the_noise_covers(size):
    """Nine clients of 100 examples send the update C·u. The tenth is replaced: 100 examples and C·u, then −C·u."""
    people = blobs()
    algorithm = GaussianDPFedBN(epsilon=1e12, clip=0.5, weighting="examples", max_examples=100)
    ctx = blueprint(algorithm, people, cohort=4).context(people, "cpu").at(cohort=tuple(range(10)), round=1)
    server = {"weights": {"w": torch.zeros(1)}}

    def mean(last_size, last_update):
        sizes, updates = [100] * 9 + [last_size], [0.5] * 9 + [last_update]
        weights = [algorithm.weight(ctx, n) for n in sizes]
        average = sum(w * u for w, u in zip(weights, updates, strict=True)) / sum(weights)
        replies = Replies({"weights": {"w": torch.tensor([average])}}, [Reply(i, n, {}) for i, n in enumerate(sizes)])
        return algorithm.aggregate(ctx, server, replies)["weights"]["w"].item()

    moved = abs(mean(size, -0.5) - mean(100, 0.5))
    assert moved == pytest.approx({1: 0.0505, 100: 0.1, 1000: 0.1}[size], abs=1e-4)  # 2C/m = 0.1


@pytest.mark.parametrize(("cohort", "participations"), [(4, [1, 2, 3, 4]), (2, [1, 1, 2, 2]), (1, [1, 1, 1, 1])])
def test_epsilon_by_round_is_that_of_a_clients_participations(cohort, participations):
    people, algorithm = blobs(), GaussianDPFedBN(epsilon=4.0)
    server, records = simulate(blueprint(algorithm, people, cohort=cohort, rounds=4), people)
    sigma = algorithm.sigma(server.ctx.at(cohort=tuple(range(cohort))))
    for record, times in zip(records, participations, strict=True):
        assert record.privacy_unit == "client"
        assert exact_epsilon(sigma, 0.01, times) <= record.epsilon <= 1.25 * exact_epsilon(sigma, 0.01, times)
    assert 3.98 < records[-1].epsilon <= 4.0


def test_fewer_participations_need_less_noise():
    people, algorithm = blobs(), GaussianDPFedBN()
    ctx = blueprint(algorithm, people, rounds=8).context(people, "cpu")
    sigmas = [algorithm.sigma(ctx.at(cohort=tuple(range(k)))) for k in (1, 2, 4)]
    assert sigmas[1] / sigmas[0] == pytest.approx(math.sqrt(2), rel=0.01)
    assert sigmas[2] / sigmas[0] == pytest.approx(2, rel=0.01)


def test_notes():
    people, algorithm = blobs(), GaussianDPFedBN(epsilon=6.0)
    plan = blueprint(algorithm, people, rounds=10)
    ctx = plan.context(people, "cpu").at(cohort=(0,))
    lines = algorithm.notes(ctx, plan.problem(people, ctx.task))
    assert lines[0] == "ε=6 at δ=0.01 per client protects what the server sends; uploads are not protected"
    assert lines[1].endswith(" times the most that a client can change, for 3 participations")
    assert len(lines) == 3  # 0.01 is below 1/4
    many = blobs(100, sizes=(6,))
    plan = blueprint(algorithm, many)
    ctx = plan.context(many, "cpu").at(cohort=tuple(range(100)))
    lines = algorithm.notes(ctx, plan.problem(many, ctx.task))
    assert lines[2].startswith("δ=0.01 is not below 1/100: publishing one of the 100 clients")
