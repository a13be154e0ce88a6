"""The partition rules on label arrays that are small enough to work out by hand."""

import numpy as np
import pytest

from helpers.partitions import split
from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset

WHOLE = {"test": 0.0, "validation": 0.0}


def of(labels, **others):
    labels = np.asarray(labels)
    return Dataset.of("tiny", np.zeros((len(labels), 1), np.float32), labels, **others)


def held(parts):
    return [sorted(np.concatenate(part[2:]).tolist()) for part in parts]


def classes(parts, dataset):
    return [sorted(set(dataset.labels[rows].tolist())) for rows in held(parts)]


class TestShards:
    def test_each_client_gets_whole_shards_of_the_rows_sorted_by_class(self):
        dataset = of([2, 1, 0, 0, 1, 2, 2, 1, 0, 0, 1, 2])
        # Sorted by class and, within one, by row: 2 3 8 9 | 1 4 7 10 | 0 5 6 11; six shards of two.
        shards = [{2, 3}, {8, 9}, {1, 4}, {7, 10}, {0, 5}, {6, 11}]
        hands = held(split("shards", dataset, clients=3, **WHOLE))
        for hand in hands:
            assert sum(shard <= set(hand) for shard in shards) == 2
            assert len(hand) == 4
        assert sorted(np.concatenate(hands)) == list(range(12))


class TestPowerLaw:
    def test_clients_have_neighbouring_classes_and_sizes_between_the_minimum_and_what_is_there(self):
        """6 clients, 3 classes, 2 each: client i has classes i and i + 1 modulo 3, so that 4 clients share a class."""
        dataset = of(np.arange(300) % 3)
        parts = split("power_law", dataset, clients=6, least=5, **WHOLE)
        assert classes(parts, dataset) == [[0, 1], [1, 2], [0, 2]] * 2
        counts = np.array([np.bincount(dataset.labels[rows], minlength=3) for rows in held(parts)])
        assert counts[counts > 0].min() >= 5
        assert np.all((counts.sum(0) > 100 - 4) & (counts.sum(0) <= 100))  # four floors lose less than a row each
        flat = np.concatenate(held(parts))
        assert len(np.unique(flat)) == len(flat)

    def test_without_spread_all_get_the_same(self):
        dataset = of(np.arange(300) % 3)
        parts = split("power_law", dataset, clients=6, least=5, sigma=0.0, **WHOLE)
        assert [len(rows) for rows in held(parts)] == [50] * 6  # 25 of each of two classes

    def test_logarithms_of_shares_have_the_spread(self):
        """The rows beyond the minimum, of a class with so many that floors do not matter."""
        dataset = of(np.arange(2_000_000) % 2)
        parts = split("power_law", dataset, clients=400, classes_per_client=1, least=1, sigma=1.0, **WHOLE)
        beyond = np.array([len(rows) - 1 for rows in held(parts)])
        assert np.log(beyond).std() == pytest.approx(1.0, abs=0.1)

    def test_a_minimum_that_a_class_does_not_have_is_refused(self):
        message = r"^partition.least=60: class 0 of tiny has 100 rows for 2 clients; use fewer clients, or a smaller"
        with pytest.raises(UsageError, match=message):
            split("power_law", of(np.arange(300) % 3), clients=3, least=60, **WHOLE)


class TestPathological:
    def test_groups_of_clients_share_their_classes(self):
        """8 clients, 4 classes, 2 each: 8 / 4 x 2 = 4 clients a class, so 0-3 hold classes 0, 1 and 4-7 hold 2, 3."""
        dataset = of(np.arange(400) % 4)
        parts = split("pathological", dataset, clients=8, **WHOLE)
        assert classes(parts, dataset) == [[0, 1]] * 4 + [[2, 3]] * 4
        assert sorted(np.concatenate(held(parts))) == list(range(400))

    def test_balanced_parts_are_cut_in_the_datasets_order(self):
        """Class 0 has rows 0 2 4 6 8 10 12, so 3 and 4 rows for its two clients; class 1 rows 1 3 5 7 9 11."""
        dataset = of(np.arange(13) % 2)
        parts = split("pathological", dataset, clients=2, balanced=True, **WHOLE)
        assert held(parts) == [sorted([0, 2, 4, 1, 3, 5]), sorted([6, 8, 10, 12, 7, 9, 11])]

    def test_all_but_the_last_draw_at_least_a_tenth_and_less_than_an_equal_part(self):
        """1,000 rows a class over 4 clients: the first three draw from 25..249, the last has the rest."""
        dataset = of(np.arange(2000) % 2)
        drawn, last = [], []
        for seed in range(40):
            parts = split("pathological", dataset, clients=4, classes_per_client=2, seed=seed, **WHOLE)
            counts = np.array([np.bincount(dataset.labels[rows]) for rows in held(parts)])
            drawn += counts[:3].ravel().tolist()
            last += counts[3].tolist()
            assert (counts.sum(0) == 1000).all()
        assert 25 <= min(drawn) < 35
        assert 240 <= max(drawn) < 250
        assert min(last) > 250


class TestLabelK:
    def test_client_i_has_class_i_and_one_more(self):
        dataset = of(np.arange(600) % 6)
        parts = split("label_k", dataset, clients=12, **WHOLE)
        found = classes(parts, dataset)
        assert all(len(own) == 2 and number % 6 in own for number, own in enumerate(found))
        assert sorted(np.concatenate(held(parts))) == list(range(600))

    def test_a_class_is_shared_equally_by_those_who_have_it(self):
        dataset = of(np.arange(600) % 6)
        parts = split("label_k", dataset, clients=6, classes_per_client=3, **WHOLE)
        counts = np.array([np.bincount(dataset.labels[rows], minlength=6) for rows in held(parts)])
        for of_class in counts.T:
            assert np.ptp(of_class[of_class > 0]) <= 1

    def test_one_class_each_is_exact(self):
        assert held(split("label_k", of([0, 1, 2, 2, 1, 0]), clients=3, classes_per_client=1, **WHOLE)) == [
            [0, 5], [1, 4], [2, 3],
        ]  # fmt: skip


class TestQuantity:
    def test_sizes_differ_and_class_mixes_do_not(self):
        dataset = of(np.arange(20_000) % 4)
        rows = held(split("quantity", dataset, clients=10, alpha=0.5, **WHOLE))
        sizes = np.array([len(own) for own in rows])
        assert sizes.min() >= 10
        assert sizes.max() > 3 * np.median(sizes)
        largest = np.bincount(dataset.labels[rows[sizes.argmax()]]) / sizes.max()
        np.testing.assert_allclose(largest, 0.25, atol=0.03)
        assert sorted(np.concatenate(rows)) == list(range(20_000))


class TestDirichlet:
    def test_without_the_cap_a_client_may_have_almost_everything(self):
        dataset = of(np.arange(5000) % 10)
        largest = {}
        for capped in (True, False):
            options = {"clients": 10, "min_size": 1, "capped": capped, **WHOLE}
            rows = [held(split("dirichlet", dataset, seed=seed, **options)) for seed in range(20)]
            largest[capped] = np.mean([max(map(len, own)) for own in rows])
        # With the cap no one is above an equal share and one class: 500 + 500.
        assert largest[True] < 1000 < largest[False]


class TestLda:
    def test_a_client_takes_what_its_mix_says_and_then_what_is_left(self):
        """A vanishing alpha gives one class each; the last clients take what the first have left."""
        dataset = of(np.arange(40) % 4)
        rows = held(split("lda", dataset, clients=4, alpha=1e-9, seed=1, **WHOLE))
        assert [len(own) for own in rows] == [10] * 4
        assert len(set(dataset.labels[rows[0]])) == 1
        assert sorted(np.concatenate(rows)) == list(range(40))

    def test_the_prior_keeps_rare_classes_rare(self):
        """Dirichlet(alpha x prior) has the prior as its mean: a class of 5 % stays at 5 % of a client, on average."""
        dataset = of(np.repeat([0, 1], [1900, 100]))
        shares = {base: [] for base in ("prior", "ones")}
        for base, found in shares.items():
            for seed in range(60):
                part = split("lda", dataset, clients=2, base=base, alpha=20, per_client=50, seed=seed, **WHOLE)[0]
                found.append((dataset.labels[part.train] == 1).mean())
        assert np.mean(shares["prior"]) == pytest.approx(0.05, abs=0.02)
        assert np.mean(shares["ones"]) == pytest.approx(0.5, abs=0.05)


class TestDomains:
    def dataset(self):
        """Domain a has 40 rows, domain b 100; every fifth is a test example."""
        row = np.arange(140)
        return of(row % 2, is_test=row % 5 == 0, domain=(row >= 40).astype(np.int16), domains=("a", "b"))

    def test_ten_parts_of_which_two_take_part(self):
        parts = split("domains", self.dataset(), parts=10, clients_per_domain=2, validation=0.0)
        assert [len(part.train) for part in parts] == [4, 4, 8, 8]  # 32 and 80 training rows in ten parts
        more = split("domains", self.dataset(), parts=10, clients_per_domain=4, validation=0.0)
        assert held(parts)[0] == held(more)[0]  # more parties join those that were there


class TestDomainMixes:
    def dataset(self, size=5000):
        row = np.arange(2 * size)
        return of(row % 5, domain=(row >= size).astype(np.int16), domains=("a", "b"), num_classes=5)

    def test_twelve_clients_of_three_domains_would_be_four_of_each(self):
        dataset = self.dataset()
        parts = split("domain_mixes", dataset, validation=0.1)
        assert [part.domain for part in parts] == ["a"] * 4 + ["b"] * 4
        rows = held(parts)
        assert len(set(np.concatenate(rows))) == sum(map(len, rows))
        sizes = [len(own) for own in rows]
        assert 600 < min(sizes) < max(sizes) < 1400  # ~ Normal(1000, 100^2)
        assert len(set(sizes)) > 4
        mixes = np.array([np.bincount(dataset.labels[own], minlength=5) / len(own) for own in rows])
        # Dirichlet(40, 40, 40, 40, 40): each share has mean 0.2 and sd sqrt(0.2 x 0.8 / 201) = 0.028.
        assert 0.015 < mixes.std() < 0.045
        assert all(len(part.val) == int(0.1 * size) for part, size in zip(parts, sizes, strict=True))

    def test_a_client_gets_what_is_left_of_a_class(self):
        """Two classes wanted half and half by clients of 200 rows; of class 1 there are 40: all are the first one's."""
        dataset = of(np.repeat([0, 1], [960, 40]))
        parts = split("domain_mixes", dataset, size_sd=0, alpha=1e9, validation=0.0)
        counts = np.array([np.bincount(dataset.labels[part.train], minlength=2) for part in parts])
        assert counts[:, 1].tolist() == [40, 0, 0, 0]
        assert all(abs(count - 100) <= 1 for count in counts[:, 0])
        equal = split("domain_mixes", dataset, size_sd=0, alpha=1e9, base="prior", validation=0.0)
        assert all(7 <= np.bincount(dataset.labels[part.train])[1] <= 8 for part in equal)

    def test_a_client_without_rows_is_drawn_again_and_refused_in_the_end(self):
        dataset = of(np.arange(60) % 2)
        for seed in range(20):  # sizes ~ Normal(12, 10^2): the least of four is below 1 in two draws of five
            parts = split("domain_mixes", dataset, seed=seed, size_sd=10, validation=0.0)
            assert min(map(len, held(parts))) > 0
        with pytest.raises(UsageError, match=r"^partition.clients_per_domain=61: in each of 1000 draws, .* got no row"):
            split("domain_mixes", dataset, clients_per_domain=61)


DRAWS = r"partition.alpha=0.01: in 1000 draws, \d+ to 19 of 20 clients"


@pytest.mark.parametrize(
    ("name", "size", "classes", "options", "words"),
    [
        ("pathological", 80, 4, {"clients": 1}, "class 2 of tiny; 1 clients x 2 should be a multiple of its 4"),
        ("pathological", 80, 4, {"clients": 5, "classes_per_client": 1}, "no client is left for class 3"),
        ("pathological", 80, 4, {"clients": 4, "classes_per_client": 5}, "classes_per_client=5: tiny has 4 classes"),
        ("label_k", 9, 3, {"clients": 3, "classes_per_client": 4}, "classes_per_client=4: tiny has 3 classes"),
        ("quantity", 30, 2, {"clients": 4}, "min_size=10: 4 clients would need 40 examples, tiny has 30"),
        ("quantity", 300, 2, {"clients": 20, "alpha": 0.01}, DRAWS),
        ("domains", 9, 3, {"parts": 1, "clients_per_domain": 2}, "parts=1: fewer than partition.clients_per_domain=2"),
    ],
)
def test_numbers_that_do_not_fit(name, size, classes, options, words):
    with pytest.raises(UsageError, match=words):
        split(name, of(np.arange(size) % classes), **options)


class TestNatural:
    def test_a_share_of_each_clients_rows_for_testing(self):
        dataset = of(np.arange(20) % 2, client=np.repeat([3, 8], [8, 12]), is_test=np.arange(20) >= 8)
        parts = split("natural", dataset, test=0.25, validation=0.0)
        assert [(part.domain, len(part.train), len(part.test)) for part in parts] == [
            ("client-3", 6, 2), ("client-8", 9, 3),
        ]  # fmt: skip
