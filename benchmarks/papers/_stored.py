"""What was measured, in the folder `measured`.

TABLE_FORM.csv    a line per row, column and seed, as run.py stores it
curves/TABLE_FORM.csv    a line per row, column, seed and evaluated round, as run.py --curves stores it
means.csv         a line per row and column of those tables of docs/fidelity/ that are older than these files: the mean,
                  the sd, how many of the seeds have a finite value, and the page
printed.csv       the verdicts that were printed below these tables

`configuration` is a hash of all options that the row's trial had, defaults included, and of the column's rule; in
printed.csv, of both rows. It is a few words instead where it is only known what differed. `version` is that of rayfed.
What is of another configuration or version is older.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from _columns import Rule
from _tables import HOME, Claim, PaperTable
from _verdicts import Mean, Verdict

import rayfed
from rayfed.experiments.config import Config
from rayfed.experiments.plan_identity import outcome_values

FOLDER = HOME / "measured"
LINE = ["row", "column", "seed", "value", "configuration", "version"]
NEUTRAL = {"placement", "seeds", "search", "resume", "results", "checkpoint", "tracking", "metrics"}
"""The keys that may be given to a run without changing what is measured, but for the last bits."""
WHERE = {"data.root", "data.download"}
"""Keys of the data that say where they are, and not what they are."""

Cell = tuple[str, str]  # row and column


def store(table: PaperTable, scale: str, measured: pd.DataFrame) -> str:
    """Add the values `measured` to the table's file, in place of older ones, and return its name."""
    return _store(FOLDER / f"{table.name}_{scale}.csv", table, scale, measured, ["row", "column", "seed"])


def store_curves(table: PaperTable, scale: str, measured: pd.DataFrame) -> str:
    """Add curves to the table's file of curves, in place of those of the same rows and seeds, and return its name."""
    rounded = measured.assign(value=measured["value"].round(3))
    return _store(
        FOLDER / "curves" / f"{table.name}_{scale}.csv", table, scale, rounded, ["row", "column", "seed", "round"]
    )


def _store(path: Path, table: PaperTable, scale: str, measured: pd.DataFrame, key: list[str]) -> str:
    """Add lines to a file in place of those with the same `key`, in the order of the table, and return its name."""
    hashes = configurations(table, scale)
    new = measured.assign(version=rayfed.__version__)
    new["configuration"] = [hashes[cell] for cell in zip(new["row"], new["column"], strict=True)]
    old = new[:0]
    if path.exists():
        old = pd.read_csv(path, dtype={"configuration": str})
    names = [*key, "value", "configuration", "version"]
    lines = pd.concat([old[names], new[names]]).drop_duplicates(key, keep="last")
    order = {name: i for names in (table.rows, table.columns) for i, name in enumerate(names)}
    lines = lines.sort_values(key, key=lambda values: values.map(lambda v: order.get(v, v)))
    path.parent.mkdir(exist_ok=True)
    lines.to_csv(path, index=False, lineterminator="\n")
    return str(path.relative_to(FOLDER))


def load_curves(table: PaperTable, scale: str) -> pd.DataFrame:
    """Return the stored curves of the present configuration and version."""
    path = FOLDER / "curves" / f"{table.name}_{scale}.csv"
    lines = _marked(path, configurations(table, scale), ["row", "column", "seed", "round", "value"])
    return lines[lines["current"]]


def load(table: PaperTable, scale: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the stored values of the present configuration and version, and a line on those that are older."""
    lines = stored(table, scale, configurations(table, scale))
    older = [
        f"{table.name}_{scale}.csv: {row} ({', '.join(columns)}) is of another configuration or version"
        for row, columns in lines[~lines["current"]].groupby("row", sort=False)["column"].unique().items()
    ]
    return lines.loc[lines["current"], LINE], older


def stored(table: PaperTable, scale: str, hashes: Mapping[Cell, str]) -> pd.DataFrame:
    """Return all stored values; `current` tells those of the present configuration, with these `hashes`."""
    return _marked(FOLDER / f"{table.name}_{scale}.csv", hashes, LINE)


def _marked(path: Path, hashes: Mapping[Cell, str], names: list[str]) -> pd.DataFrame:
    """Return the lines of a file, and whether each is `current`; without the file none, with the columns `names`."""
    if not path.exists():
        return pd.DataFrame(columns=[*names, "current"]).astype({"current": bool})
    lines = pd.read_csv(path, dtype={"configuration": str})
    present = [hashes.get(cell) for cell in zip(lines["row"], lines["column"], strict=True)]
    return lines.assign(current=(lines["configuration"] == present) & (lines["version"] == rayfed.__version__))


def printed_means(table: PaperTable, scale: str, hashes: Mapping[Cell, str]) -> dict[bool, dict[Cell, Mean]]:
    """Return the printed means of each row and column: those of the present configuration, and older ones."""
    means: dict[bool, dict[Cell, Mean]] = {True: {}, False: {}}
    for line in _lines("means.csv", table, scale).itertuples():
        cell, (value, off), (sd, sd_off) = (line.row, line.column), _number(line.mean), _number(line.sd or "0")
        mean = Mean(value, off, sd, sd_off, int(line.seeds), int(line.reached))
        means[line.configuration == hashes.get(cell)][cell] = mean
    return means


def printed_verdicts(table: PaperTable, scale: str, hashes: Mapping[Cell, str]) -> dict[bool, dict[str, Verdict]]:
    """Return the printed verdict on each claim: those of the present configuration, and older ones."""
    present = {claim.text: of_claim(claim, hashes) for claim in table.claims}
    verdicts: dict[bool, dict[str, Verdict]] = {True: {}, False: {}}
    for line in _lines("printed.csv", table, scale).itertuples():
        current = line.configuration == present.get(line.claim)
        verdicts[current][line.claim] = Verdict(line.answer, line.gap, int(line.seeds))
    return verdicts


def configurations(table: PaperTable, scale: str) -> dict[Cell, str]:
    """Return the hash of what determines the values of each row and column."""
    cells, hashes = list(zip(table.cells(scale), map(_resolved, table.trees(scale)), strict=True)), {}
    for column, rule in table.columns_of(scale).items():
        for (row, setting), tree in cells:
            if rule.get("setting") in (None, setting):
                trained = _with_used_metrics(tree, rule)
                hashes[row, column] = _hash([trained, table.content[scale].get("cap"), _measured(rule)])
    return hashes


def of_claim(claim: Claim, hashes: Mapping[Cell, str]) -> str:
    """Return the hash of both rows of a claim, or "" if one of them is not in the form."""
    both = [hashes.get((row, claim.column)) for row in (claim.more, claim.less)]
    return _hash(both) if all(both) else ""


def _resolved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options that can change the values, defaults included, and the hash of a partition's file.

    Options that are off (null, false, 0) do not count, so that a new one that is off changes no hash.
    """
    config = Config.read({key: value for key, value in tree.items() if key not in NEUTRAL - {"metrics"}})
    values = json.loads(outcome_values(config)) | {"rounds": config.rounds}
    if file := values["partition"].get("file"):
        values["partition"]["file"] = hashlib.blake2b((HOME / file).read_bytes(), digest_size=4).hexdigest()
    return _switched_on(values)  # type: ignore[no-any-return]


def _switched_on(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: kept for key, inner in value.items() if (kept := _switched_on(inner))}


def _with_used_metrics(tree: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    """Return `tree` without the metrics that the column does not show."""
    names = rule.get("metric", ())
    used = {name.split("@")[0] for name in ([names] if isinstance(names, str) else names)}
    metrics = {
        name: {key: value for key, value in options.items() if key != "layers"}
        for name, options in tree.get("metrics", {}).items()
        if name in used
    }
    return {**tree, "metrics": metrics}


def _measured(rule: Rule) -> dict[str, Any]:
    return {key: value for key, value in rule.items() if key not in ("setting", "small")}


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()


def _lines(file: str, table: PaperTable, scale: str) -> pd.DataFrame:
    lines = pd.read_csv(FOLDER / file, dtype=str, keep_default_na=False)
    return lines[(lines["table"] == table.name) & (lines["form"] == scale)]


def _number(text: str) -> tuple[float, float]:
    """Return a printed number, and its largest error: half a unit of the last digit, or of the third of integers."""
    decimals = len(text.partition(".")[2]) or min(0, 3 - len(re.sub(r"\D", "", text)))
    return float(text), 0.0 if text == "inf" else 0.5 * 10.0**-decimals
