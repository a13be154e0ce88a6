"""Parameters and buffers of batch normalisation, identified by the type of the layer and not by its name.

Searching names for "bn" finds 85% of the batch-norm tensors of ResNet-18 (it misses `downsample.1`) and none of those
of MobileNet, EfficientNet, DenseNet or ShuffleNet, where FedBN would silently become FedAvg.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def batch_norm_names(module: nn.Module) -> frozenset[str]:
    """Return the names, as in `module.state_dict()`, of all parameters and buffers of batch-norm layers.

    These are BatchNorm1d/2d/3d, SyncBatchNorm and their subclasses, and any other layer with running statistics
    (InstanceNorm with `track_running_stats=True`, frozen batch norm, a user's own layer): in evaluation mode, all of
    them normalise by statistics of the training data. GroupNorm and LayerNorm have no running statistics and are not
    included.
    """
    names: set[str] = set()
    for prefix, layer in module.named_modules(remove_duplicate=False):
        if _normalises_by_statistics(layer):
            tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
            names.update(f"{prefix}.{name}" if prefix else name for name, _ in tensors)
    return frozenset(names)


def batch_norm_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers whose parameters and buffers `batch_norm_names` lists."""
    return [layer for layer in module.modules() if _normalises_by_statistics(layer)]


def batch_norm_statistics(module: nn.Module) -> frozenset[str]:
    """Return the subset of `batch_norm_names` that is not trained: running means, variances and batch counts."""
    return frozenset(name for name in batch_norm_names(module) if name.rsplit(".", 1)[-1] in _STATISTICS)


def _normalises_by_statistics(layer: nn.Module) -> bool:
    if isinstance(layer, _BatchNorm):
        return True
    buffers = {name for name, _ in layer.named_buffers(recurse=False)}
    return {"running_mean", "running_var"} <= buffers
