"""The recorded predictions at the rounds that a comparison picks."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import pandas as pd
import pyarrow as pa

from rayfed.records.files import read_parquet
from rayfed.records.storage import Storage
from rayfed.records.tables import PREDICTIONS_SCHEMA
from rayfed.reports.bootstrap import Part, Replicated, parts_of, replicated
from rayfed.reports.read import Tables

NOT_RECORDED = "predictions were not recorded (evaluate.predictions=true records them)"


class Replicates:
    """What the scores of trials would be on other test examples.

    Args:
        tables: The tables of one experiment.
        picked: The rounds: rows with experiment, trial, order, seed, round and point.
        split, metric, rule: What is scored, and how rounds were picked.
    """

    def __init__(self, tables: Tables, picked: pd.DataFrame, split: str, metric: str, rule: str):
        self._tables = tables
        self._picked = picked[["experiment", "trial", "order", "seed", "round", "point"]].drop_duplicates()
        self._split = split
        self._metric = metric
        self._rule = rule
        self._known: dict[tuple[Any, ...], tuple[dict[int, Replicated] | None, str]] = {}

    def of(self, order: int, seed: int) -> tuple[dict[int, Replicated] | None, str]:
        """Return the scores of the clients of a method at a seed with their replicates; or None, and why.

        Clients have numbers; values of the server have no replicates.
        """
        is_wanted = (self._picked["order"] == order) & (self._picked["seed"] == seed)
        places = self._picked[is_wanted].drop(columns="order").drop_duplicates()
        if self._rule == "best5" or len(places) != 1:
            return None, "each score is a mean over several rounds or trials"
        place = places.iloc[0]
        key = tuple(place)
        if key not in self._known:
            self._known[key] = self._read(place)
        return self._known[key]

    def _read(self, place: pd.Series) -> tuple[dict[int, Replicated] | None, str]:
        parts = self._parts(place)
        if not parts:
            return None, NOT_RECORDED
        options = self._options(str(place["experiment"]), str(place["trial"]))
        found = replicated(parts, self._metric, options)
        if found is None:
            return None, f"{self._metric} cannot be computed from predictions"
        return found, ""

    def _parts(self, place: pd.Series) -> Mapping[int, Part]:
        home = self._tables.places.get(str(place["experiment"]))
        if home is None:
            return {}
        rows = self._files.of(home, str(place["trial"]))
        is_shown = (rows["round"] == place["round"]) & (rows["point"] == place["point"])
        is_here = is_shown & (rows["split"] == self._split)
        return parts_of(rows[is_here & (rows["client"] >= 0)])

    @cached_property
    def _files(self) -> "PredictionFiles":
        return PredictionFiles()

    def _options(self, experiment: str, trial: str) -> dict[str, Any]:
        """Return the options of the metric that the trial recorded."""
        trials = self._tables.trials
        is_trial = (trials["experiment"] == experiment) & (trials["trial"] == trial)
        row = trials[is_trial].iloc[0]
        prefix = f"metrics.{self._metric}."
        options = {}
        for name, value in row.items():
            if str(name).startswith(prefix) and not pd.isna(value):
                options[str(name).removeprefix(prefix)] = value
        return options


class PredictionFiles:
    """Reads the table `predictions` of one trial after the other, and keeps that of the last one."""

    def __init__(self) -> None:
        self._last: tuple[str, str] | None = None
        self._rows = PREDICTIONS_SCHEMA.empty_table().to_pandas()

    def of(self, home: Storage, trial: str) -> pd.DataFrame:
        """Return the rows of a trial in the folder of an experiment."""
        key = home.location, trial
        if key != self._last:
            folder = home.child("predictions")
            files = []
            for file in folder.files():
                if file.rpartition("-")[0] == trial and file.endswith(".parquet"):
                    files.append(file)
            tables = [read_parquet(folder, file) for file in sorted(files)]
            self._rows = pa.concat_tables([PREDICTIONS_SCHEMA.empty_table(), *tables]).to_pandas()
            self._last = key
        return self._rows
