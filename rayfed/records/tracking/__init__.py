"""Experiment trackers: TensorBoard, Weights & Biases and MLflow.

The recorder feeds them, through which every round of every trial passes, of single runs and of sweeps, with and without
Ray. So they all have the true rounds on their axis, and one interface (`rayfed.records.tracking.base.Tracker`) serves
all. They work on a thread of their own: a slow or failing tracker neither delays nor ends a trial.
"""

from rayfed.records.tracking.check import check_trackers
from rayfed.records.tracking.feed import Feed

__all__ = ["Feed", "check_trackers"]
