"""Which parameters and buffers belong to batch normalisation, found by the type of the layer, never by its name.

Looking for "bn" in names finds 85% of ResNet-18's tensors (it misses `downsample.1`) and none of MobileNet's,
EfficientNet's, DenseNet's or ShuffleNet's, where FedBN then silently becomes FedAvg.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def batch_norm_names(module: nn.Module) -> frozenset[str]:
    """Names, as in `module.state_dict()`, of every parameter and buffer of every batch-normalising layer.

    That is: BatchNorm1d/2d/3d, SyncBatchNorm and their subclasses, and any layer that keeps running statistics as they
    do (InstanceNorm with `track_running_stats=True`, frozen batch norm, a user's own): in evaluation all of these
    normalise by statistics of the data that they were trained on. GroupNorm and LayerNorm keep none and do not count.
    """
    names: set[str] = set()
    for prefix, layer in module.named_modules(remove_duplicate=False):
        if _normalises_by_statistics(layer):
            own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
            names.update(f"{prefix}.{name}" if prefix else name for name, _ in own)
    return frozenset(names)


def batch_norm_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that `batch_norm_names` speaks of."""
    return [layer for layer in module.modules() if _normalises_by_statistics(layer)]


def batch_norm_statistics(module: nn.Module) -> frozenset[str]:
    """The part of `batch_norm_names` that is measured, not learnt: running means, variances and counts of batches."""
    return frozenset(name for name in batch_norm_names(module) if name.rsplit(".", 1)[-1] in _STATISTICS)


def _normalises_by_statistics(layer: nn.Module) -> bool:
    if isinstance(layer, _BatchNorm):
        return True
    buffers = {name for name, _ in layer.named_buffers(recurse=False)}
    return {"running_mean", "running_var"} <= buffers
