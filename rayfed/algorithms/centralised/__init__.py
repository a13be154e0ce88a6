"""Centralised training on all domains: the counterparts of federated methods in de Luca et al. 2022, section 4.1."""

from rayfed.algorithms.centralised.erm import ERM
from rayfed.algorithms.centralised.group_dro import CentralGroupDRO
from rayfed.algorithms.centralised.irm import IRM
from rayfed.algorithms.centralised.rex import MMREx, VREx

__all__ = ["ERM", "IRM", "CentralGroupDRO", "MMREx", "VREx"]
