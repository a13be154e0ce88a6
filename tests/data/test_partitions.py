"""Every partition: who gets what, pinned for ever, and what cannot be divided."""

import dataclasses

import numpy as np
import pytest

from helpers.partitions import OWNED, pin_of_parts, split, toy
from rayfed.core.errors import UsageError
from rayfed.data.partitions.base import draw_until

MIXED = {"domain": (np.arange(1200) % 2).astype(np.int16)}  # so that both domains have examples of most classes


@pytest.mark.parametrize(
    ("name", "options", "changes", "expected"),
    [
        ("domains", {}, {}, "4221797059bbe216"),
        ("domains", {"clients_per_domain": 3, "seed": 1}, {}, "ab022e6231507b89"),
        ("iid", {"test": 0.25, "clients": 7}, {}, "6b2d6bfc5c168b6a"),
        ("dirichlet", {"test": 0.25, "clients": 10}, {}, "b66e107c423603c9"),
        ("dirichlet", {"test": 0.25, "clients": 5, "alpha": 0.5, "seed": 3, "min_size": 100}, {}, "63e44431456363cb"),
        ("lda", {"test": 0.25, "clients": 10, "base": "prior"}, {}, "32dcd40360b84851"),
        ("lda", {"test": 0.25, "clients": 10, "per_client": 50}, {}, "416a62e41c78901c"),
        ("dirichlet", {"clients": 6, "capped": False, "common_test": True}, {}, "fadf426627418214"),
        ("quantity", {"test": 0.25, "clients": 8}, {}, "483f2e64ab3874aa"),
        ("label_k", {"test": 0.25, "clients": 9}, {}, "64597851b2ae486a"),
        ("pathological", {"test": 0.25, "clients": 10}, {}, "d033cc700583f53c"),
        ("pathological", {"test": 0.25, "clients": 10, "balanced": True}, {}, "7db03c49b05894cd"),
        ("shards", {"test": 0.25, "clients": 12}, {}, "4d3b53a4b8478450"),
        ("domain_mixes", {"size_sd": 10}, {}, "16a132cb9ec20292"),
        ("domains", {"parts": 10, "clients_per_domain": 10, "test": 0.2}, {}, "839a881a973e2354"),
        ("classes", {}, MIXED, "4eea098d858fd7c7"),
        ("classes", {"groups": 3, "test_absent": True, "seed": 2}, MIXED, "48cae736c55c8ab9"),
        ("natural", {}, OWNED, "12db3c7b0c62ff0e"),
        ("natural", {"test": 0.25}, OWNED, "7c3205e707bd8bbb"),
    ],
)
def test_rows_are_the_same_for_ever(name, options, changes, expected):
    dataset = toy(**changes)
    parts = split(name, dataset, **options)
    assert pin_of_parts(parts) == expected
    assert pin_of_parts(split(name, dataset, **options)) == expected
    assert pin_of_parts(split(name, dataset, **{**options, "seed": 11})) != expected
    rows = np.concatenate([rows for part in parts for rows in part[2:]])
    assert len(np.unique(rows)) == len(rows)
    if "per_client" not in options and name != "domain_mixes":
        assert len(rows) == 1200


def test_a_client_by_nature_is_of_the_domain_of_its_rows():
    owner = np.arange(1200) // 200
    parts = split("natural", toy(client=owner))
    assert [part.domain for part in parts] == ["left"] * 3 + ["right"] * 3
    parts = split("natural", toy(client=np.arange(1200) % 2))
    assert [part.domain for part in parts] == ["mixed", "mixed"]
    parts = split("natural", toy(client=owner + 5, domain=np.zeros(1200, np.int16), domains=("all",)))
    assert [part.domain for part in parts[:2]] == ["client-5", "client-6"]


def test_a_domain_that_nobody_holds_is_dealt_to_nobody():
    dataset = toy(ood=("left",))
    assert [part.domain for part in split("domains", dataset)] == ["right"]
    rows = np.concatenate([np.concatenate(part[2:]) for part in split("iid", dataset, clients=3)])
    assert rows.min() == 600
    assert len(rows) == 600


def test_shares_round_as_the_published_splits_do():
    (part,) = split("iid", toy(1103), clients=1, validation=0.1, test=0.25)
    assert len(part.test) == 1103 - 827  # 827 = floor(0.75 x 1103)
    assert len(part.val) == 82
    assert part.domain == "mixed"
    (part,) = split("iid", toy(100), clients=1, validation=0.0, test=0.0)
    assert [len(rows) for rows in part[2:]] == [100, 0, 0]
    (part,) = split("iid", toy(100), clients=1, validation=0.29, test=0.0)
    assert len(part.val) == 29  # 0.29 x 100 is 28.999… in floats


def test_a_draw_that_rarely_does_is_repeated():
    random = np.random.default_rng(1)
    draws = []

    def draw():
        sizes = random.binomial(10, 0.5, 8)
        draws.append(sizes)
        return [np.arange(size) for size in sizes]

    rows = draw_until(draw, 5, keys="")  # (1 - P[Bin(10, 1/2) < 5])^8 = 0.623^8 = 1 / 44
    assert [len(held) for held in rows] == draws[-1].tolist()
    assert min(draws[-1]) >= 5
    assert len(draws) > 20


@pytest.mark.parametrize("alpha", [1e-6, 1e-37])
def test_a_vanishing_alpha_neither_fails_nor_divides_by_zero(alpha):
    parts = split("lda", toy(), clients=4, alpha=alpha, base="prior")
    assert [sum(map(len, part[2:])) for part in parts] == [300] * 4


@pytest.mark.parametrize(
    ("name", "options", "facts"),
    [
        ("iid", {"clients": 1201, "test": 0.0}, ["client 1200 (mixed) of toy", "as 1 of 1201 clients; use fewer"]),
        ("dirichlet", {"clients": 5000}, ["5000 clients would need 5000 examples, toy has 1200"]),
        (
            "iid",
            {"clients": 1200},
            ["client 3 (", "no training examples (1 test examples only), as 240 of 1200 clients"],
        ),
        ("domains", {"clients_per_domain": 481}, ["client 480 (left) of toy has no training examples"]),
        ("natural", {}, ["toy does not define clients", "choose domains or iid"]),
        ("dirichlet", {"min_size": 100}, ["min_size=100", "20 clients would need 2000 examples", "has 1200"]),
        ("dirichlet", {"alpha": 0}, ["partition.alpha=0", "more than 0"]),
        ("iid", {"validation": 1}, ["partition.validation=1", "less than 1"]),
        ("iid", {"alpha": 1}, ["partition.alpha: no such key"]),
    ],
)
def test_what_cannot_be_divided_is_one_line(name, options, facts):
    with pytest.raises(UsageError) as caught:
        split(name, toy(), **options)
    message = str(caught.value)
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize("name", ["iid", "dirichlet"])
def test_common_test_parts_share_out_what_the_dataset_keeps_for_testing(name):
    dataset = toy()
    parts = split(name, dataset, clients=5, common_test=True, validation=0.0)
    assert [len(part.test) for part in parts] == [48] * 5
    assert set(np.concatenate([part.test for part in parts])) == set(np.flatnonzero(dataset.is_test))
    assert set(np.concatenate([part.train for part in parts])) == set(np.flatnonzero(~dataset.is_test))
    with pytest.raises(UsageError, match=r"common_test=true: toy has 0 test examples of its own"):
        split(name, toy(is_test=np.zeros(1200, bool)), clients=5, common_test=True)


@pytest.mark.parametrize("name", ["iid", "dirichlet", "lda", "quantity", "label_k", "pathological", "shards"])
def test_the_datasets_own_split_is_kept_unless_a_share_is_given(name):
    dataset = toy()
    kept, drawn = split(name, dataset, clients=5), split(name, dataset, clients=5, test=0.25)
    for part, other in zip(kept, drawn, strict=True):
        assert dataset.is_test[part.test].all()
        assert not dataset.is_test[np.concatenate([part.train, part.val])].any()
        assert set(np.concatenate(part[2:])) == set(np.concatenate(other[2:]))  # a share changes who tests on what only
    assert dataset.is_test[np.concatenate([part.train for part in drawn])].any()
    without = toy(is_test=np.zeros(1200, bool))
    assert pin_of_parts(split(name, without, clients=5)) == pin_of_parts(split(name, without, clients=5, test=0.25))


def test_clients_hold_groups_of_classes_and_are_tested_on_them_or_on_the_others():
    row = np.arange(1200)
    dataset = dataclasses.replace(toy(is_test=row % 7 == 0), labels=row % 10)
    own = split("classes", dataset, groups=3, validation=0.0, per_client=100)
    assert [part.domain for part in own] == ["left"] * 3 + ["right"] * 3
    for part, classes in zip(own[:3], ({0, 1, 2, 3}, {4, 5, 6}, {7, 8, 9}), strict=True):
        assert set(dataset.labels[part.train]) <= classes
        assert set(dataset.labels[part.test]) <= classes
        assert 90 <= len(part.train) <= 100
    away = split("classes", dataset, groups=3, validation=0.0, test_absent=True)
    for part, classes in zip(away[:3], ({0, 1, 2, 3}, {4, 5, 6}, {7, 8, 9}), strict=True):
        assert set(dataset.labels[part.train]) <= classes
        assert not set(dataset.labels[part.test]) & classes
    tested = np.concatenate([part.test for part in away])
    assert sorted(tested) == np.flatnonzero(dataset.is_test).tolist()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"domains": ("left",)}, "dataset toy: domain 0..1, but domains names 1"),
        ({"source": np.full(1200, -3)}, "dataset toy: source -3..-3, but sources names 1"),
    ],
)
def test_a_dataset_whose_codes_do_not_fit_its_names_is_refused(changes, words):
    with pytest.raises(UsageError, match=f"^{words}$"):
        toy(**changes)
