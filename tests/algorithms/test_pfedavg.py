"""pFedAvg: FedAvg bit for bit, scored after local training."""

import torch

from helpers.federations import blobs, blueprint, simulate
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.pfedavg import PFedAvg
from rayfed.core.trees import named_tensors


def test_it_is_fedavg_with_another_score():
    people = blobs()
    ours, records = simulate(blueprint(PFedAvg(), people), people)
    theirs, plain = simulate(blueprint(FedAvg(), people), people, points=("trained",))
    for (_, a), (_, b) in zip(named_tensors(ours.state), named_tensors(theirs.state), strict=True):
        assert torch.equal(a, b)
    assert records[-1].scores == plain[-1].scores
    assert {s.point for s in records[-1].scores if s.split == "test"} == {"trained"}
    assert records[-1].bytes_up == plain[-1].bytes_up
