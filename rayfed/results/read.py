"""Reads the results of one experiment, or of all in a folder, also while trials still write."""

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.results.tables import METRICS_SCHEMA, ROUNDS_SCHEMA
from rayfed.results.trials import trials_table

TABLES = ("metrics", "rounds", "trials")
_SCHEMAS = {"metrics": METRICS_SCHEMA, "rounds": ROUNDS_SCHEMA}


class Tables(NamedTuple):
    """The three tables as data frames."""

    metrics: pd.DataFrame
    rounds: pd.DataFrame
    trials: pd.DataFrame


def read(folder: str | Path, experiment: str | None = None) -> Tables:
    """The tables of `experiment`, or of every experiment in `folder`; one that no trial has begun is empty.

    Raises:
        UsageError: the folder, or the experiment in it, holds no results.
    """
    homes = [Path(folder) / name for name in experiments(folder)]
    if experiment is not None:
        if experiment not in {home.name for home in homes}:
            near = suggestion(experiment, (home.name for home in homes))
            raise UsageError(f"experiment={experiment}: no results of it in {folder}; {near}")
        homes = [Path(folder) / experiment]
    empty = {
        "metrics": METRICS_SCHEMA.empty_table().to_pandas(),
        "rounds": ROUNDS_SCHEMA.empty_table().to_pandas(),
        "trials": trials_table([]).to_pandas(),
    }
    found = {name: [_read(home / name) for home in homes if _written(home / name)] for name in TABLES}
    trials = found["trials"]
    if len(trials) > 1:  # experiments have different columns, so join rows as the table itself does
        rows = [row for table in trials for row in table.astype(object).where(table.notna(), None).to_dict("records")]
        trials = [trials_table(rows).to_pandas()]
    found["metrics"] = [  # null in results from before there were any
        table.assign(unseen=table["unseen"].eq(True)) for table in found["metrics"]
    ]
    return Tables(
        metrics=pd.concat(found["metrics"] or [empty["metrics"]], ignore_index=True),
        rounds=pd.concat(found["rounds"] or [empty["rounds"]], ignore_index=True),
        trials=trials[0] if trials else empty["trials"],
    )


def experiments(folder: str | Path) -> list[str]:
    """The names of the experiments in `folder`, sorted; `UsageError` where there are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of results")
    names = sorted(home.name for home in folder.iterdir() if any(_written(home / name) for name in TABLES))
    if not names and any(_written(folder / name) for name in TABLES):
        home = folder.resolve()
        raise UsageError(f"{folder}: is one experiment; give {home.parent} --experiment {home.name}")
    if not names:
        raise UsageError(f"{folder}: no results in it; give the folder that runs wrote to, as in results={folder}")
    return names


def _read(table: Path) -> pd.DataFrame:
    if table.name == "trials":
        # pyarrow opens a path twice, for the columns and for the rows, and a trial may have added a column in between
        with open(table / "trials.parquet", "rb") as file:
            return pd.read_parquet(file)
    return pd.read_parquet(table, schema=_SCHEMAS[table.name])  # a trial of an older version may lack columns


def _written(table: Path) -> bool:
    return any(path.name[0] not in "._" for path in table.glob("*.parquet"))
