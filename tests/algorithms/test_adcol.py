"""ADCOL: the client's step and the server's training by hand, what is sent and kept, the paper's byte counts."""

import pytest
import torch
import torch.nn.functional as F

from helpers.comparison import equal
from helpers.federations import blobs, blueprint, simulate
from rayfed.algorithm import Replies, Reply
from rayfed.algorithms.adcol import Adcol, ResNetDiscriminator, divergence
from rayfed.algorithms.common.networks import mlp, train_classifier
from rayfed.core.network import Network, weights_of
from rayfed.core.optim import SGD

SIZES = (20, 26, 33, 41)


def small(**options):
    return Adcol(**({"hidden": [16], "server_batch_size": 16} | options))


class Recording(Adcol):
    """Keeps the representations that clients sent in the server's state."""

    def aggregate(self, ctx, server, replies):
        kept = {f"sent{reply.client}": reply.up.get("representations", torch.empty(0)) for reply in replies.each}
        return super().aggregate(ctx, server, replies) | kept


@pytest.mark.parametrize(
    ("share", "size", "count"), [(0.7, 10, 7), (0.25, 10, 3), (1.0, 10, 10), (0.01, 10, 1), (0.28, 25, 7)]
)
def test_sampled_sizes_round_up(share, size, count):
    population = blobs(1, sizes=(size,))
    server, _ = simulate(blueprint(Recording(hidden=[4], sampling=share), population, rounds=1), population)
    assert len(server.state["sent0"]) == count


def test_a_cache_keeps_the_last_representations_of_absent_clients():
    algorithm, people = small(cache=True, sampling=0.5, server_epochs=2), blobs()
    plan = blueprint(algorithm, people, cohort=2, rounds=1)
    ctx = plan.context(people, "cpu")
    torch.manual_seed(0)
    server = algorithm.init(ctx)
    assert server["cache"] == {}
    sent = [{1: torch.randn(10, 8), 3: torch.randn(7, 8)}, {0: torch.randn(4, 8), 3: torch.randn(6, 8)}]
    for by_client in sent:
        before = server
        each = [Reply(i, 20, {"representations": z}) for i, z in by_client.items()]
        torch.manual_seed(1)
        server = algorithm.aggregate(ctx.at(cohort=tuple(by_client)), before, Replies({}, each))
    counts = {client: len(z) for client, z in server["cache"].items()}
    assert counts == {"0": 4, "1": 10, "3": 6}  # the newest of client 3
    pool = torch.cat([sent[1][0], sent[0][1], sent[1][3]])
    labels, network = torch.tensor([0] * 4 + [1] * 10 + [3] * 6), Network(mlp([8, 16, 4]))
    sgd = SGD(lr=0.01, momentum=0.9, weight_decay=1e-5)
    torch.manual_seed(1)
    start = before["discriminator"]
    by_hand = train_classifier(network, start, pool, labels, optimizer=sgd, batch_size=16, epochs=2)
    assert equal(server["discriminator"], by_hand)


@pytest.mark.parametrize("options", [{}, {"fixed_size": True}])
def test_the_discriminators_loss_and_accuracy_are_recorded(options):
    people = blobs()
    algorithm = Recording(hidden=[16], server_lr=0.1, **options)
    (server, records) = simulate(blueprint(algorithm, people, rounds=1 if options else 3), people)
    rows = [{s.metric: s.value for s in r.scores if s.client == -1} for r in records]
    assert all(set(row) == {"discriminator_loss", "discriminator_accuracy"} for row in rows)
    if options:
        assert all(0.25 < row["discriminator_accuracy"] <= 1 for row in rows)
        return  # the second exchange changed the models
    z = torch.cat([server.state[f"sent{i}"] for i in range(4)])
    labels = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    network = mlp([8, 16, 4])
    network.load_state_dict(server.state["discriminator"])
    logits = network(z)
    assert rows[-1]["discriminator_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert rows[-1]["discriminator_accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_fixed_size_draws_a_new_discriminator_and_trains_it_for_ten_epochs():
    algorithm, population = small(fixed_size=True), blobs()
    ctx = blueprint(algorithm, population).context(population, "cpu").at(cohort=(1, 3))
    z = torch.randn(12, 8)
    sent = [Reply(1, 6, {"representations": z[:6]}), Reply(3, 6, {"representations": z[6:]})]
    replies, network = Replies({"weights": {}}, sent), Network(mlp([8, 16, 2]))
    trained = []
    for old in ({}, {"discriminator": weights_of(mlp([8, 16, 2]))}):
        torch.manual_seed(5)
        trained.append(algorithm.aggregate(ctx, {"weights": {}} | old, replies)["discriminator"])
    torch.manual_seed(5)
    start = weights_of(mlp([8, 16, 2]))
    optimizer = SGD(lr=0.01, momentum=0.9, weight_decay=1e-5)
    labels = torch.tensor([0] * 6 + [1] * 6)
    by_hand = train_classifier(network, start, z, labels, optimizer=optimizer, batch_size=16, epochs=10)
    assert equal(trained[0], by_hand)
    assert equal(trained[1], by_hand)
    kept = {"weights": {}, "discriminator": by_hand}
    second = algorithm.round_exchanges[1]
    assert second.aggregate(ctx.at(exchange=1), kept, Replies({}, [Reply(1, 6, {}), Reply(3, 6, {})])) is kept


# Several discriminators, a shared predictor, ResNets


def test_the_divergence_is_the_mean_over_the_last_discriminators():
    people, algorithm = blobs(), small(discriminators=3)
    ctx = blueprint(algorithm, people).context(people, "cpu")
    torch.manual_seed(0)
    drawn = [weights_of(mlp([8, 16, 4])) for _ in range(4)]
    client, z = algorithm.join(ctx.at(client=0)), torch.randn(5, 8)
    parts = simulate(blueprint(small(), people), people)[0].fleet.host.data.parts
    for round, weights in enumerate(drawn, 1):
        now, down = ctx.at(round=round, client=0), {"weights": {}, "discriminator": weights}
        work = algorithm.start(now, client, down)
        # Eq. 18 takes those trained in rounds max(1, t - 3) to t - 1, each received one round later
        received = range(max(1, round - 3) + 1, round + 1) if round > 1 else [1]
        each = [divergence(Network(mlp([8, 16, 4]))(drawn[r - 1], z)[0]) for r in received]
        mean = algorithm.divergence(now, work, weights, z)
        torch.testing.assert_close(mean, torch.stack(each).mean())
        client, _ = algorithm.finish(now, work, client, down, type(ctx.data)(parts(0)["train"], None))
    now = ctx.at(round=9)  # a client that was absent for some rounds: its discriminators are too old
    work = algorithm.start(now, client, {"weights": {}, "discriminator": drawn[0]})
    assert work["in_use"].tolist() == [0, 0]


def test_a_shared_predictor_is_averaged_and_the_rest_stays_local():
    people = blobs()
    server, records = simulate(blueprint(small(share_predictor=True), people), people)
    head = {"fc.weight", "fc.bias"}
    assert set(server.state["weights"]) == head
    size = 4 * (8 * 3 + 3)
    assert records[-1].bytes_up["weights"] == records[-1].bytes_down["weights"] == 4 * size
    assert not head & set(server.fleet.states[0]["weights"])
    algorithm, ctx = server.algorithm, server.ctx.at(cohort=(0, 1))
    replies = Replies({"weights": {name: v + 1 for name, v in server.state["weights"].items()}}, [])
    replies = replies._replace(each=[Reply(i, 9, {"representations": torch.randn(6, 8)}) for i in (0, 1)])
    found = algorithm.aggregate(ctx, server.state, replies)["weights"]
    assert torch.equal(found["fc.bias"], server.state["weights"]["fc.bias"] + 1)


@pytest.mark.parametrize(("width", "side"), [(8, 2), (128, 8), (2048, 32), (50, 5), (51, 6)])
def test_vectors_are_reshaped_to_two_channels(width, side):
    network = ResNetDiscriminator("resnet18", width, 3)
    assert (network.side, network.padding) == (side, 2 * side * side - width)
    seen = []
    network.net.conv1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    network.eval()
    z = torch.randn(2, width)
    assert network(z).shape == (2, 3)
    assert seen[0].shape == (2, 2, side, side)
    assert torch.equal(seen[0].flatten(1)[:, :width], z)


def test_a_resnet_trains_its_batch_norm_and_clients_use_its_running_statistics():
    people = blobs(2, sizes=(9, 8))
    algorithm = small(network="resnet18", server_batch_size=8)  # the last of 17 vectors is left out
    server, _ = simulate(blueprint(algorithm, people, rounds=1), people)
    trained = server.state["discriminator"]
    assert int(trained["net.bn1.num_batches_tracked"]) == 2
    assert trained["net.bn1.running_mean"].abs().max() > 0
    z = torch.randn(1, 8)
    alone = algorithm.divergence(server.ctx, {}, trained, z)
    module = ResNetDiscriminator("resnet18", 8, 2).eval()
    module.load_state_dict(trained)
    torch.testing.assert_close(alone, divergence(module(z)))
