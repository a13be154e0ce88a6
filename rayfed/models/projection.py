"""ADCOL's projection in front of the split, and its predictor (Li, He and Song, "Adversarial Collaborative Learning
on Non-IID Features", ICML 2023, section 5.1; the projection is that of SimSiam).
"""

import math

from torch import nn

from rayfed.models.split_model import SplitModel

PREDICTOR_WIDTH = 512


def projection(inputs: int, dim: int) -> nn.Sequential:
    """(B, inputs) -> (B, dim): three linear layers, hidden width = output width, batch norm on each, ReLU on two."""
    return nn.Sequential(
        nn.Linear(inputs, dim),
        nn.BatchNorm1d(dim),
        nn.ReLU(),
        nn.Linear(dim, dim),
        nn.BatchNorm1d(dim),
        nn.ReLU(),
        nn.Linear(dim, dim),
        nn.BatchNorm1d(dim),
    )


def predictor(dim: int, num_classes: int) -> nn.Sequential:
    """(B, dim) -> logits (B, C): one hidden layer of 512 with batch norm and ReLU."""
    return nn.Sequential(
        nn.Linear(dim, PREDICTOR_WIDTH),
        nn.BatchNorm1d(PREDICTOR_WIDTH),
        nn.ReLU(),
        nn.Linear(PREDICTOR_WIDTH, num_classes),
    )


def with_projection(model: SplitModel, dim: int, num_classes: int) -> SplitModel:
    """`model`'s features followed by a projection to `dim` values, with the split after it; its head is replaced.

    The paper takes dim = 2048. Features that are maps are flattened first.
    """
    if not model.feature_shape:
        raise ValueError("with_projection needs a model whose feature_shape is known")
    inputs = math.prod(model.feature_shape)
    projected = SplitModel(
        nn.Sequential(model.features, nn.Flatten(), projection(inputs, dim)), predictor(dim, num_classes)
    )
    projected.feature_shape = (dim,)
    return projected
