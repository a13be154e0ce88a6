"""The proof that a model trains here as in PyTorch: two steps of both, from the same weights, on the same batches.

The engine runs a copy of the user's module with the weights of each client. Whatever holds a tensor or a layer outside
of the copy (a global, a class attribute, a hook of a weight) would train with wrong numbers, and say nothing. So the
plan compares. It computes in float64 where the model can, so that a difference is no rounding.
"""

import contextlib
import copy
import functools
import inspect
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.algorithm import Context
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError, error_line
from rayfed.core.layout import Layout, layout_of
from rayfed.core.modules import batch_norm_layers, copied, unchanged
from rayfed.core.network import logits_of, vectorised
from rayfed.core.optim import SGD, Adam, Optimizer
from rayfed.core.rng import global_generators_seeded, global_state_kept
from rayfed.core.task import Batch, Loss, loss_on
from rayfed.core.trees import Weights, clone, only, stack, state_hash
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.plan_model import UsersModel, first_batch, largest_part
from rayfed.experiments.user_code import object_hash

_EXAMPLES = 4  # at most, of each of the two steps
_LEAST_LR = 0.01  # so that a step from old weights differs
_MOST_WEIGHTS = 2**26  # of which copies in float64 are made
_SHARE = {torch.float64: 1e-5, torch.float32: 2e-3}  # of a weight's update, by which both may differ
_FLOOR = {torch.float64: 1e-9, torch.float32: 1e-5}  # the same, as a share of the weight: rounding
_TORCHS = frozenset(vars(nn.Module()))  # attributes


def prove_training(blueprint: Blueprint, population: Population, users: UsersModel, where: str) -> str | None:
    """Compare two steps of local training here with two steps in plain PyTorch.

    Args:
        blueprint: The simulation, with the configured optimiser. Both train with FedAvg.
        population: Its data. The client with the most examples gives the batches.
        users: The model as its user wrote it.
        where: The key of the model, for messages.

    Returns:
        Why nothing could be compared; None if both agree.

    Raises:
        UsageError: They differ, the training step fails, or it leaves something behind that is no weight.
    """
    batches = _batches(blueprint, population)
    with global_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        if _fits_in_double(blueprint.model):
            ends = None
            with contextlib.suppress(Exception):  # of code that takes float32 alone; the next attempt says what fails
                case = _Case.of(blueprint, population, batches, torch.float64)
                ends = _in_torch(case, users), _in_engine(case, where)
            if ends is not None:
                _compare(case, *ends, where)
                return None
        case = _Case.of(blueprint, population, batches, torch.float32)
        trained = _in_engine(case, where)
        try:
            expected = _in_torch(case, users)
        except UsageError:
            raise
        except Exception as error:  # the user's code may raise anything
            return f"{where}: not compared with plain PyTorch, in which a step fails: {error_line(error)}"
        _compare(case, expected, trained, where)
        return None


def vectorises_as_alone(blueprint: Blueprint, population: Population, where: str) -> str | None:
    """Return why clients cannot train at once with `torch.vmap`; None if a step of two clients ends as that of one."""
    batches = _batches(blueprint, population)
    with global_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = _Case.of(blueprint, population, batches, torch.float32)
        alone = _steps(case, batches[:1])
        try:
            together = _step_of_two(case, batches[0])
        except Exception as error:  # the user's code may raise anything
            return f"torch cannot vectorise a training step of {where}: {error_line(error)}"
    for name, start in case.start().items():
        for weights in together:
            if not _agree(case, start, alone[name], weights[name]):
                return f"a step of {where} with torch.vmap gives other weights ({name})"
    return None


class _Case(NamedTuple):
    """What is trained: the model and the loss in one type, the context of FedAvg, and the batches."""

    model: nn.Module
    loss: Loss
    ctx: Context
    batches: Sequence[Batch]
    dtype: torch.dtype
    frozen_batch_norm: bool
    layout: Layout | None
    seed: int

    @classmethod
    def of(cls, blueprint: Blueprint, population: Population, batches: Sequence[Batch], dtype: torch.dtype) -> "_Case":
        optimizer: Optimizer = replace(blueprint.optimizer, lr=max(blueprint.optimizer.lr, _LEAST_LR))
        model = copied(blueprint.model)
        loss = blueprint.training_loss or blueprint.loss
        if dtype == torch.float64:
            model, loss = _module_in_double(model), _loss_in_double(loss)
            batches = [Batch(_in_double(x), _in_double(y)) for x, y in batches]
        elif isinstance(optimizer, Adam):  # which would enlarge the rounding of small gradients
            optimizer = SGD(lr=optimizer.lr)
        trained = replace(
            blueprint, algorithm=FedAvg(), model=model, loss=loss, training_loss=None, optimizer=optimizer
        )
        frozen = blueprint.batch_norm == "frozen"
        ctx = trained.context(population, "cpu")
        return cls(model, loss, ctx, batches, dtype, frozen, population.layout, blueprint.seed)

    def start(self) -> Weights:
        """Return copies of the first weights."""
        weights: Weights = clone(self.ctx.task.initial_weights())
        return weights

    def seeded(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Seed all generators for a step, so that both draw the same numbers."""
        return global_generators_seeded(self.seed, f"proof, step {step}")


def _batches(blueprint: Blueprint, population: Population) -> list[Batch]:
    """Return two batches of the client with the most examples; images are in [0, 1]."""
    part = largest_part(population)
    size = max(1, min(blueprint.batch_size, _EXAMPLES, len(part) // 2))
    x, y = first_batch(part, 2 * size)
    if part.dtype == np.uint8:
        x = x / 255
    first, second = x[:size], x[-size:]
    return [Batch(first, y[:size]), Batch(second, y[-size:])]


def _in_engine(case: _Case, where: str) -> Weights:
    """Return the weights after two steps of local training.

    Raises:
        UsageError: A step fails, or changes what a later step of another client finds.
    """
    model: nn.Module = case.ctx.task.model.module
    try:
        first = _steps(case, case.batches[:1])
        facts = _facts(model, case.ctx.task.training_loss)
        trained = _steps(case, case.batches)
        again = _steps(case, case.batches[:1])
    except UsageError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"{where}: a training step fails: {error_line(error)}") from error
    _refuse_other_forms(case, trained)
    _refuse_leaks(facts, _facts(model, case.ctx.task.training_loss))
    if state_hash(first) != state_hash(again):
        raise UsageError(
            f"{where}: a training step from the same weights gives others after further steps, so something is kept "
            "outside of the model's state_dict and would go from client to client; keep it by register_buffer"
        )
    return trained


def _steps(case: _Case, batches: Sequence[Batch]) -> Weights:
    """Return the weights after a step on each of `batches`, from the first weights, by the engine."""
    task, weights = case.ctx.task, case.start()
    work = {"weights": weights, "optimizer": case.ctx.optimizer.init(only(weights, task.trainable))}
    for step, batch in enumerate(batches):
        with case.seeded(step):
            work, _ = FedAvg().step(case.ctx, work, {}, batch)
    return work["weights"]


def _step_of_two(case: _Case, batch: Batch) -> list[Weights]:
    """Return the weights of two clients after the same step, taken at once."""
    weights = case.start()
    work = {"weights": weights, "optimizer": case.ctx.optimizer.init(only(weights, case.ctx.task.trainable))}
    step = functools.partial(FedAvg().step, case.ctx)
    with case.seeded(0), vectorised():
        both, _ = torch.vmap(step, in_dims=(0, None, 0), randomness="same")(
            stack([work, work]), {}, stack([batch, batch])
        )
    return [{name: value[client] for name, value in both["weights"].items()} for client in range(2)]


def _in_torch(case: _Case, users: UsersModel) -> Weights:
    """Return the weights after two steps of plain PyTorch, by the engine's names."""
    module, start = users.make(), case.start()
    loss = loss_on("cpu", case.loss)
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    of_model = {name: tensors[users.names[name]] for name in start if name in users.names}
    of_loss = {name: value for name, value in _tensors_of_loss(loss).items() if name in start}
    trained = [value for name, value in (of_model | of_loss).items() if name in case.ctx.task.trainable]
    optimizer = _torch_optimizer(case.ctx.optimizer, trained)
    with unchanged(module), _with_values(module, {id(of_model[name]): start[name] for name in of_model}, case.dtype):
        if case.layout is not None and layout_of(module) is None:
            case.layout.attach(module)
        module.train()
        if case.frozen_batch_norm:
            for layer in batch_norm_layers(module):
                layer.eval()
        for step, (x, y) in enumerate(case.batches):
            with case.seeded(step):
                optimizer.zero_grad()
                given = x.clone()
                loss(logits_of(module(given)), y.clone()).backward()
                _refuse_changed_inputs(x, given)
                if case.ctx.optimizer.clip_norm is not None:
                    nn.utils.clip_grad_norm_(trained, case.ctx.optimizer.clip_norm)
                optimizer.step()
        after = dict(module.named_parameters(remove_duplicate=False)) | dict(
            module.named_buffers(remove_duplicate=False)
        )
        ends = {name: after[users.names[name]].detach().clone() for name in of_model}
        return ends | {name: value.detach().clone() for name, value in of_loss.items()}


def _refuse_changed_inputs(before: Tensor, after: Tensor) -> None:
    """Raise UsageError if a forward pass changed its inputs, which are stored for all rounds."""
    if not torch.equal(before, after):
        raise UsageError("model: modifies its input; write x = x + 1 in place of x += 1")


@contextlib.contextmanager
def _with_values(module: nn.Module, values: dict[int, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Give the tensors of `module` copies of `values`, by their `id`, and all of them a type; put theirs back after."""
    tensors = [*module.parameters(), *module.buffers()]
    before = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
    try:
        for tensor in tensors:
            value = values.get(id(tensor), tensor.data).cpu().clone()
            tensor.data = _in_double(value) if dtype == torch.float64 else value
            tensor.grad = None
        yield
    finally:
        for tensor, data, grad in before:
            tensor.data = data
            tensor.grad = grad


def _compare(case: _Case, expected: Weights, trained: Weights, where: str) -> None:
    """Raise UsageError for the weight that differs most from that of plain PyTorch."""
    start = case.start()
    wrong = {name: _difference(start[name], expected[name], trained[name]) for name in expected}
    wrong = {
        name: share for name, share in wrong.items() if not _agree(case, start[name], expected[name], trained[name])
    }
    if not wrong:
        return
    name = max(wrong, key=lambda name: wrong[name])
    stays = torch.equal(start[name], trained[name])
    how = "stays as it is" if stays else f"differs by {wrong[name]:.2g} times its update"
    cause = "a layer that the model reaches through a global or a class" if stays else "a gradient hook of the weight"
    raise UsageError(
        f"{where}: {name} {how} after two steps, compared with plain PyTorch; usual causes are {cause}, and "
        "torch.utils.checkpoint with use_reentrant=True; use layers and weights through self"
    )


def _agree(case: _Case, start: Tensor, expected: Tensor, trained: Tensor) -> bool:
    """Return whether a weight is that of plain PyTorch, within rounding."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, trained)
    update, error = (expected - start).norm(), (trained - expected).norm()
    if not torch.isfinite(expected).all():
        return torch.equal(torch.isfinite(expected), torch.isfinite(trained))
    return bool(error <= _SHARE[case.dtype] * update + _FLOOR[case.dtype] * (1 + start.norm()))


def _difference(start: Tensor, expected: Tensor, trained: Tensor) -> float:
    """Return the difference of a weight from that of plain PyTorch, as a share of its update there."""
    update, error = ((a.double() - b.double()).norm() for a, b in ((expected, start), (trained, expected)))
    return float(error / update.clamp(min=1e-12))


def _refuse_other_forms(case: _Case, trained: Weights) -> None:
    """Raise UsageError if a step changes the shape of a buffer, or if the model gets a new one."""
    start = case.start()
    for name, value in trained.items():
        if value.shape != start[name].shape:
            raise UsageError(
                f"model: a training step changes the shape of its buffer {name}, from {[*start[name].shape]} to "
                f"{[*value.shape]}, and buffers of clients are averaged; give it one shape"
            )
    known = case.ctx.task.model
    for name, _ in known.module.named_buffers():
        if name not in known.buffers and name not in known.constants:
            raise UsageError(
                f"model: its buffer {name} is None until the first batch, and buffers of clients are averaged; "
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


def _facts(model: nn.Module, loss: Any) -> dict[str, str]:
    """Return hashes of what can change about a model and its loss, by dotted names."""
    return _attributes("model", model) | _attributes("loss", loss)


def _attributes(kind: str, value: Any) -> dict[str, str]:
    facts: dict[str, str] = {}
    holders = value.named_modules() if isinstance(value, nn.Module) else [("", value)]
    for path, holder in holders:
        for key, part in _parts(holder):
            facts[".".join(filter(None, [kind, path, key]))] = object_hash(part, everywhere=True)
    if not isinstance(value, nn.Module):
        facts[kind] = object_hash(value, everywhere=True)
    return facts


def _parts(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a layer or a loss holds beside its weights: attributes, constants, and variables of a closure."""
    for key, part in getattr(holder, "__dict__", {}).items():
        if key not in _TORCHS:
            yield key, part
    yield from getattr(holder, "_buffers", {}).items()
    for key, part in getattr(holder, "_parameters", {}).items():
        if part is not None and not part.requires_grad:
            yield key, part._version
    if isinstance(holder, types.FunctionType):
        yield from inspect.getclosurevars(holder).nonlocals.items()


def _torch_optimizer(ours: Optimizer, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return torch's form of a local optimiser, without its clipping."""
    if isinstance(ours, SGD):
        return torch.optim.SGD(
            parameters, ours.lr, momentum=ours.momentum, weight_decay=ours.weight_decay, nesterov=ours.nesterov
        )
    kind = torch.optim.AdamW if ours.decoupled else torch.optim.Adam
    return kind(parameters, ours.lr, betas=ours.betas, eps=ours.eps, weight_decay=ours.weight_decay)


def _tensors_of_loss(loss: Loss) -> dict[str, Tensor]:
    """Return the tensors of a loss by the names that they have beside the weights of a model."""
    if not isinstance(loss, nn.Module):
        return {}
    named = [*loss.named_parameters(), *loss.named_buffers()]
    return {f"loss.{name}": value for name, value in named}


def _fits_in_double(model: nn.Module) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    is_single = all(value.dtype in (torch.float32, torch.float64) for value in tensors if value.is_floating_point())
    return is_single and sum(value.numel() for value in tensors) <= _MOST_WEIGHTS


def _in_double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _module_in_double(module: nn.Module) -> nn.Module:
    if getattr(module, "feature_shape", ()):
        module.feature_dtype = torch.float64  # type: ignore[assignment]
    return module.double()


def _loss_in_double(loss: Loss) -> Loss:
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    if isinstance(loss, functools.partial):
        options = {
            key: _in_double(value) if isinstance(value, Tensor) else value for key, value in loss.keywords.items()
        }
        return functools.partial(_loss_in_double(loss.func), *loss.args, **options)
    return loss
