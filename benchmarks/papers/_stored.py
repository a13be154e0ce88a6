"""What was measured, in the folder `measured`: a CSV file per table and form, with a line per row, column and seed.

`configuration` is a hash of the keys of the row's trial and of the column's rule, `version` that of rayfed. Lines of
another configuration or version are left out, and named. `printed.csv` has the verdicts that were printed before values
were stored, with the hashes of both rows.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pandas as pd
from _columns import Rule
from _tables import HOME, Claim, PaperTable

import rayfed

FOLDER = HOME / "measured"
LINE = ["row", "column", "seed", "value", "configuration", "version"]
NEUTRAL = {"placement", "seeds", "search", "resume", "results", "checkpoint", "tracking", "metrics"}
"""The keys that may be given to a run without changing what is measured, but for the last bits."""


def store(table: PaperTable, scale: str, measured: pd.DataFrame) -> str:
    """Add the values `measured` to the table's file, in place of older ones, and return its name."""
    path, hashes = FOLDER / f"{table.name}_{scale}.csv", configurations(table, scale)
    new = measured.assign(version=rayfed.__version__)
    new["configuration"] = [hashes[key] for key in zip(new["row"], new["column"], strict=True)]
    old = pd.read_csv(path, dtype={"configuration": str}) if path.exists() else new[:0]
    lines = pd.concat([old[LINE], new[LINE]]).drop_duplicates(["row", "column", "seed"], keep="last")
    order = {name: i for names in (table.rows, table.columns) for i, name in enumerate(names)}
    lines = lines.sort_values(["row", "column", "seed"], key=lambda values: values.map(lambda v: order.get(v, v)))
    FOLDER.mkdir(exist_ok=True)
    lines.to_csv(path, index=False, lineterminator="\n")
    return path.name


def load(table: PaperTable, scale: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the stored values of the present configuration and version, and a line on those that are left out."""
    path = FOLDER / f"{table.name}_{scale}.csv"
    if not path.exists():
        return pd.DataFrame(columns=LINE), []
    lines, hashes = pd.read_csv(path, dtype={"configuration": str}), configurations(table, scale)
    present = [hashes.get((row, column)) for row, column in zip(lines["row"], lines["column"], strict=True)]
    kept = (lines["configuration"] == present) & (lines["version"] == rayfed.__version__)
    left_out = [
        f"{path.name}: {row} ({', '.join(dict.fromkeys(part['column']))}) is of another configuration or version"
        for row, part in lines[~kept].groupby("row", sort=False)
    ]
    return lines[kept], left_out


def printed(table: PaperTable, scale: str) -> tuple[dict[str, tuple[str, str, int]], list[str]]:
    """Return (answer, gap, number of seeds) of each claim of the table in printed.csv, and what is left out of them."""
    lines = pd.read_csv(FOLDER / "printed.csv", dtype=str, keep_default_na=False)
    lines = lines[(lines["table"] == table.name) & (lines["form"] == scale)]
    hashes, claims, left_out = configurations(table, scale), {claim.text: claim for claim in table.claims}, []
    found = {}
    for line in lines.itertuples():
        claim = claims.get(line.claim)
        if claim is None or line.configuration != of_claim(claim, hashes):
            left_out.append(f"printed.csv: {table.name}, {line.claim} is of another configuration")
        else:
            found[claim.text] = (line.answer, line.gap, int(line.seeds))
    return found, left_out


def configurations(table: PaperTable, scale: str) -> dict[tuple[str, str], str]:
    """Return the hash of what determines the values of each row and column."""
    cells, hashes = list(zip(table.cells(scale), table.trees(scale), strict=True)), {}
    for column, rule in table.columns_of(scale).items():
        for (row, setting), tree in cells:
            if rule.get("setting") in (None, setting):
                hashes[row, column] = _hash([_trained(tree, rule), table.content[scale].get("cap"), _measured(rule)])
    return hashes


def of_claim(claim: Claim, hashes: Mapping[tuple[str, str], str]) -> str:
    """Return the hash of both rows of a claim, or "" if one of them is not in the form."""
    both = [hashes.get((row, claim.column)) for row in (claim.more, claim.less)]
    return _hash(both) if all(both) else ""


def _trained(tree: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    """Return the keys that can change the values: all but those of the run itself and of other metrics."""
    names = rule.get("metric", ())
    used = {name.split("@")[0] for name in ([names] if isinstance(names, str) else names)}
    metrics = {
        name: {key: value for key, value in (options if isinstance(options, dict) else {}).items() if key != "layers"}
        for name, options in tree.get("metrics", {}).items()
        if name in used
    }
    return {key: value for key, value in tree.items() if key not in NEUTRAL} | {"metrics": metrics}


def _measured(rule: Rule) -> dict[str, Any]:
    return {key: value for key, value in rule.items() if key not in ("setting", "small")}


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
