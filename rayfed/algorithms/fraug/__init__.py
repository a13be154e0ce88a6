"""FRAug: federated representation augmentation of Chen et al. 2023; see `rayfed.algorithms.fraug.fraug`."""

from rayfed.algorithms.fraug.fraug import FRAug

__all__ = ["FRAug"]
