"""FedBN: batch-norm layers stay, everything else is averaged."""

import pytest

from helpers.federations import net
from helpers.reference import CLIENTS, assert_weights, data, descend, mean, population, run, shares
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedbn import FedBN

KEPT = {f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("weighting", ["examples", "equal"])
def test_two_rounds_by_hand(weighting):
    people, model = population(), net()
    server = run(FedBN(weighting=weighting), people, model, steps=3)
    parts, models = [1 / 3] * 3 if weighting == "equal" else shares(people), [model] * 3
    for _ in range(2):
        trained = [descend(models[i], *data(people, i), 3) for i in CLIENTS]
        common = mean(trained, parts).state_dict()
        models = []
        for own in trained:
            own.load_state_dict(common | {name: own.state_dict()[name].clone() for name in KEPT})
            models.append(own)
    assert_weights(server.state["weights"], models[0])
    assert not KEPT & set(server.state["weights"])
    for i, state in server.fleet.states.items():
        assert set(state["weights"]) == KEPT
        assert_weights(state["weights"], models[i])


@pytest.mark.parametrize("policy", ["aggregate", "local", "local_statistics"])
def test_it_is_fedavg_with_local_batch_norm_whatever_the_policy(policy):
    people = population()
    fedavg = run(FedAvg(), people, net(), batch_norm="local", rounds=2)
    assert run(FedBN(), people, net(), batch_norm=policy).state_hash() == fedavg.state_hash()
