"""Reading the results of one experiment, or of all in a folder, also while trials still write."""

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.results.metric_names import fill_higher_is_better
from rayfed.results.owners import is_alive
from rayfed.results.tables import EVENTS_SCHEMA, METRICS_SCHEMA, ROUNDS_SCHEMA
from rayfed.results.trials import trials_table

TABLES = ("metrics", "rounds", "trials")
_SCHEMAS = {"metrics": METRICS_SCHEMA, "rounds": ROUNDS_SCHEMA, "events": EVENTS_SCHEMA}


class Tables(NamedTuple):
    """The three tables as data frames."""

    metrics: pd.DataFrame
    rounds: pd.DataFrame
    trials: pd.DataFrame


def read(folder: str | Path, experiment: str | None = None) -> Tables:
    """Return the tables of `experiment`, or of every experiment in `folder`; tables without rows have all columns.

    In `metrics`, the columns `unseen` and `higher_is_better` are booleans in every row, also for results from before
    these columns existed. In `trials`, the status of a trial that no process runs any more, although it never ended, is
    `lost`.

    Raises:
        UsageError: the folder has no results, or none of `experiment`.
    """
    homes = _homes(folder, experiment)
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


def read_events(folder: str | Path, experiment: str | None = None) -> pd.DataFrame:
    """Return what happened to the processes of the trials of `experiment`, or of every experiment in `folder`.

    There is a row for each `Event`, with the columns that name the trial, in the order in which they happened.

    Raises:
        UsageError: the folder has no results, or none of `experiment`.
    """
    homes = _homes(folder, experiment)
    frames = [_read(home / "events") for home in homes if _has_parquet(home / "events")]
    events = pd.concat(frames or [EVENTS_SCHEMA.empty_table().to_pandas()], ignore_index=True)
    return events.sort_values("time", ignore_index=True, kind="stable")


def _homes(folder: str | Path, experiment: str | None) -> list[Path]:
    homes = [Path(folder) / name for name in list_experiments(folder)]
    if experiment is None:
        return homes
    if experiment not in {home.name for home in homes}:
        near = suggestion(experiment, (home.name for home in homes))
        raise UsageError(f"experiment={experiment}: no such experiment in {folder}; {near}")
    return [Path(folder) / experiment]


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
            return _with_lost(pd.read_parquet(file), table.parent)
    return pd.read_parquet(table, schema=_SCHEMAS[table.name])  # a trial of an older version may lack columns


def _with_lost(trials: pd.DataFrame, home: Path) -> pd.DataFrame:
    """Return `trials` with the status `lost` for those that run according to the table, but have no owner."""
    if "owner" not in trials:
        return trials
    alive = {
        owner: is_alive(home, owner) for owner in trials.loc[trials["status"] == "running", "owner"].dropna().unique()
    }
    lost = (trials["status"] == "running") & trials["owner"].map(alive).eq(False)
    return trials.assign(status=trials["status"].mask(lost, "lost")) if lost.any() else trials


def _has_parquet(table: Path) -> bool:
    return any(path.name[0] not in "._" for path in table.glob("*.parquet"))
