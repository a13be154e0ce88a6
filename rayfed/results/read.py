"""Reading the results of one experiment, or of all in a folder, also while trials still write."""

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.results.metric_names import fill_higher_is_better
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
    """Return the tables of `experiment`, or of every experiment in `folder`; tables without rows have all columns.

    In `metrics`, the columns `unseen` and `higher_is_better` are booleans in every row, also for results from before
    these columns existed.

    Raises:
        UsageError: the folder has no results, or none of `experiment`.
    """
    homes = [Path(folder) / name for name in list_experiments(folder)]
    if experiment is not None:
        if experiment not in {home.name for home in homes}:
            near = suggestion(experiment, (home.name for home in homes))
            raise UsageError(f"experiment={experiment}: no such experiment in {folder}; {near}")
        homes = [Path(folder) / experiment]
    frames = {name: [_read(home / name) for home in homes if _has_parquet(home / name)] for name in TABLES}
    metrics = frames["metrics"] or [METRICS_SCHEMA.empty_table().to_pandas()]
    metrics = [fill_higher_is_better(table.assign(unseen=table["unseen"].eq(True))) for table in metrics]
    rounds = frames["rounds"] or [ROUNDS_SCHEMA.empty_table().to_pandas()]
    trials = frames["trials"] or [trials_table([]).to_pandas()]
    if len(trials) > 1:  # experiments have different columns, so join rows as the table itself does
        rows = [row for table in trials for row in table.astype(object).where(table.notna(), None).to_dict("records")]
        trials = [trials_table(rows).to_pandas()]
    return Tables(
        metrics=pd.concat(metrics, ignore_index=True), rounds=pd.concat(rounds, ignore_index=True), trials=trials[0]
    )


def list_experiments(folder: str | Path) -> list[str]:
    """Return the names of the experiments in `folder`, sorted.

    Raises:
        UsageError: there are none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of results")
    names = sorted(home.name for home in folder.iterdir() if any(_has_parquet(home / name) for name in TABLES))
    if not names and any(_has_parquet(folder / name) for name in TABLES):
        home = folder.resolve()
        raise UsageError(f"{folder}: this is a single experiment; give {home.parent} --experiment {home.name}")
    if not names:
        raise UsageError(f"{folder}: no results in it; give the folder that runs write to, as in results={folder}")
    return names


def _read(table: Path) -> pd.DataFrame:
    if table.name == "trials":
        # pyarrow opens a path twice, for the columns and for the rows, and a trial may have added a column in between
        with open(table / "trials.parquet", "rb") as file:
            return pd.read_parquet(file)
    return pd.read_parquet(table, schema=_SCHEMAS[table.name])  # a trial of an older version may lack columns


def _has_parquet(table: Path) -> bool:
    return any(path.name[0] not in "._" for path in table.glob("*.parquet"))
