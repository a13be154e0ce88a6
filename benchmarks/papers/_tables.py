"""A results table of a paper as a YAML file: its numbers, the configurations that make them again, and its claims.

title, paper, setting     what was measured where, in the paper
columns                   name -> {split, over, rounds}: how a column is worked out of the metrics table
    over                  mean: over clients, or over test sets; weighted: by their examples; worst: the lowest of
                          them; or {domain: NAME}
    rounds                last; best: the best round (on this very split, as some papers do); best5: the mean of
                          the five best rounds
rows                      name -> {arm: the keys of its configuration, small: more keys in the small form (or false:
                          not in it), published: column -> number, or [number, sd]}; without an arm a row is not
                          measured, without numbers (a control of ours) not published
claims                    lines such as "worst: full > FedAvg + 2": column, row, row, margin in points
full, small               search spaces (see rayfed.space) without arms, and
    cap                   {train: n, test: m}: at most so many examples of each client of an .npz file
    note                  what differs from the paper
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rayfed.config import Config
from rayfed.errors import UsageError
from rayfed.plan import trial_name
from rayfed.results.read import Tables
from rayfed.sources import from_file, merged
from rayfed.space import Space, read_space

HOME = Path(__file__).parent
KEYS = {"title", "paper", "setting", "columns", "rows", "claims", "full", "small"}
OVER = ("mean", "weighted", "worst")
ROUNDS = {
    "last": lambda series: series.iloc[-1],
    "best": lambda series: series.max(),
    "best5": lambda series: series.nlargest(5).mean(),
}
CLAIM = re.compile(r"(?P<column>[^:]+): (?P<more>.+) > (?P<less>.+?)(?: (?P<sign>[+-]) (?P<margin>[\d.]+))?")


@dataclass(frozen=True)
class Claim:
    """In `column`, `more` lies above `less` by more than `margin` points."""

    text: str
    column: str
    more: str
    less: str
    margin: float


@dataclass(frozen=True)
class PaperTable:
    """One YAML file, checked."""

    name: str
    content: Mapping[str, Any]
    claims: tuple[Claim, ...]

    @property
    def rows(self) -> Mapping[str, Mapping[str, Any]]:
        return self.content["rows"]

    @property
    def columns(self) -> Mapping[str, Mapping[str, Any]]:
        return self.content["columns"]

    def published(self, row: str, column: str) -> tuple[float, float | None] | None:
        """The paper's number and its sd, each where printed."""
        value = self.rows[row]["published"].get(column)
        if value is None:
            return None
        return (float(value[0]), float(value[1])) if isinstance(value, list) else (float(value), None)

    def arms(self, scale: str) -> dict[str, Mapping[str, Any]]:
        """The rows that `scale` measures, each with its keys."""
        more = {name: row.get("small", {}) if scale == "small" else {} for name, row in self.rows.items()}
        return {n: merged(row["arm"], more[n]) for n, row in self.rows.items() if "arm" in row and more[n] is not False}

    def space(self, scale: str, overrides: Mapping[str, Any]) -> Space:
        """The sweep that measures the table at `scale`, one arm for each row."""
        given = {key: value for key, value in self.content[scale].items() if key not in ("cap", "note")}
        arms = list(self.arms(scale).values())
        own = {"experiment": f"{self.name}_{scale}", "arms": arms}
        return read_space(merged(_with_file(given, self.content[scale].get("cap")), own), overrides)


def names() -> list[str]:
    """Every table there is."""
    return sorted(path.stem for path in HOME.glob("*.yaml"))


def read_table(name: str) -> PaperTable:
    """The table `name`; `UsageError` where there is none, or where its file contradicts itself."""
    if name not in names():
        raise UsageError(f"{name}: no such table; known: {', '.join(names())}")
    content = from_file(HOME / f"{name}.yaml")
    if set(content) != KEYS:
        raise UsageError(f"{name}.yaml: expected exactly the keys {', '.join(sorted(KEYS))}")
    for column, rule in content["columns"].items():
        over, rounds = rule.get("over"), rule.get("rounds")
        if (over not in OVER and not (isinstance(over, Mapping) and set(over) == {"domain"})) or rounds not in ROUNDS:
            raise UsageError(f"{name}.yaml: columns.{column}: over={over!r}, rounds={rounds!r}")
    for row, given in content["rows"].items():
        numbers = given.get("published")
        if set(given) - {"arm", "small", "published"} or not isinstance(numbers, Mapping):
            raise UsageError(f"{name}.yaml: rows.{row}: expected arm, small, and published with its numbers")
        if unknown := set(numbers) - set(content["columns"]):
            raise UsageError(f"{name}.yaml: rows.{row}.published: no column {sorted(unknown)[0]}")
    return PaperTable(name, content, tuple(_claim(name, content, text) for text in content["claims"]))


def _claim(name: str, content: Mapping[str, Any], text: str) -> Claim:
    found = CLAIM.fullmatch(text)
    if not found or found["column"] not in content["columns"] or {found["more"], found["less"]} - set(content["rows"]):
        raise UsageError(f"{name}.yaml: claims: {text!r} is not COLUMN: ROW > ROW [+ POINTS] of its columns and rows")
    margin = float(f"{found['sign'] or '+'}{found['margin'] or 0}")
    return Claim(text, found["column"], found["more"], found["less"], margin)


def _with_file(values: Mapping[str, Any], cap: Mapping[str, int] | None) -> dict[str, Any]:
    """`values` with data.file found in RAYFED_DATA, and cut down to `cap`."""
    tree = merged(values)
    file = tree.get("data", {}).get("file")
    if file is None:
        return tree
    root = os.environ.get("RAYFED_DATA")
    if not root:
        raise UsageError(f"data.file={file}: set the environment variable RAYFED_DATA to the folder that it lies in")
    path = (Path(root) / file).resolve()
    return merged(tree, {"data.file": str(_capped(path, **cap) if cap else path)})


def _capped(path: Path, train: int, test: int) -> Path:
    """A copy of the .npz in `data/` with so many examples of each client, the same ones every time."""
    if not path.is_file():
        raise UsageError(f"data.file={path}: no such file")
    target = Path("data").resolve() / f"{path.stem}_{train}_{test}.npz"
    if target.exists():
        return target
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    order = np.random.default_rng(0).permutation(len(arrays["client"]))
    kept = []
    for client in np.unique(arrays["client"]):
        for is_test, most in ((False, train), (True, test)):
            mine = (arrays["client"][order] == client) & (arrays["is_test"][order] == is_test)
            kept.append(order[mine][:most])
    rows = np.sort(np.concatenate(kept))
    target.parent.mkdir(exist_ok=True)
    partial = target.with_name(f"{target.stem}-{os.getpid()}.npz")
    np.savez(partial, **{name: array[rows] for name, array in arrays.items()})
    partial.replace(target)
    return target


def measure(table: PaperTable, scale: str, space: Space, tables: Tables) -> pd.DataFrame:
    """A line for each row, seed and column that was measured, in points (per cent)."""
    return pd.DataFrame(_measured(table, scale, space, tables), columns=["row", "seed", "column", "value"])


def _measured(table: PaperTable, scale: str, space: Space, tables: Tables) -> Iterator[tuple[str, int, str, float]]:
    done = tables.trials[tables.trials["status"] == "done"].set_index("trial")
    for seed in space.seeds:
        for row, (values,) in zip(table.arms(scale), space.arms, strict=True):
            trial = trial_name(Config.read(merged(values, {"seed": seed})))
            if trial not in done.index:
                continue
            own = tables.metrics[(tables.metrics["trial"] == trial) & (tables.metrics["metric"] == "accuracy")]
            own = own[own["point"] == done.loc[trial, "scored"]]
            for column, rule in table.columns.items():
                found = own[own["split"] == rule["split"]]
                if len(found):
                    yield row, seed, column, 100 * _value(found, rule["over"], rule["rounds"])


def _value(rows: pd.DataFrame, over: str | Mapping[str, str], rounds: str) -> float:
    if isinstance(over, Mapping):
        rows, over = rows[rows["domain"] == over["domain"]], "mean"
    by_round = rows.sort_values("round").groupby("round")
    if over == "weighted":
        series = by_round.apply(lambda part: np.average(part["value"], weights=part["n"]), include_groups=False)
    else:
        series = by_round["value"].min() if over == "worst" else by_round["value"].mean()
    return float(ROUNDS[rounds](series))
