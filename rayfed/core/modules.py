"""torch's modules: copies of all kinds of them, and the layers that need care, with batch or spectral normalisation."""

import copy
import io
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList, _inject_new_class, _inject_property, is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from rayfed.core.closures import copied_with_functions

ALIGNMENT = 64
"""Bytes, as torch aligns tensors; with others, kernels may be slow or round differently."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
M = TypeVar("M", bound=nn.Module)


def batch_norm_names(module: nn.Module) -> frozenset[str]:
    """Return the names, as in `module.state_dict()`, of all parameters and buffers of batch-norm layers.

    The type of a layer decides, not its name. A search for "bn" finds 85% of the batch-norm tensors of ResNet-18 (it
    misses `downsample.1`). It finds none of those of MobileNet, EfficientNet, DenseNet or ShuffleNet: FedBN would
    silently become FedAvg on these.

    The layers are BatchNorm1d/2d/3d, SyncBatchNorm and their subclasses, and all other layers with running statistics
    (InstanceNorm with `track_running_stats=True`, frozen batch norm, a user's own layer): in evaluation mode, they too
    normalise by statistics of the training data. GroupNorm and LayerNorm have no running statistics.
    """
    names: set[str] = set()
    for prefix, layer in module.named_modules(remove_duplicate=False):
        if _normalises_by_statistics(layer):
            names.update(dict(layer.named_parameters(prefix, recurse=False)))
            names.update(dict(layer.named_buffers(prefix, recurse=False)))
    return frozenset(names)


def batch_norm_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers whose parameters and buffers `batch_norm_names` lists."""
    return [layer for layer in module.modules() if _normalises_by_statistics(layer)]


def batch_norm_statistics(module: nn.Module) -> frozenset[str]:
    """Return the subset of `batch_norm_names` that is not trained: running means, variances and batch counts."""
    found = set()
    for name in batch_norm_names(module):
        *_, last = name.split(".")
        if last in _STATISTICS:
            found.add(name)
    return frozenset(found)


def _normalises_by_statistics(layer: nn.Module) -> bool:
    buffers = dict(layer.named_buffers(recurse=False))
    return isinstance(layer, _BatchNorm) or ("running_mean" in buffers and "running_var" in buffers)


def constant_names(module: nn.Module, *, frozen_batch_norm: bool = False) -> frozenset[str]:
    """Return the names of the tensors of `module` that training leaves as they are, tied ones under their first name.

    They are the parameters with `requires_grad=False`, the buffers registered with `persistent=False`, and all tensors
    of batch-norm layers if `frozen_batch_norm`.
    """
    kept = set()
    for layer in module.modules():
        transient = getattr(layer, "_non_persistent_buffers_set", ())
        for name, value in layer._buffers.items():
            if name not in transient:
                kept.add(id(value))
    frozen = [name for name, value in module.named_parameters() if not value.requires_grad]
    passing = [name for name, value in module.named_buffers() if id(value) not in kept]
    constants = frozenset([*frozen, *passing])
    if frozen_batch_norm:
        return constants | batch_norm_names(module)
    return constants


def set_singular_vectors(module: nn.Module) -> None:
    """Give every spectral normalisation of `module` the first singular vectors of its present weight.

    The vectors are buffers that follow from the weight, so their mean over clients means nothing. torch has two kinds
    of layers, of `nn.utils.parametrizations.spectral_norm` and of `nn.utils.spectral_norm`.
    """
    for layer in module.modules():
        if isinstance(layer, ParametrizationList) and any(map(_has_vectors, layer)):
            if layer.is_tensor:
                weights = [layer.original]
            else:
                weights = [getattr(layer, f"original{number}") for number in range(layer.ntensors)]
            step: Any
            for step in layer:
                if _has_vectors(step):
                    matrix = step._reshape_weight_to_matrix(weights[0])
                    step._u, step._v = _singular_vectors(matrix, step._u)
                weights = [step(*weights)]
        for hook in _old_hooks(layer):
            matrix = hook.reshape_weight_to_matrix(getattr(layer, f"{hook.name}_orig"))
            u, v = _singular_vectors(matrix, getattr(layer, f"{hook.name}_u"))
            setattr(layer, f"{hook.name}_u", u)
            setattr(layer, f"{hook.name}_v", v)


def spectral_layers(module: nn.Module) -> list[tuple[list[str], list[str]]]:
    """Return the names of the parameters and of the buffers of each layer whose vectors `set_singular_vectors` sets."""
    layers = []
    for prefix, layer in module.named_modules():
        new = isinstance(layer, ParametrizationList) and any(map(_has_vectors, layer))
        if new or any(_old_hooks(layer)):
            parameters = dict(layer.named_parameters(prefix, recurse=new))
            buffers = dict(layer.named_buffers(prefix, recurse=new))
            layers.append((list(parameters), list(buffers)))
    return layers


def _has_vectors(layer: nn.Module) -> bool:
    return isinstance(layer, _SpectralNorm) and getattr(layer, "_u", None) is not None  # vectors need none


def _old_hooks(layer: nn.Module) -> Iterator[Any]:
    """Yield the hooks of `nn.utils.spectral_norm` that have vectors."""
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm) and getattr(layer, f"{hook.name}_u") is not None:
            yield hook


def _singular_vectors(matrix: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first left and right singular vectors of `matrix`, with the sign that is closer to that of `u`."""
    threads = torch.get_num_threads()
    exact = matrix.detach().to("cpu", torch.float64)
    torch.set_num_threads(1)  # the number of threads changes rounding
    try:
        is_wide = exact.shape[0] <= exact.shape[1]
        if is_wide:
            gram = exact @ exact.mT
        else:
            gram = exact.mT @ exact
        first = torch.linalg.eigh(gram).eigenvectors[:, -1]
        towards_other = exact
        if is_wide:
            towards_other = exact.mT
        other = F.normalize(towards_other @ first, dim=0)
        if is_wide:
            left = first
            right = other
        else:
            left = other
            right = first
        sign = 1
        if left @ u.detach().to(left) < 0:
            sign = -1
    finally:
        torch.set_num_threads(threads)
    return (sign * left).to(u), (sign * right).to(u)


def copied(module: M, tensors: Mapping[int, Tensor] | None = None) -> M:
    """Return a copy of `module`; `tensors`, by the `id` of the originals, take the place of those.

    torch refuses to copy attributes that hold results of the last forward pass, as pruned layers and its old weight
    normalisation have. They are copied without their graph. Functions that use the module's layers or tensors, such as
    `lambda x: self.b(self.a(x))`, use those of the copy.
    """
    results = {}
    for layer in module.modules():
        for value in vars(layer).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                results[id(value)] = value.detach().clone()
    return copied_with_functions(module, results | dict(tensors or {}))


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put back all tensors and attributes of `module` after this block, in which it is only tried.

    Layers may initialise themselves by their first batch, and count or keep what they see. Frozen parameters are taken
    to be constants. Lazy layers keep the weights that they get.
    """
    attributes = []
    for layer in module.modules():
        if not isinstance(layer, torch.jit.ScriptModule) and not _has_lazy_tensors(layer):
            attributes.append(_Attributes(layer))
    trained = [value for value in module.parameters() if value.requires_grad]
    tensors: list[tuple[Tensor, Tensor]] = []  # with their values
    for tensor in (*trained, *module.buffers()):
        if not is_lazy(tensor):
            tensors.append((tensor, tensor.detach().clone()))
    try:
        yield
    finally:
        for kept in attributes:
            kept.put_back()
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)


class _Attributes:
    """The attributes of a layer, and what its lists, dictionaries and sets hold."""

    def __init__(self, layer: nn.Module):
        self._layer = layer
        self._values = dict(vars(layer))
        self._contents = []
        for value in self._values.values():
            if isinstance(value, (list, dict, set, deque)):
                self._contents.append((value, value.copy()))

    def put_back(self) -> None:
        vars(self._layer).clear()
        vars(self._layer).update(self._values)
        for container, content in self._contents:
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(content)
            else:
                container.update(content)


def _has_lazy_tensors(layer: nn.Module) -> bool:
    tensors = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    return any(is_lazy(value) for value in tensors)


@torch.no_grad()
def recompute(module: nn.Module) -> None:
    """Compute the attributes of `module` that follow from its parameters, as torch does in a forward pass."""
    for layer in module.modules():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, (BasePruningMethod, SpectralNorm, WeightNorm)):
                hook(layer, None)


def has_convolutions(module: nn.Module) -> bool:
    """Return whether the tensors of four dimensions belong into channels-last memory format; see `Task`."""
    kinds = (nn.Conv2d, nn.ConvTranspose2d)
    return any(isinstance(layer, kinds) for layer in module.modules())


class Parcel(NamedTuple):
    """A module with empty parameters and buffers, and for each its bytes, dtype, shape and order of sides in memory.

    Ray lays arrays where all processes of a machine share them, and copies tensors.
    """

    module: Any
    tensors: list[tuple[Tensor, np.ndarray, torch.dtype, list[int], list[int]]]

    @classmethod
    def of(cls, module: nn.Module) -> "Parcel":
        if isinstance(module, torch.jit.ScriptModule):  # which pickle refuses
            buffer = io.BytesIO()
            torch.jit.save(module, buffer)
            return cls(buffer.getvalue(), [])
        tensors = []
        empty = dict[int, Tensor]()
        convolves = has_convolutions(module)
        for tensor in (*module.parameters(), *module.buffers()):
            value = tensor.detach()
            if convolves and value.dim() == 4:
                sides = [0, 2, 3, 1]
            else:
                sides = list(range(value.dim()))
            flat = value.cpu().permute(sides).contiguous()
            empty[id(tensor)] = hole = copy.copy(tensor)
            hole.data = flat.new_empty(0)
            array = flat.reshape(-1).view(torch.uint8).numpy()
            tensors.append((hole, array, value.dtype, list(flat.shape), sides))
        return cls(copied(module, empty), tensors)

    def unpacked(self) -> nn.Module:
        """Return the module, whose tensors may lie in memory that other processes read."""
        for hole, array, dtype, shape, sides in self.tensors:
            with warnings.catch_warnings(action="ignore"):  # arrays of Ray are read-only
                flat = torch.from_numpy(array)
            if flat.data_ptr() % ALIGNMENT:  # Ray aligns large arrays
                flat = flat.clone()
            places = np.argsort(sides).tolist()
            hole.data = flat.view(dtype).reshape(shape).permute(places)
        script = isinstance(self.module, bytes)
        module: nn.Module = self.module
        if script:
            module = torch.jit.load(io.BytesIO(self.module))
        return module


def make_picklable(module: nn.Module) -> None:
    """Let the parametrised layers of `module` be pickled, such as those of torch's weight normalisation.

    torch makes a class for each of them, which another process does not have. It is made again there.
    """
    for layer in module.modules():
        if is_parametrized(layer):
            type(layer).__reduce_ex__ = _reduced  # type: ignore[assignment, method-assign]


def _reduced(layer: Any, protocol: int) -> tuple[Any, ...]:
    original: Any = type(layer).__base__
    return _made_again, (original, tuple(layer.parametrizations)), original.__getstate__(layer)


def _made_again(original: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    layer = original.__new__(original)
    _inject_new_class(layer)
    type(layer).__reduce_ex__ = _reduced  # type: ignore[assignment, method-assign]
    for name in names:
        _inject_property(layer, name)
    return layer
