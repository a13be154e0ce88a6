"""Checks of the model on inputs of the data."""

import inspect
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.core.errors import UsageError, error_line, is_user_file, one_line
from rayfed.core.rng import global_state_kept
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.first_examples import extreme_examples, first_batch, input_type, largest_part
from rayfed.losses.base import CrossEntropy
from rayfed.models.remedies import remedy_for_inputs

_TRIED = 8  # examples at most of the step that is tried


def check_inputs(trial: Trial) -> None:
    """Refuse a model that fails on the data, or has fewer outputs than cross-entropy needs.

    A model of rayfed's took images and floats of this shape when it was made. Integers stand for words or categories,
    and only the model knows which embedding gets which of them. So it runs on the examples with the smallest and the
    largest integer at each position.
    """
    population = trial.population
    if not trial.own_model and population.clients[0].train.dtype in (np.uint8, np.float32):
        return
    is_integer = not input_type(population).is_floating_point
    inputs = population.clients[0].train.x[:2]
    if is_integer:
        inputs = extreme_examples(population)
    with global_state_kept(), torch.no_grad():
        task = trial.ctx.task
        for start in range(0, len(inputs), 64):
            x = torch.from_numpy(inputs[start : start + 64].copy())
            if x.dtype == torch.uint8:
                x = x.float()
            try:
                outputs = task.predict(task.initial_weights(), x)
            except (RuntimeError, IndexError) as error:
                reason = _reason_of_inputs(trial, inputs, error, is_integer=is_integer)
                raise UsageError(f"{trial.model_key}: fails on inputs of {population.name}, {reason}") from error
    classes = population.num_classes
    if isinstance(trial.loss, CrossEntropy) and outputs.shape[1] < classes:
        raise UsageError(f"{trial.model_key}: gives {outputs.shape[1]} logits, but there are {classes} classes")


def _reason_of_inputs(trial: Trial, inputs: np.ndarray, error: Exception, *, is_integer: bool) -> str:
    """Return what kind of inputs the model failed on with `error`, and what would help."""
    population = trial.population
    numbers = inputs
    if population.layout:
        numbers = population.layout.integers(inputs)
    span = ""
    if is_integer and numbers.size:
        span = f", from {numbers.min()} to {numbers.max()}"
    fitting = None
    if numbers.size:
        fitting = remedy_for_inputs(trial.blueprint.model, torch.from_numpy(numbers))
    remedy = fitting or "give them as float32, or choose another model"
    kind = population.layout or population.clients[0].train.dtype
    return f"which are {kind}{span} ({one_line(error)}); {remedy}"


def check_training_mode(trial: Trial) -> None:
    """Refuse a model of the user's that returns a tensor in evaluation mode, and something else in training mode."""
    if not trial.own_model:
        return
    x, _ = first_batch(largest_part(trial.population), _TRIED)

    def outputs(model: Any) -> Any:
        if not task.feature_shape:
            return model(x)
        features = model.features(x)
        if not isinstance(features, Tensor):
            return features
        return model.head(features)

    with global_state_kept(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        task = trial.ctx.task
        weights = task.initial_weights()
        evaluated = task.model.run(weights, outputs, train=False)[0]
        if not isinstance(evaluated, Tensor):
            return
        try:
            returned = task.model.run(weights, outputs, train=True)[0]
        except Exception as error:  # the user's code may raise anything
            raise UsageError(f"{trial.model_key}: a training step fails: {error_line(error)}") from error
    if isinstance(returned, Tensor):
        return
    layer: Any = task.model.module
    if task.feature_shape:
        layer = layer.features
    raise UsageError(
        f"{trial.model_key}: returns {type(returned).__name__} in training mode, and must return one tensor of logits, "
        f"as in evaluation mode{_place_of(layer)}"
    )


def _place_of(layer: Any) -> str:
    """Return in brackets where the user's code of a layer or a method is; empty for code of others."""
    function = layer
    if not inspect.ismethod(layer):
        function = type(layer).forward
    code = function.__code__
    if not is_user_file(code.co_filename):
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno}, in {code.co_name})"
