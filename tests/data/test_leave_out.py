"""leave_out: a domain that nobody holds becomes the server's "ood" test set."""

import numpy as np
import pytest
import torch

from helpers.federations import blobs, blueprint, simulate
from rayfed.algorithms.ditto import Ditto
from rayfed.algorithms.fedavg import Solo
from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset
from rayfed.data.loading import check_rows, dataset_without_domain, population_without_domain
from rayfed.data.user_clients import user_population


def toy(**more):
    """Three domains of two rows each."""
    domain = np.repeat(np.arange(3, dtype=np.int16), 2)
    given = {"domain": domain, "domains": ("a", "b", "c"), **more}
    return Dataset.of("toy", np.arange(6, dtype=np.float32)[:, None], np.zeros(6, int), **given)


def test_refusals():
    alone = toy(domains=("a",), domain=np.zeros(6, np.int16))
    with pytest.raises(UsageError, match=r"^leave_out=a: leaves no domain of toy to train on$"):
        dataset_without_domain(alone, "a")


def test_a_partition_must_not_hand_it_out():
    words = r"^partition: gives clients row 2 of toy; expected 0\.\.5, of no domain that is left out$"
    with pytest.raises(UsageError, match=words):
        check_rows(dataset_without_domain(toy(), "b"), np.array([0, 2, 5]))
    for row in (-1, 6):
        with pytest.raises(UsageError, match=rf"^partition: gives clients row {row} of toy; expected 0\.\.5$"):
            check_rows(toy(), np.array([0, row]))


def test_own_clients_of_the_domain_become_the_test_set():
    people = population_without_domain(blobs(4), "d1")  # domains d0 d1 d0 d1
    assert [(client.id, client.domain) for client in people.clients] == [(0, "d0"), (1, "d0")]
    (test,) = people.tests
    assert len(test.examples) == (26 + 41) + 2 * (9 + 15)
    assert np.array_equal(test.examples.x[:26], blobs(4).clients[1].train.x)


def test_empty_parts_of_own_clients_change_no_dtype():
    images, none = np.full((4, 1, 8, 8), 200, np.uint8), np.zeros((0, 1, 8, 8))  # floats, as NumPy makes them
    part, empty = (images, np.arange(4) % 2), (none, np.zeros(0))
    given = [{"train": part, "val": empty, "test": part, "domain": domain} for domain in "ab"]
    (test,) = population_without_domain(user_population(given), "b").tests
    assert (test.examples.x.dtype, test.examples.x.shape) == (np.uint8, (8, 1, 8, 8))
    assert test.examples.y.tolist() == [0, 1, 0, 1] * 2
    given[1] |= {"train": empty, "test": empty}
    with pytest.raises(UsageError, match=r"^test set b: has no examples, or clients train on all of them$"):
        population_without_domain(user_population(given), "b")


@pytest.mark.parametrize("points", [["downloaded"], ["trained"]])
def test_without_a_global_model_each_clients_own_is_scored(points):
    people = population_without_domain(blobs(4), "d1")
    server, records = simulate(blueprint(Solo(), people), people, points=points)
    scores = {s.client: s for s in records[-1].scores if s.split == "ood" and s.metric == "accuracy"}
    assert set(scores) == {client.id for client in people.clients}
    assert {(s.domain, s.point, s.n) for s in scores.values()} == {("d1", "downloaded", len(people.tests[0].examples))}
    examples = people.tests[0].examples
    x, y = torch.as_tensor(examples.x), torch.as_tensor(examples.y)
    for i, client in enumerate(people.clients):
        weights = server.fleet.states[i]["weights"]
        right = server.ctx.task.forward(weights, x, train=False).logits.argmax(1) == y
        assert scores[client.id].value == pytest.approx(right.double().mean().item())


def test_the_global_model_is_scored_on_it_whatever_else_is():
    people = population_without_domain(blobs(4), "d1")
    _, records = simulate(blueprint(Ditto(), people), people, points=("downloaded",))
    found = {(s.client, s.domain, s.split, s.metric) for s in records[-1].scores if s.point == "global"}
    assert found == {(-1, "d1", "ood", "accuracy"), (-1, "d1", "ood", "loss")}
