"""Survival analysis: the loss of proportional hazards.

Labels are [n, 2]: whether the event happened (1) or the patient left before (0), and the time of either.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfed.core.errors import UsageError
from rayfed.losses.base import NamedLoss


@dataclass(frozen=True, kw_only=True)
class Cox(NamedLoss):
    """Negative partial log-likelihood of Cox's model, divided by the examples of the batch (Cox 1972).

        loss = 1/n · Σ_{i: event} (log Σ_{j: t_j ≥ t_i} exp(o_j) − o_i)

    The output o is the logarithm of the risk. Patients with equal times are all at risk in each other's terms (Breslow
    1974). Labels are [n, 2], event and time. A batch without events has the loss 0. The sum over j runs over the batch,
    so that batches of one example have no gradient.
    """

    def outputs(self, label_shape: tuple[int, ...], num_classes: int) -> int:
        return 1

    def check_labels(self, where: str, labels: np.ndarray) -> None:
        if labels.ndim != 2 or labels.shape[1] != 2:
            form = ", ".join(["n", *map(str, labels.shape[1:])])
            raise UsageError(
                "loss.name=cox: takes an event and a time of each example, labels [n, 2], and the labels of "
                f"{where} are {labels.dtype} [{form}]; in a table, give data.label=[EVENT,TIME]"
            )
        _check_events(where, labels[:, 0], labels[:, 1])
        _check_times(where, labels[:, 1])

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        events = y[:, 0]
        times = y[:, 1]
        order = torch.argsort(times, descending=True, stable=True)
        risks = outputs.reshape(len(y)).float().gather(0, order)
        events = events.to(risks.dtype).gather(0, order)
        times = times.gather(0, order)
        last = _last_of_equals(times)
        at_risk = risks.logcumsumexp(0).gather(0, last)
        return ((at_risk - risks) * events).sum() / len(y)


def _check_events(where: str, events: np.ndarray, times: np.ndarray) -> None:
    wrong = events[(events != 0) & (events != 1)]
    if len(wrong):
        remedy = "1 stands for the event"
        if np.isin(times, (0, 1)).all():
            remedy = "the columns seem swapped: the event comes first"
        found = f"{where} has the event {wrong[0]:g}"
        raise UsageError(f"loss.name=cox: {found}; expected 0 or 1, and then the time; {remedy}")


def _check_times(where: str, times: np.ndarray) -> None:
    wrong = times[~(np.isfinite(times) & (times >= 0))]
    if len(wrong):
        found = f"{where} has the time {wrong[0]:g}, as {len(wrong)} of {len(times)} examples"
        raise UsageError(f"loss.name=cox: {found}; expected numbers from 0; leave such examples out")


def _last_of_equals(times: Tensor) -> Tensor:
    """Return, for each of sorted `times` [n], the position of the last one that is equal, integers [n]."""
    positions = torch.arange(len(times), device=times.device)
    ends_here = torch.cat([times[1:] != times[:-1], torch.ones_like(times[:1], dtype=torch.bool)])
    ends = torch.where(ends_here, positions, len(times))
    return ends.flip(0).cummin(0).values.flip(0)
