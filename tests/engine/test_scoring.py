"""Scores by hand, batches that parts share, and evaluation of a fixed sample of the clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import rayfed
from helpers.federations import Point, blobs, blueprint, net, quadratic, quadratics, simulate
from rayfed.algorithms.fedavg import FedAvg, Solo
from rayfed.core.errors import UsageError
from rayfed.core.ids import Moment
from rayfed.core.outputs import UNKNOWN
from rayfed.data.population import Examples
from rayfed.engine import scoring
from rayfed.engine.fleet import ExchangeRequest, ScoreRequest, scoring_blocks
from rayfed.engine.host import Host, LocalFleet
from rayfed.engine.scoring import batch_size, predictions, score
from rayfed.experiments import plan_evaluation
from rayfed.models.split_model import ensure_split
from rayfed.reports.render import render


def hosted(people, **changes):
    return LocalFleet(blueprint(FedAvg(), people, **changes), people).host


@pytest.fixture
def seen(monkeypatch):
    """Sizes of the batches that reach `predict`, five rows at most."""
    monkeypatch.setattr(scoring, "batch_size", lambda part: 5)
    sizes = []

    def predict(self, ctx, model, x):
        sizes.append(len(x))
        return ctx.task.predict(model, x)

    monkeypatch.setattr(FedAvg, "predict", predict)
    return sizes


def test_parts_share_batches_and_get_back_what_is_theirs(seen):
    host = hosted(blobs(4), model=net())
    task = host.ctx.task
    weights = task.initial_weights()
    parts = [host.data.parts(i)[split] for i in range(3) for split in ("val", "test")]  # 9 and 15 rows each
    found = list(predictions(host.algorithm, host.ctx, weights, parts))
    assert [len(logits) for logits in found] == [9, 15] * 3
    assert seen == [5] * 14 + [2]
    for part, logits in zip(parts, found, strict=True):
        torch.testing.assert_close(logits, task.predict(weights, part.x))
    scores = score(host.algorithm, host.ctx, weights, "global", parts)
    assert [(s.client, s.split) for s in scores[::2]] == [(i, split) for i in range(3) for split in ("val", "test")]
    for part, logits, accuracy, loss in zip(parts, found, scores[::2], scores[1::2], strict=True):
        right = sum(int(row.argmax()) == int(y) for row, y in zip(logits, part.y, strict=True))
        assert (accuracy.metric, accuracy.value, accuracy.n) == ("accuracy", right / len(part), len(part))
        assert accuracy.higher_is_better
        assert loss.value == pytest.approx(torch.nn.functional.cross_entropy(logits, part.y).item())
        assert not loss.higher_is_better


def test_parts_have_batches_of_their_own_where_examples_depend_on_each_other(seen):
    torch.manual_seed(0)
    model = ensure_split(
        torch.nn.Sequential(torch.nn.BatchNorm1d(6, track_running_stats=False), torch.nn.Linear(6, 3)), (6,)
    )
    host = hosted(blobs(4), model=model, rows_interact=True)
    weights = host.ctx.task.initial_weights()
    parts = [host.data.parts(1)[split] for split in ("val", "test")]
    found = list(predictions(host.algorithm, host.ctx, weights, parts))
    assert seen == [4, 5, 5, 5, 5]  # no batch of one of 9 and 15
    x = parts[0].x[:4]
    x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(found[0][:4], x @ weights["head.weight"].T + weights["head.bias"])


def test_values_of_a_users_own_loss_have_no_accuracy():
    host = hosted(quadratics((2.0, 1.0), (1.0, 4.0)), model=Point(), loss=quadratic, outputs=UNKNOWN, batch_size=1)
    parts = [host.data.parts(i)["test"] for i in range(2)]
    model = {"w": torch.tensor([2.0])}
    scores = score(host.algorithm, host.ctx, model, "global", parts)
    assert [(s.client, s.metric, s.value, s.n) for s in scores] == [(0, "loss", 1.0, 1), (1, "loss", 2.0, 1)]
    assert score(host.algorithm, host.ctx, model, "global", []) == []


def test_clients_without_a_split_have_no_row():
    people = blobs(3)
    nothing = Examples(np.zeros((0, 6), np.float32), np.zeros(0, np.int64))
    people = replace(people, clients=(people.clients[0], replace(people.clients[1], val=nothing), people.clients[2]))
    _, records = simulate(blueprint(FedAvg(), people), people)
    found = {(s.client, s.split) for s in records[-1].scores if s.point == "global"}
    assert found == {(0, "val"), (0, "test"), (1, "test"), (2, "val"), (2, "test")}


@pytest.mark.parametrize(("shape", "rows"), [((784,), 83), ((3, 224, 224), 16), ((6,), 512)])
def test_the_batch_goes_by_the_size_of_an_input(shape, rows):
    people = blobs(1)
    host = hosted(people)
    part = host.data.parts(0)["test"]
    part.x = torch.zeros((1, *shape))
    assert batch_size(part) == rows


def scored_by(plan, people, clients, blocks=()):
    """Return the scores of the initial model on the clients of a host, in these blocks or its own."""
    weights = plan.context(people, "cpu").task.initial_weights()
    request = ScoreRequest(
        moment=Moment("round", 1), cohort=(), clients=tuple(clients), splits=("train", "test"), blocks=blocks
    )
    return Host(plan, people, "cpu").score_global(request, weights)


def test_scores_are_the_same_bits_whoever_shares_a_host(monkeypatch):
    """Last bits of a row of a matrix product depend on how many rows there are, so hosts must score whole blocks."""
    monkeypatch.setattr("rayfed.engine.fleet._BLOCK_CLIENTS", 2)
    people = blobs(7, sizes=(60, 61, 35, 90, 44, 52, 70))
    torch.manual_seed(0)
    model = ensure_split(torch.nn.Sequential(torch.nn.Linear(6, 257), torch.nn.ReLU(), torch.nn.Linear(257, 3)), (6,))
    plan = blueprint(FedAvg(), people, model=model)
    blocks = ((0, 1), (2, 3), (4, 5), (6,))
    found = []
    for homes in ([blocks], [(blocks[2], blocks[0]), (blocks[3], blocks[1])], [(block,) for block in blocks]):
        scores = []
        for home in homes:
            clients = [client for block in home for client in block]
            scores += scored_by(plan, people, clients, home).scores
        found.append(sorted(scores))
    assert len(found[0]) == 28
    assert found[0] == found[1] == found[2]
    assert found[0] == sorted(scored_by(plan, people, range(7)).scores)  # a host makes the same blocks


def of_sizes(*sizes):
    """Return clients with so many test examples each, beside nine for validation."""
    people = blobs(len(sizes))
    made = []
    for client, size in zip(people.clients, sizes, strict=True):
        test = Examples(np.zeros((size, 6), np.float32), np.zeros(size, np.int64))
        made.append(replace(client, test=test))
    return replace(people, clients=tuple(made))


@pytest.mark.parametrize(
    ("sizes", "splits", "lengths"),
    [
        ([1] * 130, ("val", "test"), [64, 64, 2]),
        ([1000, 1000, 1000, 5000, 40, 2000, 9], ("test",), [2, 1, 1, 2, 1]),  # 2,048 examples at most
        ([1000, 1000, 1000], ("val",), [3]),
        ([1000, 1000, 48, 1], ("test", "ood"), [3, 1]),
        ([], ("test",), []),
    ],
)
def test_blocks_have_few_clients_and_few_examples(sizes, splits, lengths):
    people = of_sizes(*sizes) if sizes else blobs(1)
    clients = tuple(range(len(sizes)))
    request = ScoreRequest(moment=Moment("round", 1), cohort=clients, clients=clients, splits=splits)
    blocks = scoring_blocks(people, request)
    assert [len(block) for block in blocks] == lengths
    assert [client for block in blocks for client in block] == list(clients)


def test_an_evaluation_waits_once(monkeypatch):
    people = of_sizes(*[3] * 130)
    reads, read = [], torch.Tensor.tolist

    def counted(tensor):
        reads.append(tuple(tensor.shape))
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    plan = blueprint(FedAvg(), people, model=net())
    scores = scored_by(plan, people, range(130)).scores
    assert len(scores) == 130 * 4
    assert reads == [(260, 3)]


class OneBuffer(torch.nn.Module):
    """Writes all of its outputs to the same memory, as a model does that replays a CUDA graph."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        self.memory = torch.empty(900, 3)

    def forward(self, x):
        if self.training:
            return self.layer(x)
        return self.memory[: len(x)].copy_(self.layer(x).detach())


def own_scores(plan, people, groups):
    """Return the scores of the clients' own models, downloaded and trained; a call scores one of `groups`."""
    scores = []
    fleet = LocalFleet(plan, people)
    weights = fleet.host.ctx.task.initial_weights()
    for clients in groups:
        states = {client: {"weights": {k: (client + 1) * w for k, w in weights.items()}} for client in clients}
        fleet.load(states.items())
        cohort = {"moment": Moment("round", 1), "cohort": clients, "clients": clients}
        request = ScoreRequest(**cohort, splits=("train", "val", "test"), points=("downloaded",))
        scores += fleet.score_downloads(request, {"weights": {}}, {}).scores
        train = ExchangeRequest(**cohort, weights=dict.fromkeys(clients, 1.0), score_splits=("val", "test"))
        scores += fleet.exchange(train, {"weights": {}}, {}).scored.scores
    return sorted(scores)


def test_scores_of_the_clients_own_models_are_the_same_bits_whoever_is_scored_with_them(monkeypatch):
    people = blobs(7, sizes=(900, 61, 300, 90, 44, 52, 70))  # up to 480 examples of a part
    plan = blueprint(Solo(), people, model=OneBuffer(), vmap_clients=1)
    found = []
    for held in (scoring._HELD["cpu"], 100):
        monkeypatch.setitem(scoring._HELD, "cpu", held)
        for groups in ([tuple(range(7))], [(5, 2), (0,), (6, 1, 3, 4)], [(i,) for i in range(7)]):
            found.append(own_scores(plan, people, groups))
    assert len(found[0]) == 7 * 2 * 5
    assert len({score.value for score in found[0] if score.metric == "loss"}) == 7 * 5
    for other in found:
        assert other == found[0]
    losses = {}
    for one in found[0]:
        if (one.point, one.metric) == ("downloaded", "loss"):
            losses[one.client, one.split] = one.value
    weights = plan.context(people, "cpu").task.initial_weights()
    for client, data in enumerate(people.clients):
        for split in ("train", "val", "test"):
            part = getattr(data, split)
            logits = (client + 1) * (torch.from_numpy(part.x) @ weights["layer.weight"].T + weights["layer.bias"])
            loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(part.y))
            assert losses[client, split] == pytest.approx(loss.item(), rel=1e-6)


def test_the_numbers_of_all_clients_own_models_are_computed_at_once(monkeypatch):
    people = blobs(9)
    plan = blueprint(Solo(), people, model=net(batch_norm=False), vmap_clients=1)
    lengths, sums = [], scoring.sums_of_parts

    def counted(values, of_parts):
        lengths.append(of_parts)
        return sums(values, of_parts)

    monkeypatch.setattr(scoring, "sums_of_parts", counted)
    scores = own_scores(plan, people, [tuple(range(9))])
    assert len(scores) == 9 * 2 * 5
    sizes = [20, 26, 33, 41, 20, 26, 33, 41, 20]
    assert lengths == [[n for size in sizes for n in (size, 9, 15)], [9, 15] * 9]


def clients(count):
    rng = np.random.default_rng(0)

    def part(size):
        y = rng.integers(0, 2, size)
        return (rng.normal(size=(size, 3)) + y[:, None]).astype(np.float32), y

    return [{"train": part(6), "val": part(4), "test": part(4)} for _ in range(count)]


@pytest.fixture
def run(tmp_path):
    def run(**options):
        options = {"model.name": "mlp", "rounds": 2, "cohort": 4, "local.lr": 0.1, "quiet": True} | options
        return rayfed.run(clients=clients(20), results=str(tmp_path), **options)

    return run


def scored(result):
    tests = result.metrics.query("split == 'test' and metric == 'accuracy'")
    return {tuple(sorted(rows["client"])) for _, rows in tests.groupby("round")}


def test_the_sample_is_the_same_in_all_rounds_and_for_all_methods(run):
    methods = ["fedavg", "scaffold", "fedrep"]
    samples = [scored(run(**{"algorithm.name": name, "evaluate.clients": 5})) for name in methods]
    assert samples[0] == samples[1] == samples[2]
    (sample,) = samples[0]
    assert len(sample) == 5
    assert scored(run(**{"evaluate.clients": 5, "seed": 1})) != samples[0]


def test_scores_are_those_of_evaluating_all(run):
    whole, some = run(), run(**{"evaluate.clients": 5})
    assert some.weights_hash == whole.weights_hash
    keys = ["round", "client", "split", "metric"]
    together = some.metrics.merge(whole.metrics, on=keys, suffixes=("", "_whole"))
    assert len(together) == len(some.metrics)
    assert (together["value"] == together["value_whole"]).all()


def test_many_clients_are_sampled_by_default_and_the_report_says_so(run, monkeypatch, tmp_path):
    monkeypatch.setattr(plan_evaluation, "MOST_CLIENTS_SCORED", 10)
    monkeypatch.setattr(plan_evaluation, "CLIENTS_SCORED", 7)
    result = run()
    assert len(next(iter(scored(result)))) == 7
    assert "a fixed sample of 7 clients" in " ".join(render(tmp_path).split())


@pytest.mark.parametrize(("value", "message"), [(21, "there are 20"), (0, "expected"), ("cohort", "expected")])
def test_no_such_sample(run, value, message):
    with pytest.raises(UsageError, match=f"evaluate.clients={value!r}: {message}"):
        run(**{"evaluate.clients": value})
