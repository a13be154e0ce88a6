"""Large arrays of a value are in the object store once, also when a process passes a part of it on."""

import gc

import numpy as np
import pytest
import ray

from helpers.ray_session import start_ray
from rayfed.distributed import shared
from rayfed.distributed.shared import opened, share
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def session():
    start_ray()


def value():
    return {"x": np.arange(10_000.0), "small": np.arange(5), "images": np.arange(30_000, dtype=np.uint8).reshape(3, -1)}


def test_a_value_arrives_whole_and_its_large_arrays_are_in_the_store():
    given = value() | {"function": lambda x: 2 * x}
    sent = share(given)
    assert len(sent.pickle) < 2000
    assert [place.length for place in sent.places] == [80_000, 30_000]
    there = opened(sent)
    for name in ("x", "small", "images"):
        np.testing.assert_array_equal(there[name], given[name])
    assert there["function"](4) == 8
    assert not there["x"].flags.writeable


def test_what_was_opened_is_passed_on_by_reference():
    first = share(value())
    there = opened(first)
    part = {"rows": there["x"][100:9_000], "image": there["images"][1:], "new": np.ones(10_000)}
    again = share(part)
    new, known = again.objects
    assert known == first.objects[0]
    assert [len(array) for array in ray.get(new)] == [80_000]
    assert [(place.start, place.length) for place in again.places[:2]] == [(800, 71_200), (10_000, 20_000)]
    found = opened(again)
    for name, expected in part.items():
        np.testing.assert_array_equal(found[name], expected)
    columns = share(there["images"][:, ::2])  # not a run of bytes, so it is copied
    assert len(columns.objects) == 1
    np.testing.assert_array_equal(opened(columns), there["images"][:, ::2])


def test_a_value_that_is_not_used_any_more_is_forgotten():
    there = opened(share(value()))
    assert [known for known in shared._opened if known.array() is not None]
    del there
    gc.collect()
    assert not [known for known in shared._opened if known.array() is not None]
    copied = share(np.arange(10_000.0))  # perhaps at the same address
    np.testing.assert_array_equal(opened(copied), np.arange(10_000.0))


@pytest.mark.parametrize("unseen", [0, 2])
def test_the_population_of_a_plan_is_passed_on_by_reference(unseen):
    """As a server does with the clients of the command, for its hosts."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (40, 3, 16, 16), dtype=np.uint8) for _ in range(6)]
    clients = [{"train": (x[:30], np.arange(30) % 3), "test": (x[30:], np.arange(10) % 3)} for x in images]
    given = opened(share(Given(clients=clients)))
    plan = make_plan(Config.read({"unseen_clients": unseen, "cohort": 2}), given)
    sent = share(plan.population)
    by_reference = sum(place.length for place in sent.places if place.number)
    assert by_reference == sum(x.nbytes for x in images)
    assert sum(place.length for place in sent.places if not place.number) < 0.05 * by_reference
