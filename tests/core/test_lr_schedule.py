"""Schedules against torch's, with one step per round."""

from dataclasses import replace

import pytest
import torch
from torch.optim import lr_scheduler

from rayfed.core.lr_schedule import Cosine, Exponential, LrSchedule, Step

ROUNDS = 12
CASES = {
    "constant": (LrSchedule(), lambda o, n: lr_scheduler.ConstantLR(o, factor=1.0)),
    "exponential": (Exponential(decay=0.9), lambda o, n: lr_scheduler.ExponentialLR(o, 0.9)),
    "step": (Step(decay=0.1, every=3), lambda o, n: lr_scheduler.StepLR(o, 3, 0.1)),
    "cosine": (Cosine(floor=0.2), lambda o, n: lr_scheduler.CosineAnnealingLR(o, n, eta_min=0.2)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("warmup", [0, 4])
def test_factors_are_those_of_torch(case, warmup):
    schedule, make = CASES[case]
    schedule = replace(schedule, warmup=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    following = make(optimizer, ROUNDS - warmup)
    if warmup:
        rising = lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
        following = lr_scheduler.SequentialLR(optimizer, [rising, following], milestones=[warmup])
    expected = []
    for _ in range(ROUNDS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        following.step()
    assert [schedule.factor(r, ROUNDS) for r in range(1, ROUNDS + 1)] == pytest.approx(expected)
    assert schedule.is_constant is (case == "constant" and not warmup)
