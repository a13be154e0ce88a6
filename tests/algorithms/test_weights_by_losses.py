"""AFL, Gen-AFL, GroupDRO, VM and IRM: how losses become the clients' weights, projections, and a penalty in numbers."""

import math

import pytest
import torch

from helpers.federations import blobs, blueprint, net
from helpers.reference import CLIENTS, assert_weights, cross_entropy, data, descend, mean, plan, population, run
from rayfed.algorithm import Reply
from rayfed.algorithms.afl import AFL, GenAFL
from rayfed.algorithms.common.client_weights import project_simplex
from rayfed.algorithms.fed_irm import penalised_loss, slope
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.group_dro import GroupDRO
from rayfed.algorithms.vm import VM, variance_weights
from rayfed.core.errors import Diverged, UsageError
from rayfed.core.task import Output

FIVE = population((4, 4, 4, 4, 4))


def replies(losses, sizes):
    return [Reply(i, n, {"loss": torch.tensor(f)}) for i, (f, n) in enumerate(zip(losses, sizes, strict=True))]


def close(found, expected):
    assert list(found) == pytest.approx(expected, abs=1e-4)


def test_projection_onto_the_simplex():
    y = torch.tensor([0.5, 0.8, -0.2, 0.4, 0.1], dtype=torch.float64)
    close(project_simplex(y).tolist(), [0.2667, 0.5667, 0.0, 0.1667, 0.0])
    close(project_simplex(torch.tensor([0.2, 0.3, 0.5])).tolist(), [0.2, 0.3, 0.5])
    close(project_simplex(torch.tensor([0.0, 9.0])).tolist(), [0.0, 1.0])


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


def test_least_weight_one_over_n_leaves_one_point():
    close(project_simplex(torch.tensor([5.0, -1.0, 0.0, 2.0]), 0.25).tolist(), [0.25] * 4)
    with pytest.raises(ValueError, match="sum to more than 1"):
        project_simplex(torch.zeros(4), 0.3)


@pytest.mark.parametrize(
    ("algorithm", "expected"), [(AFL(), [0, 0, 0.0667, 0.1667, 0.7667]), (GenAFL(), [-0.1, 0, 0.1, 0.2, 0.8])]
)
def test_weights_after_the_first_round(algorithm, expected):
    ctx = plan(algorithm, FIVE, net(False)).context(FIVE, "cpu").at(round=2)
    server = {"lambda": torch.full((5,), 0.2, dtype=torch.float64)}
    close(algorithm.weights(ctx, server, replies([1.0, 2.0, 3.0, 4.0, 10.0], [4] * 5)), expected)


def test_a_loss_is_all_that_is_sent_beside_the_model():
    people = population()
    algorithm = AFL()
    seen = {}

    class Watched(AFL):
        def weights(self, ctx, server, replies):
            seen[ctx.round] = [float(reply.up["loss"]) for reply in replies]
            assert all(set(reply.up) == {"loss"} for reply in replies)
            return super().weights(ctx, server, replies)

    run(Watched(), people, net(), rounds=1)
    model = net().eval()  # in evaluation mode, and before local training
    assert seen[1] == pytest.approx([cross_entropy(model, *data(people, i)).item() for i in CLIENTS], abs=1e-6)
    assert algorithm.default_eval_point == "global"


@pytest.mark.parametrize(("policy", "refused"), [("aggregate", True), ("local_statistics", False), ("frozen", False)])
def test_negative_weights_and_averaged_variances_do_not_go_together(policy, refused):
    people = population()
    plan(AFL(), people, net(), batch_norm=policy).check(people)
    plan(GenAFL(), people, net(batch_norm=False), batch_norm=policy).check(people)
    if refused:
        advised = "use batch_norm=local_statistics, local or frozen, or a model without batch norm"
        with pytest.raises(UsageError, match=rf"^batch_norm=aggregate: algorithm.name=gen_afl may .* {advised}$"):
            plan(GenAFL(), people, net(), batch_norm=policy).check(people)
    else:
        plan(GenAFL(), people, net(), batch_norm=policy).check(people)


def test_three_rounds_of_group_dro_by_hand():
    people, model = population(), net(batch_norm=False)
    server = run(GroupDRO(q_lr=0.5), people, model, rounds=3)
    q = [1.0, 1.0, 1.0]
    for _ in range(3):
        losses = [cross_entropy(model, *data(people, i)).item() for i in CLIENTS]
        q = [old * math.exp(0.5 * loss) for old, loss in zip(q, losses, strict=True)]
        model = mean([descend(model, *data(people, i), 2) for i in CLIENTS], [each / sum(q) for each in q])
    assert_weights(server.state["weights"], model)
    torch.testing.assert_close(server.state["log_q"].exp(), torch.tensor(q, dtype=torch.float64), rtol=1e-5, atol=0)


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


@pytest.mark.parametrize(("variant", "expected"), [("paper", [0, 1 / 3, 2 / 3]), ("code", [-2 / 3, 1 / 3, 4 / 3])])
def test_weights_of_three_equal_clients(variant, expected):
    thirds = torch.full((3,), 1 / 3, dtype=torch.float64)
    losses = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert variance_weights(losses, thirds, 0.5, variant).tolist() == pytest.approx(expected)


def test_weights_of_vm_out_of_bounds_stop_the_run():
    people = population()
    with pytest.raises(Diverged, match=r"^round 1, client \d: VM's weight is -?[\d.]+, beyond ±5; .*beta=500, use a"):
        run(VM(beta=500.0), people, net(False))


def task():
    return blueprint(FedAvg(), blobs()).context(blobs(), "cpu").task


def test_irms_penalty_in_numbers():
    found = slope(task(), torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0]))
    assert found.item() == pytest.approx(-0.35442, abs=1e-5)
    output = Output(torch.tensor([[2.0, 0.0, -1.0]]), torch.zeros(1, 8), {})
    for beta, expected in ((4.0, (0.5 + 4 * 0.12561) / 4), (0.5, 0.5 + 0.5 * 0.12561)):
        value = penalised_loss(task(), "scale", beta, torch.tensor(0.5), {}, output, torch.tensor([0]))
        assert value.item() == pytest.approx(expected, abs=1e-5)
