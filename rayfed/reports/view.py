"""What of the results is shown, whether as a table, a chart or a page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class View:
    """The part of the results that is shown; None stands for a default.

    Attributes:
        metric: The metric; by default, for each experiment, the one that chooses (`Tables.criteria`).
        point: The model scored; by default the one at which each algorithm's paper evaluates, and on the split "ood"
            the global model, or where there is none the downloaded ones.
        split: The split; by default, for each experiment, the first of test, ood, val and train with values there.
        rule: The rule that picks the round; by default `selected` if every trial has a value in the round that
            validation picks, and `final` otherwise.
        select: The metric that chooses rounds and hyperparameters; by default `select.metric` of the runs.
    """

    metric: str | None = None
    point: str | None = None
    split: str | None = None
    rule: str | None = None
    select: str | None = None


DEFAULT_VIEW = View()
