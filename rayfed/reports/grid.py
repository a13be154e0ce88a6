"""Whether chosen hyperparameters lie at an edge of what was tried, so that better ones may lie beyond."""

import pandas as pd

from rayfed.reports.groups import ALGORITHM_PREFIX, format_value


def edge_words(tried: pd.DataFrame, chosen: pd.DataFrame) -> list[str]:
    """Return "mu=0.01, the lowest of 3 values (fedprox, ditto)" for each edge at which a chosen value lies.

    Both frames have the columns algorithm and hyperparameters and, under dotted names, the values that vary. Values
    that are no numbers have no edges, and neither has a key with a single value.
    """
    methods: dict[str, list[str]] = {}
    for algorithm, rows in chosen.groupby("algorithm"):
        of_algorithm = tried[tried["algorithm"] == algorithm]
        for key in of_algorithm:
            if "." in key:
                values = _numbers(of_algorithm[key])
            else:
                values = set()
            if values:
                taken = _numbers(rows[key])
            else:
                taken = set()
            side = _side(values, taken)
            if side:
                name = key.removeprefix(ALGORITHM_PREFIX)
                value = format_value(taken.pop())
                words = f"{name}={value}, the {side} of {len(values)} values"
                methods.setdefault(words, []).append(str(algorithm))
    told = []
    for words, names in methods.items():
        told.append(f"{words} ({', '.join(names)})")
    return told


def _numbers(values: pd.Series) -> set[float]:
    """Return the different numbers in a column; none if some value is no number."""
    distinct = values.dropna().unique()
    numbers = set()
    for value in distinct:
        if isinstance(value, (bool, str)):
            return set()
        numbers.add(float(value))
    return numbers


def _side(values: set[float], taken: set[float]) -> str:
    if len(values) < 2 or len(taken) != 1:
        return ""
    if taken == {min(values)}:
        return "lowest"
    if taken == {max(values)}:
        return "highest"
    return ""
