"""ADCOL with differential privacy, for a trusted server (`trusted.py`) or an honest but curious one (`local.py`)."""

from rayfed.algorithms.dp_adcol.local import LocalDPAdcol
from rayfed.algorithms.dp_adcol.trusted import DPAdcol

__all__ = ["DPAdcol", "LocalDPAdcol"]
