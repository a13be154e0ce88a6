"""APPLE's mixture of core models by a client's relations p to them, and the gradient of those relations."""

import torch
from torch import Tensor

from rayfed.core.trees import Weights, only


def mixture(cores: Weights, weights: Weights, p: Tensor, own: Tensor) -> Weights:
    """Σ_j p_j w_j of `cores` [clients, …]; the client's own core, where `own` is 1, is taken from `weights`."""
    others, mine = p * (1 - own), (p * own).sum()
    return {name: torch.tensordot(others, core, 1) + mine * weights[name] for name, core in cores.items()}


def slopes(pull: Tensor, cores: Weights, weights: Weights, grads: Weights, own: Tensor) -> Tensor:
    """`pull` + ⟨g, w_j⟩ [clients], with g the gradient at the mixture; the own core as in `mixture`."""
    for name in only(cores, grads):
        others = torch.tensordot(cores[name].reshape(len(own), -1), grads[name].flatten(), 1)
        pull = pull + torch.where(own > 0, (grads[name] * weights[name]).sum(), others)
    return pull
