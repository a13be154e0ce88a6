"""DBE: the domain bias eliminator of Zhang et al. 2023; see `rayfed.algorithms.dbe.dbe`."""

from rayfed.algorithms.dbe.dbe import DBE

__all__ = ["DBE"]
