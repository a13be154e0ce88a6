"""Two quadratic clients of different curvature, whose outcomes are known in closed form."""

import pytest

from helpers.federations import Point, blueprint, quadratic, quadratics, simulate
from rayfed.algorithm import Phase
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.optim import SGD

CURVES = ((1.0, 0.0), (4.0, 10.0))  # the optimum of the mean is (1·0 + 4·10) / (1 + 4) = 8
ROUNDS = 50


def settle(algorithm, width=1, **sgd):
    population = quadratics(*CURVES)
    plan = blueprint(
        algorithm,
        population,
        model=Point(),
        loss=quadratic,
        optimizer=SGD(lr=0.02, **sgd),
        local=Phase("train", steps=10),
        batch_size=1,
        rounds=ROUNDS,
        vmap_clients=width,
    )
    server, _ = simulate(plan, population, every=ROUNDS)
    return server.state["weights"]["w"].item()


@pytest.mark.parametrize("width", [1, 2])
def test_fedavg_stops_at_its_biased_point(width):
    # ten steps shrink the distance to a_i by (1 − 0.02 h_i)^10: the fixed point weighs a_i by 1 minus that
    pull = [1 - (1 - 0.02 * h) ** 10 for h, _ in CURVES]
    biased = sum(p * a for p, (_, a) in zip(pull, CURVES, strict=True)) / sum(pull)
    assert biased == pytest.approx(7.55621, abs=1e-5)
    assert settle(FedAvg(), width) == pytest.approx(biased, abs=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("width", [1, 2])
def test_scaffold_reaches_the_optimum(width, momentum):
    assert settle(Scaffold(), width, momentum=momentum) == pytest.approx(8.0, abs=1e-4)
