"""How clients are weighed: equally or by examples, and by losses in AFL, Gen-AFL, GroupDRO and VM."""

import dataclasses
import math

import pytest
import torch

from helpers.federations import net
from helpers.reference import assert_weights, cross_entropy, data, descend, mean, plan, population, run
from rayfed.algorithm import Reply
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.weights_by_losses import AFL, VM, GenAFL, GroupDRO, project_simplex
from rayfed.core.errors import Diverged, UsageError
from rayfed.core.registry import resolve
from rayfed.experiments.checks import check_trial


def close(found, expected):
    assert list(found) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("lowest", [0.0, -1.0, 0.1, -0.3])
def test_projection_is_the_nearest_point(lowest):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        y = 3 * torch.randn(6, generator=generator, dtype=torch.float64)
        x = project_simplex(y, lowest)
        assert x.sum().item() == pytest.approx(1)
        assert x.min().item() >= lowest - 1e-12
        others = torch.distributions.Dirichlet(torch.full((6,), 0.3, dtype=torch.float64)).sample((200,))
        others = (1 - 6 * lowest) * others + lowest
        # no feasible direction from x leads nearer to y
        assert ((others - x) @ (y - x)).max().item() <= 1e-9


@pytest.mark.parametrize("lowest", [-1.0, -1e6, -1e14, -1e100, -1e300])
def test_while_no_weight_is_at_the_least_one_it_does_not_matter_how_low_that_is(lowest):
    """λ + η (f − f̄) then: of the digest's λ = (0.2)⁵, f = (1, 2, 3, 4, 10) and η = 0.1."""
    y = torch.full((5,), 0.2, dtype=torch.float64) + 0.1 * torch.tensor([1, 2, 3, 4, 10], dtype=torch.float64)
    found = project_simplex(y, lowest)
    assert found.tolist() == pytest.approx([-0.1, 0, 0.1, 0.2, 0.8], abs=1e-12)
    assert found.sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("policy", "refused"), [("aggregate", True), ("local_statistics", False), ("frozen", False)])
def test_negative_weights_and_averaged_variances_do_not_go_together(policy, refused):
    people = population()
    check_trial(plan(AFL(), people, net(), batch_norm=policy), people)
    check_trial(plan(GenAFL(), people, net(batch_norm=False), batch_norm=policy), people)
    if refused:
        advised = "use batch_norm=local_statistics, local or frozen, or a model without batch norm"
        with pytest.raises(UsageError, match=rf"^batch_norm=aggregate: algorithm.name=gen_afl may .* {advised}$"):
            check_trial(plan(GenAFL(), people, net(), batch_norm=policy), people)
    else:
        check_trial(plan(GenAFL(), people, net(), batch_norm=policy), people)


def test_q_does_not_overflow():
    people = population()
    server = run(GroupDRO(q_lr=1e4), people, net(batch_norm=False), rounds=2)
    assert all(torch.isfinite(value).all() for value in server.state["weights"].values())


def test_sampled_rounds_of_group_dro_by_hand():
    people, model = population(), net(batch_norm=False)
    server = run(GroupDRO(q_lr=0.5), people, model, rounds=3, cohort=2)
    cohorts = [server.sample(number) for number in (1, 2, 3)]
    assert len(set(cohorts)) > 1
    q = [1.0, 1.0, 1.0]
    for cohort in cohorts:
        for i in cohort:
            q[i] *= math.exp(0.5 * cross_entropy(model, *data(people, i)).item())
        total = sum(q[i] for i in cohort)
        model = mean([descend(model, *data(people, i), 2) for i in cohort], [q[i] / total for i in cohort])
    assert_weights(server.state["weights"], model)
    torch.testing.assert_close(server.state["log_q"].exp(), torch.tensor(q, dtype=torch.float64), rtol=1e-5, atol=0)


def context(algorithm, round=2):
    return plan(algorithm, population(), net(False)).context(population(), "cpu").at(round=round)


def replies(losses, sizes=(8, 12, 20)):
    return [Reply(client, sizes[client], {"loss": torch.tensor(loss)}) for client, loss in losses.items()]


@pytest.mark.parametrize(
    ("algorithm", "before", "losses", "after", "weights"),
    [
        # 0.5 + 0.1·1 and 0.2 + 0.1·3, both less 0.2, so that their sum stays 0.7
        (AFL(), [0.5, 0.3, 0.2], {0: 1.0, 2: 3.0}, [0.4, 0.3, 0.3], [4 / 7, 3 / 7]),
        (AFL(), [0.1, 0.7, 0.2], {0: 1.0, 2: 9.0}, [0.0, 0.7, 0.3], [0.0, 1.0]),
        (AFL(lambda_min=0.1), [0.1, 0.7, 0.2], {0: 1.0, 2: 9.0}, [0.1, 0.7, 0.2], [1 / 3, 2 / 3]),
        (GenAFL(), [0.1, 0.7, 0.2], {0: 1.0, 2: 9.0}, [-0.3, 0.7, 0.6], [-1.0, 2.0]),
        # nothing to renormalise: by the examples of the round's clients, 8 and 12
        (AFL(), [0.0, 0.0, 1.0], {0: 1.0, 1: 3.0}, [0.0, 0.0, 1.0], [0.4, 0.6]),
        (GenAFL(weighting="equal"), [0.5, -0.6, 1.1], {0: 1.0, 1: 1.0}, [0.5, -0.6, 1.1], [0.5, 0.5]),
    ],
)
def test_afl_of_sampled_clients(algorithm, before, losses, after, weights):
    ctx, server = context(algorithm), {"lambda": torch.tensor(before, dtype=torch.float64)}
    close(algorithm.next_lambda(ctx, server, replies(losses)).tolist(), after)
    close(algorithm.weights(ctx, server, replies(losses)), weights)
    close(algorithm.next_lambda(context(algorithm, 1), server, replies(losses)).tolist(), before)


def test_weights_of_sampled_clients_that_nearly_cancel_stop_the_run():
    server = {"lambda": torch.tensor([0.9, -0.45, 0.55], dtype=torch.float64)}
    with pytest.raises(Diverged, match=r"^round 2, client 2: .*=gen_afl .* 5.5, beyond ±5; the λ of .* nearly cancel"):
        GenAFL().weights(context(GenAFL()), server, replies({1: 0.0, 2: 0.0}))


def test_vm_of_sampled_clients_needs_no_loss_of_the_others():
    """Alg. 2 with p over S_t, for p = (0.4, 0.6) and f = (1, 2): an older loss in f̄ leaves the step as it is."""
    p, f, models = torch.tensor([0.4, 0.6]), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    for f_bar in (p @ f, torch.tensor(7.0)):
        steps = 1.0 - models
        delta = p @ steps + 2 * 0.5 * (p * (f - f_bar)) @ (steps - p @ steps)
        found = VM(beta=0.5).weights(context(VM()), {}, replies({0: 1.0, 1: 2.0}))
        assert torch.tensor(found) @ models == pytest.approx((1.0 - delta).item())
    close(VM(beta=0.5, weighting="equal").weights(context(VM()), {}, replies({0: 1.0, 1: 2.0})), [0.25, 0.75])


def test_weights_of_vm_out_of_bounds_stop_the_run():
    people = population()
    with pytest.raises(Diverged, match=r"^round 1, client \d: .*=vm .* -?[\d.]+, beyond ±5; .*beta=500, use a"):
        run(VM(beta=500.0), people, net(False))


OWN_WEIGHTS = {"feddyn", "group_dro", "erm", "central_group_dro", "mm_rex", "v_rex", "irm"}
NO_MEAN = {"solo", "fedfomo", "apple", "fada"}
WRAPPERS = {"mixup", "dbe"}  # have the weights of their base


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_other_method_weighs_equally_if_asked(name):
    kind = resolve(name, ALGORITHMS, where="algorithm.name")
    has_key = any(field.name == "weighting" for field in dataclasses.fields(kind))
    assert has_key is (name not in OWN_WEIGHTS | NO_MEAN | WRAPPERS)
    if has_key:
        few, many = (kind(weighting="equal").weight(None, n) for n in (7, 70))
        assert few == many
        few, many = (kind(weighting="examples").weight(None, n) for n in (7, 70))
        assert few < many or name == "gaussian_dp_fedbn"  # up to max_examples


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_round_of_fedavg_with_equal_weights_by_hand(wrapped):
    people, model = population(), net()
    algorithm = FedAvg(weighting="equal")
    server = run(DBE(base=algorithm, mr=False, prbm=False) if wrapped else algorithm, people, model, rounds=1)
    assert_weights(server.state["weights"], mean([descend(model, *data(people, i), 2) for i in range(3)], [1 / 3] * 3))
