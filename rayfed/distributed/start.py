"""How a trial starts in the process of its server. This module imports neither torch nor Ray."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Start(NamedTuple):
    """How a trial starts.

    Attributes:
        trial: Its name.
        job: Its `Job`, pickled.
        changes: The hyperparameters that differ from those of the job.
        values: The hyperparameters that Tune sees.
        checkpoint: What `Trials.save` returned, if Tune goes on from there.
        tuner_id: Tune's id of the trial, in a `Tuner` of the user's own. It decides about the name.
    """

    trial: str
    job: bytes
    changes: Mapping[str, Any]
    values: Mapping[str, Any]
    checkpoint: Mapping[str, Any] | None = None
    tuner_id: str = ""
