"""Batches of which all labels are ignored have no gradient and no score, for torch's losses and for a user's own."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rayfed
from rayfed.core.errors import UsageError
from rayfed.core.network import vectorised
from rayfed.core.outputs import labels_without_loss, meaning_of_outputs, with_loss
from rayfed.core.task import Batch, Task
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan

VOID = 255
SIDE, EACH = 4, 12


def own(outputs, y):
    """The mean over the positions that count, 0 / 0 if there are none."""
    counts = (y != VOID).float()
    losses = F.cross_entropy(outputs, torch.where(y == VOID, 0, y), reduction="none")
    return (losses * counts).sum() / counts.sum()


LOSSES = {
    "module": nn.CrossEntropyLoss(ignore_index=VOID),
    "smoothed": nn.CrossEntropyLoss(ignore_index=VOID, label_smoothing=0.1),
    "weighted": nn.CrossEntropyLoss(ignore_index=VOID, weight=torch.tensor([1.0, 3.0])),
    "own": own,
}


def site(seed, void=()):
    """A client with masks [n, h, w], of which those in `void` are not drawn."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(EACH, 1, SIDE, SIDE)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    y[list(void)] = VOID
    y[:, 0, 0] = VOID  # a position that no one marks
    return {"train": (x[:6], y[:6]), "val": (x[6:9], y[6:9]), "test": (x[9:], y[9:])}


def task(loss, model=None, shape=(2, SIDE, SIDE), labels=None):
    labels = site(0, [2])["train"][1] if labels is None else labels
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 1) if model is None else model
    meaning = meaning_of_outputs(loss, shape, [labels])
    return Task(model, loss, num_clients=2, num_classes=2, outputs=meaning)


def batch(void):
    x, y = map(torch.from_numpy, site(0, [2])["train"])
    return Batch(x[[2, 2]], y[[2, 2]]) if void else Batch(x, y)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
class TestGradients:
    def test_a_void_batch_has_none(self, loss):
        tried = task(loss)
        assert tried.without_loss == (VOID,)
        grads, value, _ = tried.gradients(tried.initial_weights(), batch(void=True))
        assert value == 0
        assert all((grad == 0).all() for grad in grads.values())

    def test_other_batches_keep_their_bits(self, loss):
        tried, (x, y) = task(loss), batch(void=False)
        module = nn.Conv2d(1, 2, 1)
        module.load_state_dict(tried.initial_weights())
        value = loss(module(x), y)
        value.backward()
        grads, found, _ = tried.gradients(tried.initial_weights(), Batch(x, y))
        assert torch.equal(found, value.detach())
        for name, parameter in module.named_parameters():
            assert torch.equal(grads[name], parameter.grad)

    def test_with_vmap(self, loss):
        """One client's batch is void, and the other's is not."""
        tried, (x, y) = task(loss), batch(void=False)
        x, y = torch.stack([x, x]), torch.stack([torch.full_like(y, VOID), y])
        weights = tried.initial_weights()
        with vectorised():
            grads, values, _ = torch.vmap(lambda x, y: tried.gradients(weights, Batch(x, y)))(x, y)
        expected, value, _ = tried.gradients(weights, Batch(x[1], y[1]))
        assert values[0] == 0
        torch.testing.assert_close(values[1], value)
        for name, grad in grads.items():
            assert (grad[0] == 0).all()
            torch.testing.assert_close(grad[1], expected[name])

    def test_a_model_that_is_not_finite_still_diverges(self, loss):
        tried = task(loss)
        weights = {name: torch.full_like(value, torch.nan) for name, value in tried.initial_weights().items()}
        assert tried.gradients(weights, batch(void=True))[1].isnan()


def test_labels_of_examples():
    """As classes [n], with torch's own label for what does not count."""
    y = np.array([0, 1, -100, 1, -100, -100])
    tried = task(F.cross_entropy, nn.Linear(3, 2), (2,), y)
    assert tried.without_loss == (-100,)
    grads, value, _ = tried.gradients(tried.initial_weights(), Batch(torch.randn(2, 3), torch.tensor([-100, -100])))
    assert value == 0
    assert all((grad == 0).all() for grad in grads.values())


class TestClassesOfWeightZero:
    LOSS = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 2.0]))

    def test_have_no_loss(self):
        tried = task(self.LOSS, nn.Linear(3, 3), (3,), np.array([0, 1, 2]))
        assert tried.without_loss == (0,)
        grads, value, _ = tried.gradients(tried.initial_weights(), Batch(torch.randn(4, 3), torch.zeros(4).long()))
        assert value == 0
        assert all((grad == 0).all() for grad in grads.values())

    def test_are_scored_without_a_loss(self, tmp_path):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(9, 3)), np.arange(9) % 3
        clients = [{"train": (x, y), "test": (x, y)}, {"train": (x, y), "test": (x, np.zeros(9, int))}]
        values = {"results": str(tmp_path), "local.batch_size": 1}
        model = nn.Linear(3, 3)
        result = rayfed.run(values, clients=clients, model=model, loss=self.LOSS, rounds=1, quiet=True)
        scores = result.metrics.query("split == 'test' and client >= 0")
        assert scores.query("metric == 'loss'")["client"].tolist() == [0]
        assert scores.query("metric == 'accuracy'")["client"].tolist() == [0, 1]


def test_the_labels_without_a_loss():
    weight = torch.tensor([1.0, 0.0, 0.0])
    given = {"weight": weight, "ignore_index": 7}
    outputs = meaning_of_outputs(nn.CrossEntropyLoss(**given), (3,), [np.array([0, 1, 7])])
    assert labels_without_loss(nn.CrossEntropyLoss(**given), outputs) == (7, 1, 2)
    y, counts = with_loss(torch.tensor([7, 1, 2]), (7, 1, 2))
    assert (y.tolist(), bool(counts)) == ([0, 0, 0], False)
    y, counts = with_loss(torch.tensor([7, 1, 0]), (7, 1, 2))
    assert (y.tolist(), bool(counts)) == ([7, 1, 0], True)
    assert with_loss(torch.tensor([0, 1]), (0, 1))[0].tolist() == [2, 2]


def run(tmp_path, clients, **changes):
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 1)
    options = {"loss": LOSSES["module"], "rounds": 2, "quiet": True} | changes.pop("given", {})
    values = {"results": str(tmp_path), "local.lr": 0.1, "local.batch_size": 1, **changes}
    return rayfed.run(values, clients=clients, model=model, **options)


class TestRuns:
    @pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
    @pytest.mark.parametrize("width", [1, 2])
    def test_void_examples_are_passed_over(self, tmp_path, loss, width):
        """Of six batches of one example, only one has a mask: a round is one plain step."""
        clients = [site(0, [0, 1, 3, 4, 5])] * 2
        given = {"loss": loss, "rounds": 1}
        trained = run(tmp_path, clients, given=given, **{"placement.vmap_clients": width}).server["weights"]
        torch.manual_seed(0)
        module = nn.Conv2d(1, 2, 1)
        x, y = map(torch.from_numpy, clients[0]["train"])
        loss(module(x[2:3]), y[2:3]).backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        for name, value in module.state_dict().items():
            torch.testing.assert_close(trained[name], value)

    def test_a_client_without_labels_leaves_the_model(self, tmp_path):
        model = run(tmp_path, [site(0, range(EACH))], given={"rounds": 1}).server["weights"]
        torch.manual_seed(0)
        for name, value in nn.Conv2d(1, 2, 1).state_dict().items():
            assert torch.equal(model[name], value)

    def test_void_tests_have_no_score(self, tmp_path):
        scores = run(tmp_path, [site(0, [9, 10, 11]), site(1)]).metrics.query("client >= 0")
        assert set(scores.query("split == 'test'")["client"]) == {1}
        assert set(scores.query("split == 'val'")["client"]) == {0, 1}
        assert scores["value"].notna().all()

    @pytest.mark.parametrize("key", [{"early_stopping.patience": 1}, {"select.metric": "accuracy"}])
    def test_void_validation_cannot_choose(self, key):
        clients = [site(k, [6, 7, 8]) for k in range(2)]
        words = "needs validation scores, and all validation labels of the first 2 clients are 255, which is ignored"
        with pytest.raises(UsageError, match=words):
            make_plan(Config.read(key), Given(clients=clients, model=nn.Conv2d(1, 2, 1), loss=LOSSES["module"]))
