"""ADCOL's projection before the split, and its predictor.

Li, He and Song, "Adversarial Collaborative Learning on Non-IID Features", ICML 2023, section 5.1. The projection is
that of SimSiam.
"""

import math

from torch import nn

from rayfed.models.split_model import SplitModel

PREDICTOR_WIDTH = 512


def projection(inputs: int, dim: int) -> nn.Sequential:
    """Create the projection (B, inputs) -> (B, dim): three linear layers of width `dim` with batch norm, two ReLUs."""
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
    """Create the predictor (B, dim) -> logits (B, C): one hidden layer of 512 with batch norm and ReLU."""
    return nn.Sequential(
        nn.Linear(dim, PREDICTOR_WIDTH),
        nn.BatchNorm1d(PREDICTOR_WIDTH),
        nn.ReLU(),
        nn.Linear(PREDICTOR_WIDTH, num_classes),
    )


def with_projection(model: SplitModel, dim: int, num_classes: int) -> SplitModel:
    """Append a projection to `dim` values to the features of `model` and replace its head by a predictor.

    The split is after the projection. Feature maps are flattened first. The paper uses dim = 2048.
    """
    if not model.feature_shape:
        raise ValueError("with_projection requires a model with a feature_shape")
    inputs = math.prod(model.feature_shape)
    projected = SplitModel(
        nn.Sequential(model.features, nn.Flatten(), projection(inputs, dim)), predictor(dim, num_classes)
    )
    projected.feature_shape = (dim,)
    return projected
