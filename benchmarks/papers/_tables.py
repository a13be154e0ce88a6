"""A results table of a paper as a YAML file: its numbers, the configurations that reproduce them, and its claims.

title, paper, setting     what the paper measured, and how
columns                   name -> the rule that computes it; see `_columns`
rows                      name -> {arm: the keys of its configuration, small: further keys of the small form (or false:
                          not in the small form), published: column -> number, [number, sd] or .inf (never)}; as in
                          search spaces. A row without an arm is not measured, a row without numbers (a control of
                          ours) is not published
claims                    lines such as "worst: full > FedAvg + 2": column, row, row, margin in the column's unit
full, small               search spaces (see rayfed.experiments.space) without arms, or a string that says why there is
                          none; and
    settings              name -> further keys; a row is measured in the settings for which the paper has a number, or
                          in all of them if the paper has none for the row; `rows` holds keys of single rows
    cap                   {train: n, test: m}: use at most this many examples of each client of partition.file
    note                  the differences from the paper
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd
from _columns import Rule, Trial, curves, kind, values

from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.plan_identity import trial_name
from rayfed.experiments.published import published_number
from rayfed.experiments.sources import from_file, merged
from rayfed.experiments.space import Space, read_space
from rayfed.reports.read import Tables

HOME = Path(__file__).parent
KEYS = {"title", "paper", "setting", "columns", "rows", "claims", "full", "small"}
TABLE_KEYS = ("cap", "note", "settings")  # in full and small, beside the keys of a search space
CLAIM = re.compile(r"(?P<column>[^:]+): (?P<more>.+) > (?P<less>.+?)(?: (?P<sign>[+-]) (?P<margin>[\d.]+))?")


@dataclass(frozen=True)
class Claim:
    """A claim that in `column` the row `more` exceeds the row `less` by more than `margin` points."""

    text: str
    column: str
    more: str
    less: str
    margin: float


@dataclass(frozen=True)
class PaperTable:
    """One validated YAML file."""

    name: str
    content: Mapping[str, Any]
    claims: tuple[Claim, ...]

    @property
    def rows(self) -> Mapping[str, Mapping[str, Any]]:
        return self.content["rows"]

    @property
    def columns(self) -> Mapping[str, Rule]:
        return self.content["columns"]

    def within(self, scale: str, patterns: Sequence[str]) -> "PaperTable":
        """Return the table with only those settings of `scale` that match one of `patterns`.

        Raises:
            UsageError: if no setting matches, or if the table has no settings.
        """
        form = self.content[scale]
        settings = {} if isinstance(form, str) else form.get("settings", {})
        kept = {name: keys for name, keys in settings.items() if any(fnmatchcase(name, p) for p in patterns)}
        if not kept:
            known = ", ".join(settings) or f"none in {self.name}"
            raise UsageError(f"--settings: no setting matches {' or '.join(patterns)}; there are {known}")
        return replace(self, content={**self.content, scale: {**form, "settings": kept}})

    def published(self, row: str, column: str) -> tuple[float, float | None] | None:
        """Return the paper's number and its sd, None where the paper prints none."""
        value = self.rows[row]["published"].get(column)
        if value is None:
            return None
        return published_number(f"{self.name}.yaml: rows.{row}.published.{column}", value)

    def arms(self, scale: str) -> dict[str, Mapping[str, Any]]:
        """Return the rows that `scale` measures, each with its configuration keys.

        Raises:
            UsageError: if the table has no such form.
        """
        if isinstance(self.content[scale], str):
            raise UsageError(f"{self.name} has no {scale} form: {self.content[scale]}")
        extra = {name: row.get("small", {}) if scale == "small" else {} for name, row in self.rows.items()}
        rows = {name: row for name, row in self.rows.items() if "arm" in row and extra[name] is not False}
        return {name: merged(row["arm"], extra[name]) for name, row in rows.items()}

    def columns_of(self, scale: str) -> dict[str, Rule]:
        """Return the columns that `scale` measures."""
        settings = self.content[scale].get("settings")
        rules = {n: rule for n, rule in self.columns.items() if settings is None or rule.get("setting") in settings}
        if scale == "full":
            return rules
        return {n: {**rule, **rule.get("small", {})} for n, rule in rules.items() if rule.get("small") is not False}

    def cells(self, scale: str, patterns: Sequence[str] = ("*",)) -> list[tuple[str, str | None]]:
        """Return each measured (row, setting) whose row matches one of `patterns`.

        The setting is None if the table has no settings.

        Raises:
            UsageError: if no row matches.
        """
        arms = self.arms(scale)
        rows = [row for row in arms if any(fnmatchcase(row, pattern) for pattern in patterns)]
        if not rows:
            raise UsageError(f"--rows: no row matches {' or '.join(patterns)}; there are {', '.join(arms)}")
        settings = self.content[scale].get("settings", (None,))
        return [(row, setting) for row in rows for setting in settings if self._is_measured(row, setting)]

    def _is_measured(self, row: str, setting: str | None) -> bool:
        published = {self.columns[column].get("setting") for column in self.rows[row]["published"]}
        return not published or setting is None or setting in published

    def trees(self, scale: str, patterns: Sequence[str] = ("*",)) -> list[dict[str, Any]]:
        """Return the keys of each cell that `cells` lists, with those of the sweep."""
        arms, cells = self.arms(scale), self.cells(scale, patterns)
        content = self.content[scale]
        defaults: dict[str, Any] = {"partition.seed": 0}  # one partition, as in the papers
        if scale == "full":  # hours or days
            defaults["checkpoint.every"] = 20
        common = merged(defaults, _without(content, *TABLE_KEYS))
        trees = []
        for row, name in cells:
            setting = dict(content["settings"][name]) if name else {}
            row_keys = setting.pop("rows", {}).get(row, {})
            trees.append(merged(common, setting, arms[row], row_keys))
        return trees

    def space(self, scale: str, overrides: Mapping[str, Any], patterns: Sequence[str] = ("*",)) -> Space:
        """Return the sweep that measures the table at `scale`, with one arm per cell."""
        content, trees = self.content[scale], self.trees(scale, patterns)
        sweep = {key: content[key] for key in ("seeds", "search") if key in content}
        sweep["arms"] = [_with_file(_without(tree, *sweep), content.get("cap")) for tree in trees]
        return read_space(merged(sweep, {"experiment": f"{self.name}_{scale}"}), overrides)


def names() -> list[str]:
    """Return the names of all tables."""
    return sorted(path.stem for path in HOME.glob("*.yaml"))


def read_table(name: str) -> PaperTable:
    """Read the table `name`.

    Raises:
        UsageError: if there is no such table, or if its file is inconsistent.
    """
    if name not in names():
        raise UsageError(f"{name}: no such table; choose from {', '.join(names())}")
    content = from_file(HOME / f"{name}.yaml")
    if set(content) != KEYS:
        raise UsageError(f"{name}.yaml: expected exactly the keys {', '.join(sorted(KEYS))}")
    for column in content["columns"]:
        _check_column(name, content, column)
    for row, entry in content["rows"].items():
        numbers = entry.get("published")
        if set(entry) - {"arm", "small", "published"} or not isinstance(numbers, Mapping):
            raise UsageError(f"{name}.yaml: rows.{row}: expected arm, small, and published with its numbers")
        if unknown := set(numbers) - set(content["columns"]):
            raise UsageError(f"{name}.yaml: rows.{row}.published: no column {sorted(unknown)[0]}")
        for column, value in numbers.items():
            published_number(f"{name}.yaml: rows.{row}.published.{column}", value)
    return PaperTable(name, content, tuple(_claim(name, content, text) for text in content["claims"]))


def _check_column(name: str, content: Mapping[str, Any], column: str) -> None:
    """Check a column's rule in both forms, and the columns, rows and setting that it names."""
    rule = content["columns"][column]
    for form in (rule, {**rule, **(rule.get("small") or {})}):
        target, other = form.get("target"), form.get("reach") or form.get("fewer") or form.get("best_of")
        rows = {*(target if isinstance(target, list) else ()), *([form["than"]] if "than" in form else ())}
        if not rows <= set(content["rows"]) or not {other} - {None} <= set(content["columns"]):
            raise UsageError(f"{name}.yaml: columns.{column}: names a row or a column that does not exist")
        try:
            kind(form)
        except UsageError as error:
            raise UsageError(f"{name}.yaml: columns.{column}: {error}") from error
    full = content["full"]
    settings = [None] if isinstance(full, str) else full.get("settings", [None])
    if rule.get("setting") not in settings:
        raise UsageError(f"{name}.yaml: columns.{column}: setting={rule.get('setting')!r} is not in full.settings")


def _claim(name: str, content: Mapping[str, Any], text: str) -> Claim:
    match = CLAIM.fullmatch(text)
    if not match or match["column"] not in content["columns"] or {match["more"], match["less"]} - set(content["rows"]):
        raise UsageError(f"{name}.yaml: claims: {text!r} is not COLUMN: ROW > ROW [+ POINTS] of its columns and rows")
    margin = float(f"{match['sign'] or '+'}{match['margin'] or 0}")
    return Claim(text, match["column"], match["more"], match["less"], margin)


def _without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _with_file(values: Mapping[str, Any], cap: Mapping[str, int] | None) -> dict[str, Any]:
    """Return `values` with a partition.file of this folder and, if asked for, reduced to `cap`."""
    tree = merged(values)
    file = tree.get("partition", {}).get("file")
    if file is None:
        return tree
    path = HOME / file
    return merged(tree, {"partition.file": str(_capped(path, cap) if cap else path)})


def _capped(path: Path, cap: Mapping[str, int]) -> Path:
    """Write a copy of the partition to `data/` with at most so many examples per client, the same ones every time."""
    target = Path("data").resolve() / f"{path.stem}_{cap['train']}_{cap['test']}.parquet"
    if not target.exists():
        table = pd.read_parquet(path).sample(frac=1, random_state=0)
        kept = table.groupby(["client", "split"]).cumcount() < table["split"].map(cap)
        target.parent.mkdir(exist_ok=True)
        partial = target.with_name(f"{target.stem}-{os.getpid()}.parquet")
        table[kept].sort_index().to_parquet(partial, index=False)
        partial.replace(target)
    return target


def measure(table: PaperTable, scale: str, space: Space, tables: Tables) -> pd.DataFrame:
    """Return a line for each measured row, seed and column, with accuracies in percentage points."""
    return values(table.columns_of(scale), dict(_trials(table, scale, space, tables)))


def measure_curves(table: PaperTable, scale: str, space: Space, tables: Tables) -> pd.DataFrame:
    """Return what `measure` returns after each evaluated round, of columns that show the last one."""
    return curves(table.columns_of(scale), dict(_trials(table, scale, space, tables)))


def _trials(
    table: PaperTable, scale: str, space: Space, tables: Tables
) -> Iterator[tuple[tuple[str, str | None, int], Trial]]:
    done = tables.trials[tables.trials["status"] == "done"].set_index("trial")
    for seed in space.seeds:
        for (row, setting), (keys,) in zip(table.cells(scale), space.arms, strict=True):
            trial = trial_name(Config.read(merged(keys, {"seed": seed})))
            if trial in done.index:
                scores = tables.metrics[tables.metrics["trial"] == trial]
                rounds = tables.rounds[tables.rounds["trial"] == trial]
                yield (row, setting, seed), Trial(scores, rounds, done.loc[trial, "default_eval_point"])
