"""Measure what rows of the full forms cost: CPU seconds of a round on one core, and core-hours of all rounds.

    python benchmarks/papers/core_hours.py                   # store them in measured/core_hours.csv
    python benchmarks/papers/core_hours.py --forms 'dbe*'    # these only

A row trains the first round of its full form, without evaluation, in this process. Where that would take many minutes,
every client takes few local steps and then some more, and the seconds of a round follow from the difference. Domains
that are not at hand count as those that are.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd
import torch
from _stored import FOLDER
from _tables import read_table

from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.sources import merged

FILE = "core_hours.csv"
NEVER = 10**9


@dataclass(frozen=True)
class Form:
    """Rows of one setting of a table's full form.

    `keys` change the configuration. If `steps` gives two numbers of local steps to train, a client has `in_full` of
    them per round; otherwise the whole round is measured. The paper has `scale` times as many clients as are trained.
    """

    table: str
    rows: tuple[str, ...]
    setting: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    in_full: int = 0
    scale: float = 1.0


FORMS = (
    Form("augmentation_table3", ("FedAvg none", "FedAvg 45", "AFL none", "VM none"), steps=(2, 12), in_full=200),
    Form("dbe_table5", ("FedAvg", "FedAvg+DBE", "FedRep", "FedPer"), "FMNIST"),
    Form("fraug_table2", ("FedAvg", "FedBN", "pFedAvg", "FRAug", "FRAug, as printed"), "Digits",
         {"data": {"domains": ["mnist", "usps"]}}, scale=2),
    Form("feddebias_table1_mnist", ("FedAvg", "SCAFFOLD", "MOON", "DANN", "Mixup", "FedDebias"),
         keys={"cohort": 2}, steps=(1, 3), in_full=50, scale=5),
    Form("adcol_table1", ("FedAvg", "FedBN", "FedProx", "ADCOL"),
         keys={"data": {"domains": ["mnist", "usps"]}, "local": {"epochs": None}}, steps=(1, 3),
         in_full=10 * (7438 // 64), scale=2.5),
)  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", metavar="PATTERN", default="*", help="only tables that match")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = FOLDER / FILE
    for form in FORMS:
        if not fnmatchcase(form.table, args.forms):
            continue
        for row in form.rows:
            line = measured(form, row)
            print(", ".join(f"{key} {value}" for key, value in line.items()), flush=True)
            old = pd.read_csv(path) if path.exists() else pd.DataFrame()
            lines = pd.concat([old, pd.DataFrame([line])]).drop_duplicates(["table", "row"], keep="last")
            lines.to_csv(path, index=False, lineterminator="\n")


def measured(form: Form, row: str) -> dict[str, Any]:
    """Return the line of a row in the stored table."""
    table = read_table(form.table)
    if form.setting:
        table = table.within("full", [form.setting])
    (keys,) = (keys for (keys,) in table.space("full", {}, [row]).arms)
    keys = merged(keys, form.keys, {"seed": 0, "evaluate.every": NEVER, "placement.hosts": 0})
    if form.steps is None:
        seconds = cpu_seconds(keys)
    else:
        less, more = form.steps
        few, some = (cpu_seconds(merged(keys, {"local": {"steps": steps}})) for steps in form.steps)
        seconds = few + (some - few) / (more - less) * (form.in_full - less)
    rounds, seconds = Config.read(keys).rounds, seconds * form.scale
    how = "measured" if form.steps is None and form.scale == 1 else "extrapolated"
    return {"table": form.table, "row": row, "seconds": round(seconds, 1), "rounds": rounds,
            "core-hours": round(seconds * rounds / 3600, 1), "how": how}  # fmt: skip


def cpu_seconds(keys: Mapping[str, Any]) -> float:
    """Return the CPU seconds of the first round, without the setup before it."""
    plan = make_plan(Config.read(keys))
    server = Server(plan.blueprint, plan.population, LocalFleet(plan.blueprint, plan.population), plan.evaluation)
    began, seconds = time.process_time(), 0.0
    for record in server.run():
        now = time.process_time()
        began, seconds = now, now - began
        if record.round == 1:
            break
    return seconds


if __name__ == "__main__":
    main()
