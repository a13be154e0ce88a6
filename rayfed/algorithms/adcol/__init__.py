"""ADCOL: clients keep their models and share a discriminator of their representations; see `adcol.py`."""

from rayfed.algorithms.adcol.adcol import Adcol

__all__ = ["Adcol"]
