"""Synthetic(α, β): each client's draws follow the distributions of the paper."""

import numpy as np
import pytest

from rayfed.data.sets.synthetic import Synthetic


def moments(**options):
    """Return by client the mean entry of W, and the mean input value, of 400 clients."""
    data = Synthetic(clients=400, most_examples=50, **options)
    rules = np.array([data.rule(k)[0].mean() for k in range(400)])
    return rules, np.array([data.examples(k)[0].mean() for k in range(400)])


def test_labels_are_those_of_the_clients_own_rule():
    data = Synthetic(alpha=0.5, beta=0.5, dimensions=7, classes=4)
    for client in (0, 5):
        x, y = data.examples(client)
        weights, bias = data.rule(client)
        expected = [int(np.argmax(weights.T @ row.astype(float) + bias)) for row in x[:40]]
        assert y[:40].tolist() == expected
        assert (x.dtype, x.shape, weights.shape) == (np.float32, (len(y), 7), (7, 4))


def test_alpha_is_the_spread_of_rules_and_beta_that_of_inputs():
    """The mean of 600 entries of W has variance α² + 1/600; that of 60 inputs β² + 1/60 and a little of the noise."""
    rules, inputs = moments(alpha=2.0, beta=0.5)
    assert rules.std() == pytest.approx(np.hypot(2, 600**-0.5), rel=0.12)
    assert inputs.std() == pytest.approx(np.hypot(0.5, 60**-0.5), rel=0.12)
    rules, inputs = moments(alpha=0.0, beta=0.0)
    assert rules.std() == pytest.approx(600**-0.5, rel=0.12)
    assert inputs.std() == pytest.approx(60**-0.5, rel=0.12)


def test_the_variance_of_inputs_falls_with_their_position():
    variances = [Synthetic(seed=seed, dimensions=20).examples(0)[0].var(0, ddof=1) for seed in range(200)]
    np.testing.assert_allclose(np.mean(variances, axis=0), np.arange(1, 21) ** -1.2, rtol=0.1)


def test_sizes_are_50_and_a_log_normal_number():
    sizes = np.array([len(Synthetic(seed=seed, dimensions=1, classes=2).examples(0)[1]) for seed in range(400)])
    assert sizes.min() >= 50
    assert np.median(sizes - 50) == pytest.approx(np.exp(4), rel=0.25)
    largest = int(sizes.argmax())
    assert len(Synthetic(seed=largest, most_examples=60).examples(0)[1]) == 60
