"""Early stopping by a validation score.

The rule is the one of deep learning libraries: training stops after `patience` evaluations in a row that have not
improved the best score by more than `min_delta`. Prechelt ("Early Stopping - But When?", 1998) compares it with others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayfed.core.records import SERVER, Record

HIGHER_IS_BETTER: Mapping[str, bool] = {"accuracy": True, "loss": False}
"""The metrics by which training may be stopped."""


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """When training is stopped.

    Attributes:
        patience: The evaluations in a row without an improvement after which it stops.
        min_delta: What counts as an improvement must be better than the best by more than this.
        metric: "accuracy" or "loss", the mean over the participants on their validation data.
        point: The model that is scored.
    """

    patience: int
    min_delta: float = 0.0
    metric: str = "accuracy"
    point: str = "global"

    def score(self, record: Record) -> float | None:
        """Return the score of a round: the mean over participants; None if it was not scored."""
        values = [
            score.value
            for score in record.scores
            if (score.metric, score.point, score.split) == (self.metric, self.point, "val")
            and score.client != SERVER
            and not score.unseen
        ]
        return math.fsum(values) / len(values) if values else None


class EarlyStopping:
    """Looks at the rounds of a trial, and knows when it is enough.

    Attributes:
        reason: Why training is over, in words; None while it goes on.
        round: The round after which it is; None while it goes on.
    """

    def __init__(self, rule: StopRule | None):
        self._rule = rule
        self._best: float | None = None
        self._best_round = self._waited = 0
        self.reason: str | None = None
        self.round: int | None = None

    def look(self, record: Record) -> None:
        """Take the scores of a round in, if it has any. A score that is not finite is no improvement."""
        rule = self._rule
        if rule is None or self.reason is not None or (score := rule.score(record)) is None:
            return
        if math.isfinite(score) and (self._best is None or self._is_better(score, self._best, rule)):
            self._best, self._best_round, self._waited = score, record.round, 0
            return
        self._waited += 1
        if self._waited >= rule.patience:
            self.round = record.round
            evaluations = "1 evaluation" if rule.patience == 1 else f"{rule.patience} evaluations"
            missed = "been finite"
            if self._best is not None:
                missed = f"improved on {self._best:.4g} of round {self._best_round} by more than {rule.min_delta:g}"
            self.reason = f"validation {rule.metric} ({rule.point}) has not {missed} for {evaluations}"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON takes it."""
        kept = {"best": self._best, "best_round": self._best_round, "waited": self._waited}
        return kept | {"reason": self.reason, "round": self.round}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._best, self._best_round = state["best"], state["best_round"]
        self._waited, self.reason, self.round = state["waited"], state["reason"], state.get("round")

    @staticmethod
    def _is_better(score: float, best: float, rule: StopRule) -> bool:
        gain = score - best if HIGHER_IS_BETTER[rule.metric] else best - score
        return gain > rule.min_delta
