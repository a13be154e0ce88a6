"""The user's losses, metrics and generators: nothing of them changes the data, and equal seeds give equal bits."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rayfed
from rayfed.augment.base import Augment
from rayfed.metrics.base import OfPredictions, Value

pytestmark = pytest.mark.usefixtures("here")


def clients(sizes=(40, 60), shift=0):
    rng = np.random.default_rng(0)
    parts = []
    for size in sizes:
        x = rng.normal(size=(size + 20, 6)).astype(np.float32)
        y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1) + shift
        parts.append({"train": (x[:size], y[:size]), "test": (x[size:], y[size:])})
    return parts


def numbers():
    return [
        {split: (x, (50 + 10 * x[:, 0]).astype(np.float32)) for split, (x, _) in client.items()} for client in clients()
    ]


def net(outputs=3):
    torch.manual_seed(0)
    return nn.Linear(6, outputs)


def run(loss=None, given=None, model=net, rounds=3, **changes):
    values = {"experiment": "own_code", "resume": False, "local.lr": 0.1} | changes
    return rayfed.run(values, clients=given or clients(), model=model, loss=loss, rounds=rounds, quiet=True)


def scores(result, metric="loss"):
    rows = result.metrics.query("metric == @metric and split == 'test'")
    return rows.sort_values(["round", "client"])["value"].to_numpy()


def summed(outputs, y):
    return F.cross_entropy(outputs, y, reduction="sum")


def sum_over_a_constant(outputs, y):
    return F.cross_entropy(outputs, y, reduction="sum") / 32 + 0.1


@pytest.mark.parametrize("loss", [summed, sum_over_a_constant, nn.CrossEntropyLoss(reduction="sum")])
def test_a_sum_over_the_batch_is_refused(loss):
    with pytest.raises(rayfed.UsageError, match=r"^loss: sums over the batch: .*return the mean over the batch"):
        run(loss)


def contrastive(outputs, y):
    """Depends on the other examples of the batch, and grows with the logarithm of their number."""
    similarity = outputs @ outputs.T
    return (torch.logsumexp(similarity, 1) - similarity.diagonal()).mean() + F.cross_entropy(outputs, y)


def weighted(outputs, y):
    return F.cross_entropy(outputs, y, torch.tensor([1.0, 2.0, 0.5]))


@pytest.mark.parametrize("loss", [contrastive, weighted])
def test_a_mean_that_depends_on_the_batch_is_taken(loss):
    assert len(scores(run(loss)))


def scaled_in_place(outputs, y):
    y -= 50
    y /= 10
    return F.mse_loss(outputs[:, 0], y)


def scaled(outputs, y):
    return F.mse_loss(outputs[:, 0], (y - 50) / 10)


def merged_in_place(outputs, y):
    y[y == 2] = 1
    return F.cross_entropy(outputs.clamp_(-2, 2), y)


def merged(outputs, y):
    return F.cross_entropy(outputs.clamp(-2, 2), torch.where(y == 2, 1, y))


def from_one_in_place(outputs, y):
    y -= 1
    return F.cross_entropy(outputs, y)


def from_one(outputs, y):
    return F.cross_entropy(outputs, y - 1)


@pytest.mark.parametrize(
    ("in_place", "on_a_copy", "given"),
    [
        (scaled_in_place, scaled, numbers()),
        (merged_in_place, merged, clients()),
        (from_one_in_place, from_one, clients(shift=1)),
    ],
)
@pytest.mark.parametrize("algorithm", ["fedavg", "apfl"])
def test_a_loss_that_changes_labels_or_outputs_in_place_gives_the_numbers_of_one_that_does_not(
    in_place, on_a_copy, given, algorithm
):
    results = [run(loss, given=given, **{"algorithm.name": algorithm}) for loss in (in_place, on_a_copy)]
    assert scores(results[0]).tolist() == scores(results[1]).tolist()
    assert results[0].weights_hash == results[1].weights_hash


@dataclass(frozen=True, kw_only=True)
class Greedy(OfPredictions):
    """Changes all that it is given."""

    def measure(self, logits, y):
        logits.neg_()
        y.zero_()
        yield Value("greedy", float(logits.mean()), len(y))


def test_a_metric_that_changes_what_it_is_given_changes_no_other_score():
    plain = run()
    disturbed = run(**{"metrics.test_own_code:Greedy": True})
    for metric in ("accuracy", "loss"):
        assert scores(disturbed, metric).tolist() == scores(plain, metric).tolist()


class Dropping(nn.Module):
    """Leaves its second layer out at random, by the generator that `coin` draws from."""

    def __init__(self, coin):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.coin = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), coin

    def forward(self, x):
        z = torch.relu(self.a(x))
        if not self.training or self.coin() < 0.5:
            z = z + torch.relu(self.b(z))
        return self.c(z)


def noisy(outputs, y):
    return F.cross_entropy(outputs, y) * (1 + random.random())


@dataclass(frozen=True, kw_only=True)
class Shifted(Augment):
    def __call__(self, x):
        return x + np.random.normal()


@dataclass(frozen=True, kw_only=True)
class Bootstrap(OfPredictions):
    def measure(self, logits, y):
        rows = np.random.randint(0, len(y), len(y))
        yield Value("bootstrap", float((logits.argmax(1) == y)[rows].double().mean()), len(y))


def drawn(number):
    x = np.random.normal(size=(10, 6)).astype(np.float32)
    y = [random.randrange(3) for _ in range(10)]
    return {"train": (x[:8], y[:8]), "test": (x[8:], y[8:])}


DRAWS = {
    "model, Python": {"model": lambda: Dropping(random.random)},
    "model, NumPy": {"model": lambda: Dropping(lambda: np.random.rand())},
    "loss": {"loss": noisy},
    "augmentation": {"augment.name": "test_own_code:Shifted"},
    "metric": {"metrics.test_own_code:Bootstrap": True},
}


@pytest.mark.parametrize("case", DRAWS)
def test_equal_seeds_give_equal_bits_whichever_generator_is_drawn_from(case):
    random.seed(7)
    np.random.seed(7)
    results = [run(seed=seed, **DRAWS[case]) for seed in (1, 1, 2)]
    rows = [(result.weights_hash, result.metrics["value"].tolist()) for result in results]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]
    assert random.random() == random.Random(7).random()  # the user's own draws go on as if nothing had run
    assert np.random.rand() == np.random.RandomState(7).rand()


def test_clients_made_on_demand_may_draw_from_global_generators():
    made = rayfed.Clients({"train": np.full(20, 8), "test": np.full(20, 2)}, drawn)
    hashes = {
        rayfed.run(
            {"experiment": "own_code", "resume": False}, clients=made, num_classes=3, model=net, rounds=2, quiet=True
        ).weights_hash
        for _ in range(2)
    }
    assert len(hashes) == 1


def test_runs_in_several_threads_end_as_one_after_the_other():
    def of_seed(seed):
        model = lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))  # noqa: E731
        return run(model=model, seed=seed, experiment=f"thread-{seed}").weights_hash

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(of_seed, range(4)))
    assert together == [of_seed(seed) for seed in range(4)]


GAMMA = 0.0
OPTIONS = {"gamma": 0.0}


def focal(outputs, y):
    losses = F.cross_entropy(outputs, y, reduction="none")
    return ((1 - (-losses).exp()) ** GAMMA * losses).mean()


def focal_by_options(outputs, y):
    def power():
        return OPTIONS["gamma"]

    losses = F.cross_entropy(outputs, y, reduction="none")
    return ((1 - (-losses).exp()) ** power() * losses).mean()


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x) * (1 + GAMMA)


@pytest.mark.parametrize("given", [{"loss": focal}, {"loss": focal_by_options}, {"model": Scaling}])
def test_a_global_that_the_users_code_reads_belongs_to_the_trial(given, monkeypatch):
    results = []
    for gamma in (0.0, 2.0, 0.0):
        monkeypatch.setitem(globals(), "GAMMA", gamma)
        monkeypatch.setitem(OPTIONS, "gamma", gamma)
        results.append(run(resume=True, **given))
    assert len({result.trial for result in results}) == 2
    assert results[0].trial == results[2].trial
    assert scores(results[0]).tolist() != scores(results[1]).tolist()


LOG = open(__file__)  # noqa: SIM115


def logging(outputs, y):
    LOG.tell()
    return F.cross_entropy(outputs, y)


def test_a_global_that_cannot_be_compared_is_named(capsys):
    rayfed.run(
        {"experiment": "own_code", "resume": False}, clients=clients(), model=net, loss=logging, rounds=1, quiet=False
    )
    shown = capsys.readouterr().err
    assert "your code reads globals that cannot be compared" in shown
    assert "LOG (TextIOWrapper)" in shown
