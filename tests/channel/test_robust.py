"""Robust rules against hand-made vectors, optima of SciPy, plain loops, and the values of another library."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from helpers.nine_updates import NINE
from rayfed.channel.robust import (
    Bulyan,
    CentredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    NormBound,
    TrimmedMean,
)
from rayfed.channel.updates import Updates


def updates_of(rows, weights=None, start=0.0):
    """The updates `rows` of clients that send a model of two tensors and a counter, which was `start` everywhere."""

    def sent(row, steps):
        row = torch.tensor(row, dtype=torch.float64) + start
        return {"weights": {"a": row[:3].clone(), "b": row[3:].clone(), "steps": torch.tensor(steps)}}

    values = [sent(row, steps) for steps, row in enumerate(rows)]
    base = sent([0.0] * len(rows[0]), 0)
    return Updates(values, base, weights or [1 / len(rows)] * len(rows))


def result(rule, rows, byzantine=0, memory=None, weights=None, start=0.0):
    """The update that a rule makes of `rows`, and what it remembers."""
    fields, kept = rule.combine(updates_of(rows, weights, start), byzantine, memory or {})
    parts = fields["weights"]
    return (torch.cat([parts["a"], parts["b"]]) - start).numpy(), kept


def krum_by_hand(rows, f):
    """Return the places of the rows, those with the least score first."""
    scores = []
    for i, row in enumerate(rows):
        gaps = sorted(
            sum((a - b) ** 2 for a, b in zip(row, other, strict=True)) for j, other in enumerate(rows) if j != i
        )
        scores.append(sum(gaps[: max(1, len(rows) - f - 2)]))
    return sorted(range(len(rows)), key=scores.__getitem__)


@pytest.mark.parametrize("f", [0, 1, 2, 3])
@pytest.mark.parametrize("start", [0.0, 7.0])
def test_krum_picks_the_update_nearest_to_its_neighbours(f, start):
    order = krum_by_hand(NINE, f)
    np.testing.assert_allclose(result(Krum(), NINE, f, start=start)[0], NINE[order[0]], atol=1e-11)
    several = np.mean([NINE[i] for i in order[:3]], 0)
    np.testing.assert_allclose(result(Krum(multi=3), NINE, f, start=start)[0], several, atol=1e-11)


def test_krum_of_points_on_a_line():
    """Of 0, 1, 2, 3 and 100 with f = 1, each is compared with its two nearest: 1 and 2 have the score 2, 1 is first."""
    rows = [[x, 0, 0, 0] for x in (3.0, 1.0, 100.0, 2.0, 0.0)]
    assert result(Krum(byzantine=1), rows, 1)[0][0] == 1.0


def bulyan_by_hand(rows, f):
    left, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * f:
        best = krum_by_hand([rows[i] for i in left], f)[0] if len(left) > 1 else 0
        chosen.append(left.pop(best))
    kept = len(rows) - 4 * f
    mean = []
    for column in zip(*(rows[i] for i in chosen), strict=True):
        middle = float(np.median(column))
        mean.append(np.mean(sorted(column, key=lambda value: abs(value - middle))[:kept]))
    return mean


@pytest.mark.parametrize("f", [0, 1])
def test_bulyan_averages_what_is_near_the_median_of_what_krum_chooses(f):
    rows = [*NINE, [0.3, 0.2, -0.1, 0.0], [-0.2, 0.4, 0.3, 0.1]]
    np.testing.assert_allclose(result(Bulyan(), rows, f)[0], bulyan_by_hand(rows, f), atol=1e-11)


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (0, [0.12444444444444439, -0.87, 0.23222222222222225, 0.0733333333333333]),
        (1, [-0.322, -0.488, -1.45, 0.192]),
    ],
)
def test_bulyan_beside_flower(f, expected):
    """The values of Flower 1.22.0 for NINE."""
    np.testing.assert_allclose(result(Bulyan(), NINE, f)[0], expected, atol=1e-12)


@pytest.mark.parametrize("rows", [NINE, NINE[:8]])
def test_trimmed_means_and_medians_by_coordinate(rows):
    ordered = np.sort(rows, 0)
    for f in (0, 1, 3):
        np.testing.assert_allclose(result(TrimmedMean(), rows, f)[0], ordered[f : len(rows) - f].mean(0), atol=1e-11)
    np.testing.assert_allclose(result(Median(), rows)[0], np.median(rows, 0), atol=1e-11)


@pytest.mark.parametrize("weights", [None, [0.02, 0.02, 0.2, 0.1, 0.1, 0.16, 0.1, 0.2, 0.1]])
def test_the_geometric_median_is_scipys_optimum(weights):
    rows, shares = np.array(NINE), np.array(weights or [1 / 9] * 9)
    best = minimize(lambda v: shares @ np.linalg.norm(rows - v, axis=1), rows.mean(0), method="BFGS", tol=1e-12)
    found, _ = result(GeometricMedian(iterations=1000), NINE, weights=weights, start=1.0)
    np.testing.assert_allclose(found, best.x, atol=1e-5)
    np.testing.assert_allclose(shares @ np.linalg.norm(rows - found, axis=1), best.fun, rtol=1e-10)


def test_a_geometric_median_that_is_an_update_is_found():
    rows = [[0.0] * 4, [0.0] * 4, [0.0] * 4, [5.0, 1, 0, 0], [9.0, -4, 2, 2]]
    np.testing.assert_allclose(result(GeometricMedian(), rows)[0], 0, atol=1e-5)


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_centred_clipping_follows_its_loop_and_goes_on_from_where_it_was(iterations):
    rule = CentredClipping(radius=0.8, iterations=iterations)
    shares = [0.3, *[0.1] * 6, 0.05, 0.05]
    centre, memory = np.zeros(4), {}
    for rows in (NINE, NINE[::-1], NINE):
        for _ in range(iterations):
            gaps = np.array(rows) - centre
            factors = np.minimum(1, 0.8 / np.linalg.norm(gaps, axis=1))
            centre = centre + (np.array(shares) * factors) @ gaps
        found, memory = result(rule, rows, memory=memory, weights=shares)
        np.testing.assert_allclose(found, centre, atol=1e-11)


def test_means_keep_the_bits_of_a_client_that_has_all_the_weight():
    rows = [[1 / 3, 2 / 7, 1e-9, -5.0], [9.0, 9.0, 9.0, 9.0]]
    found, _ = result(Mean(), rows, weights=[1.0, 0.0])
    np.testing.assert_allclose(found, rows[0], atol=2**-40)


def test_weights_that_sum_to_less_move_the_model_less():
    """Stale replies weigh less in all, so what a rule returns is scaled by their sum, and the rest is the old model."""
    weights = [0.05] * 9
    whole, _ = result(Median(), NINE, start=2.0)
    part, _ = result(Median(), NINE, weights=weights, start=2.0)
    np.testing.assert_allclose(part, 0.45 * whole, atol=1e-11)
    chosen, _ = result(Krum(), NINE, 2, weights=weights, start=2.0)
    np.testing.assert_allclose(chosen, 0.45 * np.array(NINE[krum_by_hand(NINE, 2)[0]]), atol=1e-11)


def test_rules_beside_blades():
    """The values of Blades 0.0.1 for NINE. Its Krum adds up fourth powers of distances, and its `Geomed` multiplies
    its weights into each other; of that rule, the values are those of its function `smoothed_weiszfeld`."""
    np.testing.assert_allclose(result(Median(), NINE)[0], [-0.05, -0.62, -0.03, 0.11], atol=1e-12)
    trimmed = [-0.24999999999999994, -0.612, -0.256, -0.056]
    np.testing.assert_allclose(result(TrimmedMean(), NINE, 2)[0], trimmed, atol=1e-12)
    geometric = [-0.2846050090105824, -0.6718758949239121, -0.08408816606211104, 0.08835122399778869]
    np.testing.assert_allclose(result(GeometricMedian(), NINE)[0], geometric, atol=1e-9)
    first = [-0.20827873974841138, -0.5019117386893677, -0.13196185784891573, 0.013780431232219312]
    second = [-0.27097035164384375, -0.618881628189885, -0.16960315069676504, 0.015096594828040346]
    rule = CentredClipping(radius=1.0, iterations=2)
    found, memory = result(rule, NINE)
    np.testing.assert_allclose(found, first, atol=1e-9)
    np.testing.assert_allclose(result(rule, NINE, memory=memory)[0], second, atol=1e-9)
    squared = np.array([[sum((np.array(a) - b) ** 2) for b in NINE] for a in NINE]) ** 2
    by_fourth_powers = np.argmin(np.sort(squared, 1)[:, 1:6].sum(1))
    assert NINE[by_fourth_powers] == [-0.05, 0.11, -1.53, -0.48]  # Blades' Krum
    assert krum_by_hand(NINE, 2)[0] == by_fourth_powers  # the same here


@pytest.mark.parametrize(
    ("rule", "f"),
    [
        (Mean(), 0),
        (NormBound(bound=0.5), 0),
        (TrimmedMean(), 1),
        (TrimmedMean(), 2),
        (Median(), 0),
        (Krum(), 1),
        (Krum(multi=2), 1),
        (Bulyan(), 1),
        (GeometricMedian(), 0),
        (CentredClipping(radius=0.3), 0),
        (CentredClipping(radius=0.3, iterations=3), 0),
    ],
)
def test_replacing_one_client_changes_a_rule_by_its_sensitivity_at_most(rule, f):
    rng = np.random.default_rng(0)
    most, clients = 0.0, 8
    bound = rule.bound if isinstance(rule, NormBound) else 1.0
    for _ in range(60):
        rows = rng.normal(size=(clients + 1, 4)) * rng.choice([0.1, 1, 10])
        rows *= np.minimum(1, bound / np.linalg.norm(rows, axis=1, keepdims=True))
        corners = np.eye(4)[rng.integers(4, size=clients + 1)] * rng.choice([-bound, bound], size=(clients + 1, 1))
        rows = rows if rng.random() < 0.5 else corners
        before, after = rows[:clients].tolist(), rows[1:].tolist()  # the first client is replaced
        a, b = (result(rule, each, f)[0] for each in (before, after))
        most = max(most, float(np.linalg.norm(a - b)))
    stated = rule.sensitivity(1.0, clients, f)
    assert 0 < most <= stated * (1 + 1e-9)


def test_the_sensitivity_of_the_mean_is_reached():
    rows = [[1.0, 0, 0, 0], *[[0.2, 0.1, 0, 0]] * 4]
    opposite = [[-1.0, 0, 0, 0], *rows[1:]]
    change = np.linalg.norm(result(Mean(), rows)[0] - result(Mean(), opposite)[0])
    assert change == pytest.approx(Mean().sensitivity(1.0, 5, 0))


def test_attackers_up_to_the_bound_do_not_move_a_rule_far():
    """Honest clients agree up to 0.1; f attackers send 1e6, all the same."""
    rng = np.random.default_rng(1)
    honest = (0.1 * rng.uniform(-1, 1, size=(9, 4))).tolist()
    rows = [*honest, *[[1e6] * 4] * 2]
    for rule in (
        TrimmedMean(),
        Median(),
        Krum(),
        Krum(multi=3),
        Bulyan(),
        GeometricMedian(),
        CentredClipping(radius=0.2),
    ):
        assert np.abs(result(rule, rows, 2)[0]).max() < 0.2, rule.name
    assert np.abs(result(Mean(), rows, 2)[0]).max() > 1e5


def test_least_clients():
    assert [Krum().least(f) for f in (0, 1, 4)] == [3, 5, 11]
    assert [Bulyan().least(f) for f in (0, 1, 4)] == [3, 7, 19]
    assert [TrimmedMean().least(f) for f in (0, 1, 4)] == [1, 3, 9]
    assert Krum(multi=7).least(1) == 7
    assert {rule.least(3) for rule in (Mean(), Median(), GeometricMedian(), CentredClipping())} == {1}


def test_integers_become_the_largest_of_those_that_count():
    for rule in (Median(), TrimmedMean(), Mean()):
        fields, _ = rule.combine(updates_of(NINE), 1, {})
        assert fields["weights"]["steps"] == 8
    fields, _ = Krum().combine(updates_of(NINE), 2, {})
    assert fields["weights"]["steps"] == krum_by_hand(NINE, 2)[0]


def test_products_take_a_few_coordinates_at_a_time(monkeypatch):
    whole = updates_of(NINE).products()
    monkeypatch.setattr("rayfed.channel.updates._COLUMNS", 2)
    torch.testing.assert_close(updates_of(NINE).products(), whole)
    rows = np.array(NINE)
    np.testing.assert_allclose(whole.numpy(), rows @ rows.T, atol=1e-12)
    assert math.isclose(float(whole.trace()), sum(x * x for x in itertools.chain(*NINE)))


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(), Bulyan(), CentredClipping(radius=0.8)])
def test_rules_look_at_a_few_coordinates_at_a_time(rule, monkeypatch):
    rng = np.random.default_rng(2)
    rounds = [rng.normal(size=(9, 40)).tolist() for _ in range(3)]

    def results():
        memory = {}
        for rows in rounds:
            found, memory = result(rule, rows, 1, memory=memory)
            yield found

    whole = list(results())
    monkeypatch.setattr("rayfed.channel.updates._COLUMNS", 3)
    assert max(block.shape[1] for block in updates_of(rounds[0]).blocks()) == 3
    for found, expected in zip(results(), whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)
