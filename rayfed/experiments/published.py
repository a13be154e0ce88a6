"""Published values in a search space, which reports print beside ours.

    published: {source: FLamby (2022), where: its folder of results, seeds: 5, metric: accuracy}
    arms:
      - algorithm.name: fedavg
        published: {AVG: [68.5, 2.8], cleveland: 73.1}     column: [mean, sd] or mean, as the report shows them

Columns are AVG, worst, and the names of domains.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfed.core.errors import UsageError, shown
from rayfed.core.options import build, option, suggestion
from rayfed.metrics import METRICS
from rayfed.records.published import Published, PublishedValue

MEANS = ("AVG", "worst")
NEUTRAL = frozenset({"placement", "seeds", "search", "resume", "results", "experiment", "checkpoint", "tracking"})
"""The keys that a command may give without changing what is measured, besides those of `WHERE`."""
WHERE = frozenset({"data.root", "data.download"})
"""The keys that say where the files of a dataset are."""

Number = tuple[float, float | None]
"""A mean and its standard deviation, None where none is published."""


@dataclass(frozen=True, kw_only=True)
class PublishedOptions:
    """published.*: whose values stand in the arms."""

    source: str = option(help="who published the values")
    where: str = option("", help="the file, the table or the page in which they stand")
    seeds: int = option(1, low=1, help="the number of seeds of their means")
    metric: str = option("accuracy", help="the metric that was measured")
    split: str = option("test", choices=("val", "test", "ood"), help="the part of the data")


@dataclass(frozen=True)
class PublishedRows:
    """The published values of a search space.

    Attributes:
        options: Whose values they are.
        rows: By number of the arm, the values by column.
        changed: The keys of the command that change what is measured.
    """

    options: PublishedOptions
    rows: Mapping[int, Mapping[str, Number]]
    changed: tuple[str, ...] = ()

    def check_columns(self, domains: Collection[str]) -> None:
        """Raise UsageError for a value in a column that the report cannot have; `domains` are those of the data."""
        known = [*MEANS, *domains]
        for arm, row in self.rows.items():
            for column in row:
                if column not in known:
                    where = f"arms[{arm}].published.{column}"
                    raise UsageError(f"{where}: the report has no such column; {suggestion(column, known)}")

    def check_metric(self, kind: str, metrics: Collection[str]) -> None:
        """Raise UsageError for a metric that no trial measures.

        Args:
            kind: What outputs stand for; only classes have an accuracy.
            metrics: The keys of the metrics that are measured besides accuracy and loss.
        """
        from rayfed.metrics.base import OF_CLASSES  # imports torch, which a refusal does not need

        metric = self.options.metric
        known = ["loss", *metrics]
        if kind in OF_CLASSES:
            known = ["accuracy", *known]
        if metric in known:
            return
        if metric in METRICS:
            raise UsageError(
                f"published.metric={metric}: is not measured; add metrics.{metric}=true to the search space"
            )
        if set(metrics) <= set(METRICS):  # own ones may have values of any name
            raise UsageError(f"published.metric={metric}: is not measured; {suggestion(metric, known)}")

    def of_trials(self, trials: Mapping[int, Sequence[str]]) -> Published:
        """Return the values for a report; `trials` has the names of the trials of each arm."""
        values = []
        for arm, row in self.rows.items():
            for column, (mean, sd) in row.items():
                values.append(PublishedValue(tuple(trials[arm]), column, mean, sd))
        return Published(**vars(self.options), values=tuple(values), changed=self.changed)


def published_rows(
    given: Any, arms: Sequence[Mapping[str, Any]], overrides: Sequence[Mapping[str, Any]]
) -> PublishedRows | None:
    """Return the published values of a search space, None if it has none.

    Args:
        given: The value of the key `published`, None if there is none.
        arms: The arms, of which some have a key `published`.
        overrides: What the command gives beside the file.

    Raises:
        UsageError: Something is missing, unknown or no number; the message names the key.
    """
    rows = {number: arm["published"] for number, arm in enumerate(arms) if "published" in arm}
    if given is None and not rows:
        return None
    if not isinstance(given, Mapping):
        raise UsageError(
            "published: expected a mapping with the source of the values, such as {source: Li et al. 2020}"
        )
    options = build(PublishedOptions, given, where="published")
    if not rows:
        raise UsageError("published: no arm has values; give an arm the key published, as in published: {AVG: 81.2}")
    read = {number: published_row(f"arms[{number}].published", row) for number, row in rows.items()}
    keys = set(map(str, itertools.chain(*overrides))) - WHERE
    changed = sorted(key for key in keys if key.split(".")[0] not in NEUTRAL)
    return PublishedRows(options, read, tuple(changed))


def published_row(where: str, row: Any) -> dict[str, Number]:
    """Return the values of a row by column, from column: mean or column: [mean, sd].

    Raises:
        UsageError: A value is none of both; the message begins with `where`.
    """
    if not isinstance(row, Mapping) or not row:
        raise UsageError(f"{where}={shown(row)}: expected values by column, as in {{AVG: [81.2, 0.5]}}")
    return {str(column): published_number(f"{where}.{column}", value) for column, value in row.items()}


def published_number(where: str, value: Any) -> Number:
    """Return the mean and the standard deviation that `value` gives; infinity stands for "never reached"."""
    numbers = [value]
    if isinstance(value, list):
        numbers = value
    if len(numbers) not in (1, 2) or not all(map(_is_number, numbers)):
        raise UsageError(f"{where}={shown(value)}: expected a number, or [mean, sd]")
    if len(numbers) == 1:
        return float(numbers[0]), None
    mean, sd = numbers
    if sd < 0:
        raise UsageError(f"{where}={shown(value)}: the standard deviation is negative")
    return float(mean), float(sd)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def one_configuration(arms: Sequence[Sequence[Mapping[str, Any]]], rows: PublishedRows) -> None:
    """Raise UsageError if an arm with published values has several configurations: only one was published."""
    for number in rows.rows:
        if len(arms[number]) > 1:
            count = len(arms[number])
            raise UsageError(
                f"arms[{number}].published: the arm has {count} configurations; give each an arm of its own"
            )


def trials_by_arm(arms: Sequence[Sequence[Any]], names: Sequence[str]) -> dict[int, list[str]]:
    """Return the names of the trials of each arm; `names` are in the order of `configurations`."""
    of_one_seed: list[int] = []
    for number, arm in enumerate(arms):
        of_one_seed += [number] * len(arm)
    trials: dict[int, list[str]] = {}
    for number, name in zip(itertools.cycle(of_one_seed), names, strict=False):
        trials.setdefault(number, []).append(name)
    return trials
