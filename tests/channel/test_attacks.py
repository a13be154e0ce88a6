"""Attacks: what attackers send and train on, who they are, and who is scored."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

from helpers.federations import blobs, blueprint, net, new_server, on_pictures, reshaped, simulate, with_inputs
from helpers.nine_updates import NINE
from rayfed.algorithm import Phase
from rayfed.algorithms.common.channelled import Channelled
from rayfed.algorithms.fedavg import FedAvg
from rayfed.channel.attacks import (
    Alie,
    Backdoor,
    Ipm,
    LabelFlip,
    MinMax,
    MinSum,
    Noise,
    Scale,
    SignFlip,
    Trigger,
    alie_z,
    drawn_attackers,
)
from rayfed.channel.channel import Channel
from rayfed.channel.robust import Median
from rayfed.channel.updates import Updates
from rayfed.core.task import Batch, InputSpec
from rayfed.metrics.attacks import AttackSuccess

HONEST = NINE[2:]


def honest(start=0.0):
    values = [{"w": {"a": torch.tensor(row[:1]) + start, "b": torch.tensor(row[1:]) + start}} for row in HONEST]
    base = {"w": {"a": torch.zeros(1) + start, "b": torch.zeros(3) + start}}
    return Updates(values, base, [1 / len(values)] * len(values))


def crafted(attack, attackers=2, start=0.0):
    fields = attack.crafted(honest(start), attackers)["w"]
    return torch.cat([fields["a"], fields["b"]]).double().numpy() - start


def channelled(attack, attackers, **parts):
    return Channelled(base=FedAvg(), channel=Channel(attack=attack, attackers=frozenset(attackers), **parts))


def flat(weights):
    return torch.cat([value.flatten() for value in weights.values() if value.is_floating_point()])


# What attackers send that know of the others


@pytest.mark.parametrize(("clients", "attackers"), [(50, 24), (50, 10), (20, 4), (9, 2), (25, 5), (7, 1)])
def test_z_is_that_of_alie(clients, attackers):
    supporters = math.floor(clients / 2 + 1) - attackers
    share = (clients - attackers - supporters) / (clients - attackers)
    assert alie_z(clients, attackers) == pytest.approx(max(0.0, norm.ppf(share)), abs=1e-12)


def test_z_of_the_papers_example():
    """50 workers, 24 of them corrupted: 2 supporters are needed, and Φ(z) = 24/26."""
    assert alie_z(50, 24) == pytest.approx(norm.ppf(24 / 26))
    assert alie_z(3, 2) == 0.0


@pytest.mark.parametrize("start", [0.0, 3.0])
def test_alie_and_ipm_from_the_honest_mean(start):
    rows = np.array(HONEST)
    expected = rows.mean(0) - 1.5 * rows.std(0)
    np.testing.assert_allclose(crafted(Alie(z=1.5), start=start), expected, atol=1e-6)
    np.testing.assert_allclose(crafted(Ipm(epsilon=2.0), start=start), -2 * rows.mean(0), atol=1e-6)


def test_alie_beside_blades():
    """The value of Blades 0.0.1 for nine clients with two attackers, whose deviation has h − 1 in the denominator."""
    blades = np.array([-0.77264890588312, -0.5148869413164721, -1.0539723866526387, -0.3846248340905857])
    mean = np.mean(HONEST, 0)
    np.testing.assert_allclose(crafted(Alie()), mean + (blades - mean) * math.sqrt(6 / 7), atol=1e-6)


def searched(direction, allowed):
    """Return μ + γp for the largest allowed γ, by bisection."""
    mean = np.mean(HONEST, 0)
    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if allowed(mean + middle * direction) else (low, middle)
    return mean + low * direction


DIRECTIONS = {
    "std": -np.std(HONEST, 0),
    "unit": -np.mean(HONEST, 0) / np.linalg.norm(np.mean(HONEST, 0)),
    "sign": -np.sign(np.mean(HONEST, 0)),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_minmax_goes_as_far_as_two_honest_updates_are_apart(direction):
    rows = np.array(HONEST)
    most = max(np.linalg.norm(a - b) for a in rows for b in rows)
    expected = searched(DIRECTIONS[direction], lambda v: np.linalg.norm(rows - v, axis=1).max() <= most)
    np.testing.assert_allclose(crafted(MinMax(direction=direction)), expected, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_minsum_keeps_to_the_largest_sum_of_squares(direction):
    rows = np.array(HONEST)
    most = max(((rows - a) ** 2).sum() for a in rows)
    expected = searched(DIRECTIONS[direction], lambda v: ((rows - v) ** 2).sum() <= most)
    np.testing.assert_allclose(crafted(MinSum(direction=direction)), expected, atol=1e-5)


BESIDE = {  # by the notebooks of Min-Max's and Min-Sum's authors, whose search ends at a width of 1e-5
    "std": (
        [-1.708567773857006, -0.9588754730722056, -2.658696972810074, -1.2476929569514394],
        [-1.533847851946387, -0.8759904664203934, -2.3591225503086353, -1.086573013556944],
    ),
    "unit": (
        [0.6401973532567007, 0.45377419621355325, 0.8237302287953031, 0.2586801946567707],
        [0.47432416352289186, 0.3362026802397023, 0.6103042284606058, 0.19165694192008503],
    ),
    "sign": (
        [0.5175220380510603, 0.7018077523367745, 0.33609346662248896, 0.8946648951939173],
        [0.3760182666145562, 0.5603039809002703, 0.1945896951859848, 0.7531611237574132],
    ),
}


@pytest.mark.parametrize("direction", BESIDE)
def test_minmax_and_minsum_beside_their_authors(direction):
    """Their Min-Sum allows the least sum of an honest update; the values are those with the largest, as in Eq. (9)."""
    minmax, minsum = BESIDE[direction]
    np.testing.assert_allclose(crafted(MinMax(direction=direction)), minmax, atol=3e-5)
    np.testing.assert_allclose(crafted(MinSum(direction=direction)), minsum, atol=3e-5)


def test_minmax_beside_blades():
    """The value of Blades (commit 711e8df), whose search ends at a width of 0.01 of γ."""
    blades = [-1.702154242659444, -0.9558329718499152, -2.6477003452721597, -1.2417786469391063]
    furthest = 0.01 * np.std(HONEST, 0, ddof=1).max()
    np.testing.assert_allclose(crafted(MinMax()), blades, atol=furthest)


def test_honest_updates_that_agree_leave_no_room():
    values = [{"w": torch.tensor([1.0, 2.0])}] * 3
    same = Updates(values, {"w": torch.zeros(2)}, [1 / 3] * 3)
    for attack in (MinMax(), MinSum(), Alie()):
        assert attack.crafted(same, 1)["w"].tolist() == [1.0, 2.0]


# What attackers send that look at themselves


@pytest.mark.parametrize(
    ("attack", "factor"),
    [(SignFlip(), -1.0), (SignFlip(factor=4.0), -4.0), (Scale(), 10.0), (Backdoor(factor=3.0), 3.0)],
)
def test_own_updates_are_multiplied(attack, factor):
    sent = {"w": {"a": torch.tensor([1.0, 2.5]), "steps": torch.tensor(4)}}
    base = {"w": {"a": torch.tensor([0.5, 3.0]), "steps": torch.tensor(1)}}
    changed = attack.changed(sent, base)["w"]
    assert changed["a"].tolist() == [0.5 + factor * 0.5, 3.0 - factor * 0.5]
    assert changed["steps"] == 4


def test_noise_is_as_long_as_stated():
    update = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    added = Noise(scale=3.0).altered(update) - update
    assert float(added.norm() / update.norm()) == pytest.approx(3.0, rel=0.02)
    assert float(added.mean().abs()) < 0.1


# What the server gets


@pytest.mark.parametrize("attack", [Ipm(epsilon=1.0), SignFlip()])
def test_the_mean_of_honest_and_attacking_clients(attack):
    """Equal clients: two of five send the opposite of the honest mean, or of their own update, which are the same."""
    people = blobs(5, sizes=(20,))
    people = replace(people, clients=tuple(replace(people.clients[0], id=i) for i in range(5)))
    how = {"model": net(batch_norm=False), "rounds": 1, "drop_last": False, "batch_size": 20}
    plain, _ = simulate(blueprint(FedAvg(), people, **how), people)
    server, _ = simulate(blueprint(channelled(attack, {1, 3}), people, **how), people)
    start = flat(server.ctx.task.initial_weights())
    moved, expected = flat(server.state["weights"]) - start, flat(plain.state["weights"]) - start
    torch.testing.assert_close(moved, expected / 5, atol=1e-6, rtol=1e-4)


def test_attackers_see_what_honest_clients_send_exactly():
    """The median of three honest updates and two crafted ones, computed from the clients' own models."""
    people = blobs(5)
    how = {"model": net(batch_norm=False), "rounds": 1}
    attack, start = Ipm(epsilon=0.7), flat(net(batch_norm=False).state_dict())
    server, _ = simulate(blueprint(channelled(attack, {0, 2}, rule=Median()), people, **how), people)
    updates = {client: sent - start for client, sent in sent_in_a_round(people, how).items()}
    bad = -0.7 * torch.stack([updates[i] for i in (1, 3, 4)]).mean(0)
    expected = torch.stack([bad, bad, *(updates[i] for i in (1, 3, 4))]).median(0).values
    torch.testing.assert_close(flat(server.state["weights"]) - start, expected, atol=1e-6, rtol=1e-4)


def sent_in_a_round(people, how):
    """The weights that each client sends to FedAvg."""
    sent = {}

    @dataclass(frozen=True, kw_only=True)
    class Seen(FedAvg):
        def finish(self, ctx, work, client, down, data):
            kept, up = super().finish(ctx, work, client, down, data)
            sent[ctx.client] = flat(up["weights"])
            return kept, up

    simulate(blueprint(Seen(), people, **how), people)
    return sent


def test_without_an_honest_client_in_a_cohort_attackers_go_by_what_they_would_have_sent():
    people = blobs(4)
    method = channelled(Ipm(), {0, 1, 2})
    server, _ = simulate(blueprint(method, people, cohort=1, rounds=6, seed=3), people)
    assert {server.sample(number)[0] for number in range(1, 7)} & {0, 1, 2}
    assert flat(server.state["weights"]).isfinite().all()


# What attackers train on


def test_labels_are_flipped():
    people, x = blobs(), torch.zeros(3, 6)
    ctx = blueprint(FedAvg(), people).context(people, "cpu")
    assert LabelFlip().poisoned(ctx, Batch(x, torch.tensor([0, 1, 2]))).y.tolist() == [2, 1, 0]
    soft = torch.tensor([[0.7, 0.3, 0.0]])
    assert LabelFlip().poisoned(ctx, Batch(x[:1], soft)).y.tolist() == [pytest.approx([0.0, 0.3, 0.7])]


def test_an_attacker_trains_on_flipped_labels_and_others_do_not():
    people = blobs(3)
    flipped = people.clients[1].train
    others = replace(people.clients[1], train=replace(flipped, y=2 - flipped.y))
    by_hand = replace(people, clients=(people.clients[0], others, people.clients[2]))
    expected, _ = simulate(blueprint(FedAvg(), by_hand), by_hand)
    server, _ = simulate(blueprint(channelled(LabelFlip(), {1}), people), people)
    assert torch.equal(flat(server.state["weights"]), flat(expected.state["weights"]))


def test_the_trigger_is_white_in_the_lower_right_corner():
    inputs = InputSpec((2, 4, 5), (0.5, 0.25), (0.5, 0.25))
    x = torch.zeros(1, 2, 4, 5)
    stamped = Trigger(size=2, target=0).stamped(x, inputs)
    assert stamped[0, :, 2:, 3:].flatten(1).tolist() == [[1.0] * 4, [3.0] * 4]
    assert stamped.count_nonzero() == 8
    assert x.count_nonzero() == 0


def test_a_share_of_each_batch_gets_trigger_and_target():
    people = reshaped(blobs(), (1, 2, 3))
    ctx = blueprint(FedAvg(), people, model=on_pictures(net())).context(people, "cpu")
    batch = Batch(torch.zeros(5, 1, 2, 3), torch.tensor([0, 1, 2, 0, 1]))
    x, y = Backdoor(poison=0.5, target=2, size=1).poisoned(ctx, batch)
    assert y.tolist() == [2, 2, 2, 0, 1]
    assert (x.flatten(1).count_nonzero(1) > 0).tolist() == [True, True, True, False, False]
    soft = Backdoor(poison=0.4, target=2, size=1).poisoned(ctx, Batch(batch.x, torch.eye(3)[batch.y]))
    assert soft.y.argmax(1).tolist() == [2, 2, 2, 0, 1]
    assert batch.y.tolist() == [0, 1, 2, 0, 1]


def test_attack_success_counts_images_of_other_classes_that_are_seen_as_the_target():
    metric, inputs = AttackSuccess(target=1, size=1), InputSpec((1, 2, 2))
    x, y = metric.changed(torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 2, 1]), inputs)
    assert y.tolist() == [0, 2]
    assert x[:, 0, 1, 1].tolist() == [1.0, 1.0]
    (value,) = metric.measure(torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1]]), y)
    assert (value.metric, value.value, value.n) == ("attack_success", 0.5, 2)
    assert metric.declared(value).higher_is_better is False


def dark_corner(x):
    return np.concatenate([x[:, :-1], np.zeros_like(x[:, -1:])], 1)


def test_a_backdoor_is_learned_and_measured_on_honest_clients():
    people = reshaped(with_inputs(blobs(4, sizes=(60,)), dark_corner), (1, 2, 3))
    method = channelled(Backdoor(target=0, size=1, factor=2.0), {0, 1})
    how = {"model": on_pictures(net(batch_norm=False)), "rounds": 12, "local": Phase("train", epochs=3)}
    plan = blueprint(method, people, **how)
    metrics = {"attack_success": AttackSuccess(size=1)}
    success = []
    for algorithm in (method, FedAvg()):
        of_all = new_server(replace(plan, algorithm=algorithm), people, metrics=metrics, points=("global",))
        success.append(list(of_all.run())[-1].means("attack_success", "global")["test"])
    assert success[0] > success[1] + 0.5


# Who attacks, and who is scored


def test_attackers_are_drawn_by_the_seed_or_named():
    ids = list(range(100, 120))
    drawn = drawn_attackers(SignFlip(share=0.21), ids, 3)
    assert len(drawn) == 5
    assert drawn == drawn_attackers(Alie(share=0.21), ids, 3)  # whatever they do
    assert drawn != drawn_attackers(SignFlip(share=0.21), ids, 4)
    assert drawn_attackers(SignFlip(share=0.0), ids, 3) == frozenset()
    assert drawn_attackers(SignFlip(clients=[103, 119]), ids, 3) == {3, 19}


def test_attackers_are_scored_if_asked_for(here):
    import rayfed

    config = {"model": {"name": "mlp", "hidden": [4]}, "data": {"per_domain": 30, "domains": ["plain", "font"]}}
    config |= {"rounds": 1, "evaluate.points": ["global", "trained"], "evaluate.splits": ["train", "val", "test"]}
    config |= {"partition.name": "iid", "partition.clients": 4, "attack.name": "sign_flip", "attack.clients": [2]}
    for scored in (False, True):
        result = rayfed.run(config | {"attack.scored": scored, "experiment": str(scored)}, quiet=True)
        clients = set(result.metrics["client"]) - {-1}
        assert clients == ({0, 1, 2, 3} if scored else {0, 1, 3})
    table = pd.read_parquet("results/False/clients")
    assert table["role"].tolist() == ["honest", "honest", "attacker", "honest"]
    assert set(table["trial"]) == set(pd.read_parquet("results/False/metrics")["trial"])
    assert table["examples"].sum() > 0
