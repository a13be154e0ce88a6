"""Which examples the seeds of an experiment share: one split, one test set, or a split for each seed.

The kind of a split decides what a standard deviation over seeds covers, which test of significance is right, and
whether a test example of one seed may choose hyperparameters as a validation example of another.
"""

from typing import NamedTuple

import pandas as pd

from rayfed.reports.selection import TRIAL

KEPT = "kept"
"""All seeds have one split."""
REDRAWN = "redrawn"
"""Each seed draws the test examples anew from those of the clients."""
REASSIGNED = "reassigned"
"""Each seed divides the examples anew among the clients, who are tested on the dataset's own test examples."""
UNKNOWN = "unknown"
"""The trials do not say who held what, or have several splits at one seed."""


class Splits(NamedTuple):
    """What the seeds of an experiment share.

    Attributes:
        kind: `KEPT`, `REDRAWN`, `REASSIGNED` or `UNKNOWN`.
        seeds: The number of seeds.
        test_examples: The number of test examples at the first seed; None if it was not recorded.
        test_ratio: The number of test examples divided by that of all others; None if it was not recorded.
    """

    kind: str
    seeds: int
    test_examples: int | None
    test_ratio: float | None

    def sentence(self) -> str:
        """Return what deviations over seeds cover; empty for one seed, or if that is unknown."""
        if self.seeds < 2:
            return ""
        if self.kind == KEPT:
            size = ""
            if self.test_examples is not None:
                size = f" of {self.test_examples:,} examples"
            return f"The {self.seeds} seeds share one split and its test set{size}: ± is over training alone."
        if self.kind == REDRAWN:
            return f"Each of the {self.seeds} seeds has a split of its own: ± is over splits and training."
        if self.kind == REASSIGNED:
            return f"Each of the {self.seeds} seeds divides one dataset, with its own test examples, anew."
        return ""


def splits_of(trials: pd.DataFrame) -> Splits:
    """Return the splits of `trials`, rows of the table `trials` of one experiment."""
    seeds = int(trials["seed"].nunique())
    drawn = trials["test_drawn"].eq(True).any()
    sizes = trials.sort_values("seed")[["examples_train", "examples_val", "examples_test"]].dropna()
    test_examples = None
    test_ratio = None
    if len(sizes):
        train, val, test = (int(size) for size in sizes.iloc[0])
        test_examples = test
        test_ratio = test / (train + val)
    return Splits(_kind(trials, redraws=bool(drawn)), seeds, test_examples, test_ratio)


def _kind(trials: pd.DataFrame, *, redraws: bool) -> str:
    hashes = trials["partition_hash"]
    if hashes.isna().any():
        return UNKNOWN
    of_seeds = hashes.groupby(trials["seed"]).agg(lambda values: tuple(sorted(set(values))))
    if of_seeds.nunique() <= 1:
        return KEPT
    if of_seeds.nunique() < len(of_seeds):
        return UNKNOWN
    if redraws:
        return REDRAWN
    return REASSIGNED


def splits_by_experiment(trials: pd.DataFrame, counted: pd.DataFrame) -> dict[str, Splits]:
    """Return the splits of each experiment; of `trials`, those in `counted` count."""
    rows = trials.merge(counted[TRIAL].drop_duplicates(), on=TRIAL)
    return {str(name): splits_of(of_experiment) for name, of_experiment in rows.groupby("experiment")}
