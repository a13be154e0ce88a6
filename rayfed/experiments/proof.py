"""The proof that a model trains here as in PyTorch: two steps of both, from the same weights, on the same batches.

The engine runs a copy of the user's module with the weights of each client. Whatever holds a tensor or a layer outside
of the copy (a global, a class attribute, a hook of a weight) would train with wrong numbers, and say nothing. So the
plan compares. It computes in float64 where the model can, so that a difference is no rounding.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from rayfed.algorithm import Algorithm, Context, State
from rayfed.algorithms.fedavg import FedAvg, LocalTraining
from rayfed.core.double import in_double, loss_in_double, module_in_double
from rayfed.core.errors import UsageError, error_line
from rayfed.core.layout import layout_of
from rayfed.core.modules import batch_norm_layers, copied, unchanged
from rayfed.core.network import logits_of, vectorised
from rayfed.core.optim import SGD, Adam, Optimizer
from rayfed.core.outputs import labels_without_loss, with_loss
from rayfed.core.rng import global_generators_seeded, global_state_kept
from rayfed.core.task import Batch, loss_on
from rayfed.core.trees import Weights, clone, only, stack, state_hash, tree_map
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.attributes import attribute_hashes
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.first_examples import first_batch, largest_part
from rayfed.experiments.plan_model import UsersModel
from rayfed.losses.base import Loss

_EXAMPLES = 4  # at most, of each of the two steps
_LEAST_LR = 0.01  # so that a step from old weights differs
_MOST_WEIGHTS = 2**26  # copies of so many are made in float64
_SHARE = {torch.float64: 1e-5, torch.float32: 2e-3}  # of a weight's update, by which both may differ
_FLOOR = {torch.float64: 1e-9, torch.float32: 1e-5}  # the same, as a share of the weight: rounding
_FEDAVG = FedAvg()


def takes_plain_steps(algorithm: Algorithm) -> TypeGuard[LocalTraining]:
    """Return whether a method's local steps are those of FedAvg, which are steps of plain PyTorch."""
    if not isinstance(algorithm, LocalTraining):
        return False
    hooks = ("start", "step", "loss", "loss_gradients", "correct", "trained", "adapt")
    kind = type(algorithm)
    return all(getattr(kind, hook) is getattr(LocalTraining, hook) for hook in hooks)


def prove_training(trial: Trial, users: UsersModel, method: LocalTraining = _FEDAVG) -> str | None:
    """Compare two steps of local training here with two steps in plain PyTorch.

    Args:
        trial: The simulation, with the configured optimiser. The client with the most examples gives the batches.
        users: The model as its user wrote it.
        method: A method that takes plain steps.

    Returns:
        Why nothing could be compared; None if both agree.

    Raises:
        UsageError: They differ, the training step fails, or it leaves something behind that is no weight.
    """
    with global_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        where = trial.model_key
        if _fits_in_double(trial.blueprint.model):
            ends = _ends_in_double(trial, users, method)
            if ends is not None:
                return _compared(*ends, where)
        case = _Case.as_it_is(trial, method)
        trained = _in_engine(case, where)
        try:
            expected = _in_torch(case, users)
        except UsageError:
            raise
        except Exception as error:  # the user's code may raise anything
            return f"{where}: not compared with plain PyTorch, in which a step fails: {error_line(error)}"
        return _compared(case, expected, trained, where)


def _ends_in_double(trial: Trial, users: UsersModel, method: LocalTraining) -> tuple["_Case", Weights, Weights] | None:
    """Return the case in float64 with the weights of plain PyTorch and of the engine after it.

    It is None for code that fails there, such as code that takes float32 alone; the next attempt says what fails.
    """
    with contextlib.suppress(Exception):
        case = _Case.in_double(trial, method)
        expected = _in_torch(case, users)
        trained = _in_engine(case, trial.model_key)
        return case, expected, trained
    return None


def why_not_at_once(trial: Trial) -> str | None:
    """Return why clients cannot train at once with `torch.vmap`; None if a step of two clients ends as that of one."""
    with global_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        where = trial.model_key
        case = _Case.as_it_is(trial, _FEDAVG)
        alone = _Trainer(case).step(0)
        try:
            together = _step_of_two(case)
        except Exception as error:  # the user's code may raise anything
            return f"torch cannot vectorise a training step of {where}: {error_line(error)}"
    for name, start in case.start().items():
        for weights in together:
            if not _agree(case, start, alone[name], weights[name]):
                return f"a step of {where} with torch.vmap gives other weights ({name})"
    return None


@dataclass(frozen=True)
class _Case:
    """What both train.

    Attributes:
        blueprint: The simulation, with a copy of the model, one loss, and the optimiser of both.
        batches: The batches of the two steps.
        dtype: The type of weights and inputs.
    """

    blueprint: Blueprint
    population: Population
    batches: Sequence[Batch]
    dtype: torch.dtype

    @classmethod
    def in_double(cls, trial: Trial, method: LocalTraining) -> "_Case":
        """Return the case in float64, with the configured optimiser."""
        blueprint = trial.blueprint
        batches = [Batch(in_double(x), in_double(y)) for x, y in _batches(trial)]
        blueprint = replace(
            blueprint,
            algorithm=method,
            model=module_in_double(copied(blueprint.model)),
            loss=loss_in_double(blueprint.training_loss or blueprint.loss),
            training_loss=None,
            optimizer=_larger_steps(blueprint.optimizer),
        )
        return cls(blueprint, trial.population, batches, torch.float64)

    @classmethod
    def as_it_is(cls, trial: Trial, method: LocalTraining) -> "_Case":
        """Return the case in the model's own types. Adam would enlarge the rounding of small gradients: SGD is used."""
        blueprint = trial.blueprint
        optimizer = _larger_steps(blueprint.optimizer)
        if isinstance(optimizer, Adam):
            optimizer = SGD(lr=optimizer.lr)
        blueprint = replace(
            blueprint,
            algorithm=method,
            loss=blueprint.training_loss or blueprint.loss,
            training_loss=None,
            optimizer=optimizer,
        )
        return cls(blueprint, trial.population, _batches(trial), torch.float32)

    def context(self) -> Context:
        """Return a context with a copy of the model of its own."""
        return self.blueprint.context(self.population, "cpu")

    @cached_property
    def ctx(self) -> Context:
        """The context of the first trainer; its initial weights stay what they are."""
        return self.context()

    def start(self) -> Weights:
        """Return copies of the first weights."""
        weights: Weights = clone(self.ctx.task.initial_weights())
        return weights

    def work(self, weights: Weights) -> State:
        """Return what local training begins with."""
        trainable = only(weights, self.ctx.task.trainable)
        optimizer = self.ctx.optimizer.init(trainable)
        if self.dtype == torch.float64:  # also the number of steps, from which Adam corrects its means
            optimizer = tree_map(in_double, optimizer)
        return {"weights": weights, "optimizer": optimizer}

    def seeded(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Seed all generators for a step, so that both draw the same numbers."""
        return global_generators_seeded(self.blueprint.seed, f"proof, step {step}")


def _larger_steps(optimizer: Optimizer) -> Optimizer:
    return replace(optimizer, lr=max(optimizer.lr, _LEAST_LR))


def _batches(trial: Trial) -> list[Batch]:
    """Return two batches of the client with the most examples; images are in [0, 1].

    Examples whose labels the loss leaves out come last: torch's loss of them alone is NaN.
    """
    blueprint = trial.blueprint
    part = largest_part(trial.population)
    size = max(1, min(blueprint.batch_size, _EXAMPLES, len(part) // 2))
    x, y = first_batch(part, 4 * size)
    left_out = labels_without_loss(blueprint.training_loss or blueprint.loss, blueprint.outputs)
    if left_out and not y.is_floating_point():
        has_loss = torch.stack([with_loss(label, left_out)[1] for label in y])
        order = has_loss.int().argsort(descending=True, stable=True)
        x = x[order]
        y = y[order]
    x = x[: 2 * size]
    y = y[: 2 * size]
    if part.dtype == np.uint8:
        x = x / 255
    return [Batch(x[:size], y[:size]), Batch(x[-size:], y[-size:])]


def _fits_in_double(model: nn.Module) -> bool:
    """Return whether a model computes in float32 or float64, and is not too large for copies."""
    tensors = [*model.parameters(), *model.buffers()]
    kinds = {value.dtype for value in tensors if value.is_floating_point()}
    size = sum(value.numel() for value in tensors)
    return kinds <= {torch.float32, torch.float64} and size <= _MOST_WEIGHTS


class _Trainer:
    """Takes the steps of a case with the engine.

    Attributes:
        work: What the next step begins with, at first the initial weights.
    """

    def __init__(self, case: _Case, ctx: Context | None = None):
        self._case = case
        if ctx is None:
            ctx = case.context()
        self._ctx = ctx
        self.work = case.work(case.start())

    def step(self, number: int) -> Weights:
        """Take the step `number` of the case, and return copies of the weights after it."""
        method = self._case.blueprint.algorithm
        with self._case.seeded(number):
            self.work, _ = method.step(self._ctx, self.work, {}, self._case.batches[number])
        weights: Weights = clone(self.work["weights"])
        return weights

    def facts(self) -> dict[str, str]:
        """Return hashes of what can change about the model and its loss beside weights, by dotted names."""
        task = self._ctx.task
        return attribute_hashes("model", task.model.module) | attribute_hashes("loss", task.training_loss)

    def late_buffers(self) -> list[str]:
        """Return the buffers that the model did not have at first."""
        network = self._ctx.task.model
        known = {*network.buffers, *network.constants}
        return [name for name, _ in network.module.named_buffers() if name not in known]


def _in_engine(case: _Case, where: str) -> Weights:
    """Return the weights after two steps of local training.

    Raises:
        UsageError: A step fails, changes the form of a buffer, or leaves something to the steps of other clients.
    """
    try:
        trainer = _Trainer(case, case.ctx)
        after_first = trainer.step(0)
        facts = trainer.facts()
        trained = trainer.step(1)
        later = _Trainer(case)  # as on a host that has trained another client before
        later.work = case.work({name: _moved(value) for name, value in case.start().items()})
        later.step(1)
        later.work = case.work(case.start())
        after_another = later.step(0)
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"{where}: a training step fails: {error_line(error)}") from error
    _refuse_other_forms(case.start(), trained, trainer.late_buffers())
    _refuse_leaks(facts, later.facts())
    if state_hash(after_first) != state_hash(after_another):
        raise UsageError(
            f"{where}: a training step gives other weights after the step of another client, so it keeps something "
            "outside of the model's state_dict; keep that by register_buffer, or compute it in each forward pass"
        )
    return trained


def _moved(value: Tensor) -> Tensor:
    """Return a weight of another client."""
    if not value.is_floating_point():
        return value
    return value * 1.5


def _step_of_two(case: _Case) -> list[Weights]:
    """Return the weights of two clients after the same step, taken at once."""
    work = case.work(case.start())
    step_of_one = partial(case.blueprint.algorithm.step, case.context())
    step = torch.vmap(step_of_one, (0, None, 0), randomness="same")
    with case.seeded(0), vectorised():
        both, _ = step(stack([work, work]), {}, stack([case.batches[0]] * 2))
    weights: Weights = both["weights"]
    return [{name: value[client] for name, value in weights.items()} for client in range(2)]


def _in_torch(case: _Case, users: UsersModel) -> Weights:
    """Return the weights after two steps of plain PyTorch, by the engine's names."""
    module = users.make()
    start = case.start()
    loss = loss_on("cpu", case.blueprint.loss)
    own_names = {name: users.names[name] for name in start if name in users.names}
    tensors = _named_tensors(module)
    of_model = {name: tensors[own] for name, own in own_names.items()}
    of_loss = {}
    for name, value in _named_tensors(loss).items():
        if f"loss.{name}" in start:
            of_loss[f"loss.{name}"] = value
    known = of_model | of_loss
    trained = [value for name, value in known.items() if name in case.ctx.task.trainable]
    values = {id(tensor): start[name] for name, tensor in of_model.items()}
    with unchanged(module), _with_values(module, values, case.dtype):
        _prepare(module, case)
        _train_in_torch(case, module, loss, trained)
        after = _named_tensors(module)
        ends = {name: after[own].detach().clone() for name, own in own_names.items()}
    for name, value in of_loss.items():
        ends[name] = value.detach()
    return ends


def _prepare(module: nn.Module, case: _Case) -> None:
    """Put the user's module into training mode, and tell it the parts of an input if it does not know them."""
    layout = case.population.layout
    if layout is not None and layout_of(module) is None:
        layout.attach(module)
    module.train()
    if case.blueprint.batch_norm == "frozen":
        for layer in batch_norm_layers(module):
            layer.eval()


def _train_in_torch(case: _Case, module: nn.Module, loss: Loss, parameters: Sequence[Tensor]) -> None:
    """Take the two steps of `case` with a module in plain PyTorch, which change `parameters`."""
    ours = case.ctx.optimizer
    optimizer = _TorchOptimizer(ours, parameters)
    for step, (x, y) in enumerate(case.batches):
        with case.seeded(step):
            optimizer.zero_grad()
            given = x.clone()
            outputs = logits_of(module(given))
            loss(outputs, y.clone()).backward()
            _refuse_changed_inputs(x, given)
            if ours.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, ours.clip_norm)
            optimizer.step()


def _named_tensors(module: object) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by all of their names; of anything else none."""
    if not isinstance(module, nn.Module):
        return {}
    parameters = module.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(module.named_buffers(remove_duplicate=False))


@contextlib.contextmanager
def _with_values(module: nn.Module, values: dict[int, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Give the tensors of `module` copies of `values`, by their `id`, and all of them a type; put theirs back after."""
    tensors = [*module.parameters(), *module.buffers()]
    before = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
    try:
        for tensor in tensors:
            value = values.get(id(tensor), tensor.data).cpu().clone()
            if dtype == torch.float64:
                value = in_double(value)
            tensor.data = value
            tensor.grad = None
        yield
    finally:
        for tensor, data, grad in before:
            tensor.data = data
            tensor.grad = grad


class _TorchOptimizer:
    """The local optimiser in torch's functional form, without its clipping.

    The classes of `torch.optim` would import torch's compiler, which takes a second and writes a folder.
    """

    def __init__(self, ours: Optimizer, parameters: Sequence[Tensor]):
        self._ours = ours
        self._parameters = parameters
        self._momentum: dict[int, Tensor | None] = {}
        self._moments: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(self._ours, SGD):
                self._sgd(self._ours, place, parameter, gradient)
            else:
                self._adam(self._ours, place, parameter, gradient)

    def _sgd(self, ours: SGD, place: int, parameter: Tensor, gradient: Tensor) -> None:
        buffers = [self._momentum.get(place)]
        sgd(
            [parameter],
            [gradient],
            buffers,
            foreach=False,
            weight_decay=ours.weight_decay,
            momentum=ours.momentum,
            lr=ours.lr,
            dampening=0.0,
            nesterov=ours.nesterov,
            maximize=False,
        )
        self._momentum[place] = buffers[0]

    def _adam(self, ours: Adam, place: int, parameter: Tensor, gradient: Tensor) -> None:
        if place not in self._moments:
            zeros = torch.zeros_like(parameter)
            self._moments[place] = zeros, zeros.clone(), torch.tensor(0.0)
        first, second, steps = self._moments[place]
        step: Callable[..., None] = adam
        if ours.decoupled:
            step = adamw
        step(
            [parameter],
            [gradient],
            [first],
            [second],
            [],
            [steps],
            foreach=False,
            amsgrad=False,
            beta1=ours.betas[0],
            beta2=ours.betas[1],
            lr=ours.lr,
            weight_decay=ours.weight_decay,
            eps=ours.eps,
            maximize=False,
        )


def _compared(case: _Case, expected: Weights, trained: Weights, where: str) -> str | None:
    """Return why both cannot be compared, None if they agree.

    Raises:
        UsageError: They differ; the message names the weight that differs most from that of plain PyTorch.
    """
    floats = [value for value in expected.values() if value.is_floating_point()]
    if not all(torch.isfinite(value).all() for value in floats):
        return (
            f"{where}: not compared with plain PyTorch, whose two steps on the first examples end with infinite or NaN"
        )
    start = case.start()
    wrong = {}
    for name, value in expected.items():
        if not _agree(case, start[name], value, trained[name]):
            wrong[name] = _difference(start[name], value, trained[name])
    if not wrong:
        return None
    name = max(wrong, key=lambda name: wrong[name])
    if torch.equal(start[name], trained[name]):
        how = "stays as it is"
        cause = "a layer that the model reaches through a global or a class"
    else:
        how = f"differs by {wrong[name]:.2g} times its update"
        cause = "a gradient hook of the weight"
    raise UsageError(
        f"{where}: {name} {how} after two steps, compared with plain PyTorch; usual causes are {cause}, and "
        "torch.utils.checkpoint with use_reentrant=True; use layers and weights through self"
    )


def _agree(case: _Case, start: Tensor, expected: Tensor, trained: Tensor) -> bool:
    """Return whether a weight is that of plain PyTorch, within rounding."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, trained)
    update = (expected - start).norm()
    error = (trained - expected).norm()
    return bool(error <= _SHARE[case.dtype] * update + _FLOOR[case.dtype] * (1 + start.norm()))


def _difference(start: Tensor, expected: Tensor, trained: Tensor) -> float:
    """Return the difference of a weight from that of plain PyTorch, as a share of its update there."""
    update = (expected.double() - start.double()).norm()
    error = (trained.double() - expected.double()).norm()
    return float(error / update.clamp(min=1e-12))


def _refuse_other_forms(start: Weights, trained: Weights, late_buffers: Sequence[str]) -> None:
    """Raise UsageError if a step changes the shape of a buffer, or if the model gets a new one."""
    for name, value in trained.items():
        if value.shape != start[name].shape:
            raise UsageError(
                f"model: a training step changes the shape of its buffer {name}, from {[*start[name].shape]} to "
                f"{[*value.shape]}, and buffers of clients are averaged; give it one shape"
            )
    if late_buffers:
        raise UsageError(
            f"model: its buffer {late_buffers[0]} is None until the first batch, and buffers of clients are averaged; "
            "register a tensor of its shape"
        )


def _refuse_leaks(before: dict[str, str], after: dict[str, str]) -> None:
    """Raise UsageError if attributes of the model or of the loss depend on the steps before the last one."""
    for name in before | after:
        if before.get(name) != after.get(name):
            kind, _, attribute = name.partition(".")
            raise UsageError(
                f"{kind}: training changes {attribute or 'its state'}, which is no buffer of its state_dict and would "
                "go from client to client; keep it by register_buffer in the model, or leave it out"
            )


def _refuse_changed_inputs(before: Tensor, after: Tensor) -> None:
    """Raise UsageError if a forward pass changed its inputs, which are stored for all rounds."""
    if not torch.equal(before, after):
        raise UsageError("model: modifies its input; write x = x + 1 in place of x += 1")
