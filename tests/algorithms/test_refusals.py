"""What methods refuse before anything starts, by key, value and remedy, and what stands beside it and is allowed.

Wrapped methods are refused in `test_wrapped.py`, and what needs data of its own beside the method.
"""

import pytest

from helpers.federations import Maps, Point, blobs, blueprint, net, quadratic, quadratics
from rayfed.algorithms.adcol import Adcol
from rayfed.algorithms.apple import APPLE
from rayfed.algorithms.centralised import ERM, MMREx
from rayfed.algorithms.dp_adcol import DPAdcol, LocalDPAdcol
from rayfed.algorithms.dp_fedbn import DPFedBN
from rayfed.algorithms.fada import FADA
from rayfed.algorithms.fedbn import FedBN
from rayfed.algorithms.fedgen import FedGen
from rayfed.algorithms.fedmix import FedMix
from rayfed.algorithms.fraug import FRAug
from rayfed.algorithms.partialfed import PartialFed
from rayfed.algorithms.personal_heads import FedBABU, FedPer, FedRep
from rayfed.algorithms.weights_by_losses import AFL, VM
from rayfed.core.errors import UsageError
from rayfed.engine.clock import Availability
from rayfed.experiments.checks import check_trial

PLAIN, FROZEN, TWO = {"model": net(batch_norm=False)}, {"batch_norm": "frozen"}, {"cohort": 2}
DROPOUT, DEADLINE = {"availability": Availability(dropout=0.1)}, {"availability": Availability(deadline=3.0)}
TINY = {"epsilon": 1e-6, "delta": 1e-9, "server_batch_size": 30}


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (Adcol(fixed_size=True, cache=True), {}, "algorithm.fixed_size=true: an output stands for a different client"),
        (DPAdcol(network="resnet18", server_batch_size=30), {}, "algorithm.network=resnet18: batch norm mixes"),
        (DPAdcol(**TINY), {}, "algorithm.epsilon=1e-06: no amount of noise keeps 8 steps below ε=0.0125 at δ=1e-09"),
        (LocalDPAdcol(share_predictor=True), {}, "algorithm.share_predictor=true: local_dp_adcol does not protect"),
        (AFL(lambda_min=0.4), {}, "algorithm.lambda_min=0.4: at most 1/4 = 0.25 for 4 clients$"),
        (VM(), {}, "batch_norm=aggregate: algorithm.name=vm may give .* negative"),
        (FADA(target=4), {}, "algorithm.target=4: is not the index of one of two or more clients"),
        (ERM(), TWO, "cohort=2: algorithm.name=erm"),
        (ERM(), {"batch_norm": "local"}, "batch_norm=local: algorithm.name=erm trains one central model"),
        (MMREx(lambda_min=0.5), PLAIN, "algorithm.lambda_min=0.5: at most 1/4 = 0.25 for 4 domains"),
        (FedBN(), PLAIN, "algorithm.name=fedbn: the model has no batch-norm layer; use another"),
        (FedBN(), FROZEN, "batch_norm=frozen: fedbn trains .* use batch_norm=local"),
        (FedMix(mean_examples=30), {}, "algorithm.mean_examples=30: client 0 has only 20 examples"),
        (DPFedBN(), DROPOUT, "availability.dropout=0.1: algorithm.name=dp_fedbn divides its privacy budget"),
        (APPLE(), DEADLINE, "availability.deadline=3: algorithm.name=apple needs every client in every round"),
        (FRAug(), {"model": Maps()}, "algorithm.name=fraug: needs features that are vectors, the model's are 2x4"),
        (FRAug(), {"drop_last": False}, "local.batch_size=5: algorithm.name=fraug cannot train its batch norm on a"),
    ],
)
def test_one_line(algorithm, changes, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        check_trial(blueprint(algorithm, blobs(), **changes), blobs())


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (DPAdcol(**TINY | {"epsilon": 0.02}), {}),
        (DPAdcol(server_batch_size=46), TWO),
        (LocalDPAdcol(network="resnet18", server_batch_size=999), {}),
        (AFL(lambda_min=1 / 4), {}),
        (VM(), {"batch_norm": "local"}),
        (APPLE(), {"availability": Availability(least_work=0.5)}),
        (FRAug(), {"drop_last": False, "batch_size": 7}),
        (FRAug(augmenter="gaussian", use_generator=False, use_rtnet=False), {}),
    ],
)
def test_what_is_allowed(algorithm, changes):
    check_trial(blueprint(algorithm, blobs(), **changes), blobs())


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        *[(kind(), f"algorithm.name={kind.name}: the model's head has nothing") for kind in (FedBABU, FedPer, FedRep)],
        (FedGen(), "algorithm.name=fedgen: the model's head has nothing to train"),
        (PartialFed(), "algorithm.variant=fix: the model has neither batch norm nor a head to"),
    ],
)
def test_a_model_without_a_head(algorithm, message):
    curves = quadratics((1.0, 0.0), (2.0, 1.0))
    with pytest.raises(UsageError, match=f"^{message}"):
        check_trial(
            blueprint(algorithm, curves, model=Point(), loss=quadratic, batch_size=1 + (algorithm.name == "fedgen")),
            curves,
        )
