"""FedDebias: pseudo-data and a projected contrast against local bias; see `rayfed.algorithms.feddebias.feddebias`."""

from rayfed.algorithms.feddebias.feddebias import FedDebias

__all__ = ["FedDebias"]
