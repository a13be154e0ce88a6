"""DP-FedBN for a curious and a trusted server: clipping, noise, the split budget, sampling without replacement."""

import math

import pytest
import torch
from scipy import stats
from scipy.optimize import brentq

import rayfed
from helpers.federations import blobs, blueprint, net, new_server, simulate
from rayfed.algorithm import Replies, Reply
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.dp_fedbn import DPFedBN, GaussianDPFedBN
from rayfed.algorithms.fedavg import FedAvg
from rayfed.channel.updates import clipped
from rayfed.core.errors import UsageError
from rayfed.core.trees import zeros_like
from rayfed.experiments.checks import check_trial


def flat(weights):
    return torch.cat([value.flatten() for value in weights.values()])


@pytest.mark.parametrize("clip", [0.5, 1e3])
def test_updates_are_clipped_in_l1_and_every_coordinate_gets_noise(clip):
    people, algorithm = blobs(), DPFedBN(clip=clip, epsilon=8.0)
    plan = blueprint(algorithm, people, rounds=4)
    ctx = plan.context(people, "cpu").at(client=0, cohort=(0, 1, 2, 3), round=1)
    torch.manual_seed(0)
    server, client = algorithm.init(ctx), algorithm.join(ctx)
    down = algorithm.broadcast(ctx, server)
    work = algorithm.start(ctx, client, down)
    work["weights"] = {name: v + 0.1 if v.is_floating_point() else v for name, v in work["weights"].items()}
    base = flat(down["weights"])
    sent = torch.stack([flat(algorithm.finish(ctx, work, client, down, None)[1]["weights"]) for _ in range(100)])
    whole = 0.1 * len(base)  # L1 norm of the update
    clean = base + 0.1 * min(1.0, clip / whole)
    scale = 2 * clip / (8.0 / 4)
    assert stats.kstest((sent - clean).flatten().numpy(), stats.laplace(scale=scale).cdf).pvalue > 0.001
    assert not any(name.startswith("body.1.") for name in down["weights"])


@pytest.mark.parametrize("order", [1, 2])
def test_the_norm_of_a_long_update_keeps_to_the_bound(order):
    """A norm summed in float32 is too small: over so many numbers by 1% to 2% in L1, and a little in L2."""
    torch.manual_seed(0)
    sent = {"a": torch.randn(12_000_000), "b": torch.full((2_000_000,), 1e-3), "count": torch.tensor(3)}
    base = {name: torch.zeros_like(value) for name, value in sent.items()}
    short = clipped(sent, base, 2.0, order)
    assert short.pop("count") == 3
    assert {value.dtype for value in short.values()} == {torch.float32}
    norm = flat(short).double().norm(order).item()
    assert 2.0 * (1 - 1e-5) <= norm <= 2.0 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("cohort", "rounds", "expected"),
    [(4, 4, [2, 4, 6, 8]), (1, 8, [4, 4, 4, 4, 8, 8, 8, 8]), (2, 3, [4, 4, 8]), (3, 2, [4, 8])],
)
def test_the_budget_is_split_over_a_clients_participations(cohort, rounds, expected):
    people = blobs()
    _, records = simulate(blueprint(DPFedBN(epsilon=8.0), people, cohort=cohort, rounds=rounds), people)
    assert [record.epsilon for record in records] == pytest.approx(expected)


@pytest.mark.parametrize("algorithm", [DPFedBN(), GaussianDPFedBN()])
def test_weights_that_cannot_be_clipped_are_refused(algorithm):
    def check(buffer):
        model = net()
        model.body.register_buffer("extra", buffer)
        check_trial(blueprint(algorithm, blobs(), model=model), blobs())

    check(torch.tensor([1, 2]))
    with pytest.raises(UsageError, match=f"algorithm.name={algorithm.name} .* 'body.extra' is complex or not finite"):
        check(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match=r"'body.extra' is complex or not finite; .*persistent=False"):
        check(torch.tensor([0.0, -torch.inf]))


@pytest.mark.parametrize("algorithm", [DPFedBN(), GaussianDPFedBN()])
def test_integer_buffers_that_local_training_changes_are_not_sent(algorithm):
    people, model = blobs(), net()
    model.body.register_buffer("steps", torch.tensor(3))
    ctx = blueprint(algorithm, people, model=model).context(people, "cpu").at(client=0, cohort=(0, 1, 2, 3), round=1)
    down, client = algorithm.broadcast(ctx, algorithm.init(ctx)), algorithm.join(ctx)
    work = algorithm.start(ctx, client, down)
    work["weights"] = work["weights"] | {"body.steps": torch.tensor(7)}
    assert algorithm.finish(ctx, work, client, down, None)[1]["weights"]["body.steps"] == 3


def cohorts(algorithm, cohort, rounds, seed=0):
    people = blobs(7)
    plan = blueprint(algorithm, people, cohort=cohort, seed=seed)
    server = new_server(plan, people)
    return [server.sample(number) for number in range(1, rounds + 1)]


def test_no_client_is_sampled_twice_before_all_have_taken_part():
    drawn = cohorts(DPFedBN(), 2, 60)
    for first in range(0, 60, 3):
        clients = [i for cohort in drawn[first : first + 3] for i in cohort]
        assert len(set(clients)) == 6
    assert all(list(cohort) == sorted(cohort) for cohort in drawn)
    assert {i for cohort in drawn for i in cohort} == set(range(7))
    assert drawn != cohorts(DPFedBN(), 2, 60, seed=1)
    repeats = [len({i for cohort in cohorts(FedAvg(), 2, 60)[k : k + 3] for i in cohort}) for k in range(0, 60, 3)]
    assert min(repeats) < 6  # other methods sample each cohort independently


def test_a_wrapper_that_sends_more_gives_no_guarantee():
    people = blobs()
    for mr, expected in ((True, None), (False, 4.0)):
        algorithm = DBE(base=DPFedBN(epsilon=8.0), kappa=1.0, mr=mr)
        _, records = simulate(blueprint(algorithm, people), people)
        assert next(record for record in records if record.round == 1).epsilon == expected


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


def test_the_noise_on_the_mean_covers_one_client_of_the_cohort():
    people, algorithm = blobs(), GaussianDPFedBN(epsilon=3.0, clip=0.7)
    ctx = blueprint(algorithm, people, cohort=2, rounds=6).context(people, "cpu").at(cohort=(1, 3), round=1)
    torch.manual_seed(0)
    server = algorithm.init(ctx)
    replies = Replies({"weights": zeros_like(server["weights"])}, [Reply(1, 10, {}), Reply(3, 30, {})])
    server = server | {"weights": zeros_like(server["weights"])}
    drawn = [algorithm.aggregate(ctx, server, replies)["weights"]["body.0.weight"] for _ in range(200)]
    sigma = algorithm.channel.multiplier(ctx)  # each client takes part in three rounds of six
    assert exact_epsilon(sigma, 0.01, 3) > 2.4
    assert exact_epsilon(sigma, 0.01, 3) <= 3.0
    std = sigma * 2 * 0.7 / 2
    assert stats.kstest(torch.stack(drawn).flatten().numpy(), stats.norm(scale=std).cdf).pvalue > 0.001


@pytest.mark.parametrize(("cohort", "participations"), [(4, [1, 2, 3, 4]), (2, [1, 1, 2, 2]), (1, [1, 1, 1, 1])])
def test_epsilon_by_round_is_that_of_a_clients_participations(cohort, participations):
    people, algorithm = blobs(), GaussianDPFedBN(epsilon=4.0)
    server, records = simulate(blueprint(algorithm, people, cohort=cohort, rounds=4), people)
    sigma = algorithm.channel.multiplier(server.ctx.at(cohort=tuple(range(cohort))))
    for record, times in zip(records, participations, strict=True):
        assert record.privacy_unit == "client"
        assert exact_epsilon(sigma, 0.01, times) <= record.epsilon <= 1.25 * exact_epsilon(sigma, 0.01, times)
    assert 3.98 < records[-1].epsilon <= 4.0


@pytest.mark.parametrize(
    ("name", "privacy"),
    [
        ("gaussian_dp_fedbn", {"epsilon": 5, "delta": 0.01, "clip": 0.7}),
        ("dp_fedbn", {"name": "laplace", "epsilon": 5, "clip": 0.7, "local": True}),
    ],
)
def test_fedbn_with_the_section_of_privacy_has_the_same_weights(name, privacy, here):
    common = {
        "data": {"domains": ["plain", "font"], "per_domain": 40},
        "model": {"name": "mlp", "hidden": [4], "batch_norm": True},
        "local": {"steps": 2, "batch_size": 4, "lr": 0.05},
        "rounds": 3,
    }
    own = {"algorithm": {"name": name, "epsilon": 5, "clip": 0.7, "weighting": "equal"}}
    section = {"algorithm": {"name": "fedbn", "weighting": "equal"}, "privacy": privacy}
    section["sampling.name"] = "without_replacement"
    hashes = [rayfed.run({**common, **one}, quiet=True).weights_hash for one in (own, section)]
    assert hashes[0] == hashes[1]
