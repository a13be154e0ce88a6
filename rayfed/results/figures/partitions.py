"""The partitions of an experiment: the number of training examples by client and class."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rayfed.core.errors import UsageError
from rayfed.data.partitions.plot import draw_counts
from rayfed.results.figures.data import FigureData
from rayfed.results.figures.style import new_figure
from rayfed.results.holdings import read_holdings

_MOST_PANELS = 6


def draw_partitions(data: FigureData) -> Figure:
    """Return a panel for each partition that the trials had, up to six.

    Raises:
        UsageError: no partition was recorded.
    """
    trials = data.tables.trials
    if "partition_hash" not in trials:
        trials = trials.assign(partition_hash=None)
    distinct = trials.sort_values("seed").drop_duplicates("partition_hash").dropna(subset="partition_hash")
    known = []
    for _, trial in distinct.iterrows():
        if (holdings := read_holdings(data.home, trial["partition_hash"])) is not None:
            known.append((trial, holdings[holdings["split"] != "test"]))
    if not known:
        raise UsageError("plot: no partition was recorded with these results; rayfed partition --plot draws one")
    shown = known[:_MOST_PANELS]
    clients = max(int(holdings["client"].nunique()) for _, holdings in shown)
    columns = min(len(shown), 3 if clients <= 20 else 2 if clients <= 50 else 1)
    lines = -(-len(shown) // columns)
    width = min(5.5, max(3.4, 1.5 + 0.16 * clients)) if columns > 1 else min(12.0, max(6.0, 2.5 + 0.22 * clients))
    figure = new_figure(width * columns, 0.6 + 3.4 * lines)
    for number, (trial, holdings) in enumerate(shown):
        axes = figure.add_subplot(lines, columns, number + 1)
        draw_counts(axes, *_counts(holdings), legend=number == 0)
        seed = trial.get("partition_seed")
        words = "" if seed is None or pd.isna(seed) else f", seed {int(seed)}"
        axes.set_title(f"{trial['partition_hash']}{words}", fontsize=8, loc="left")
    more = f"; {len(known) - len(shown)} more are not drawn" if len(known) > len(shown) else ""
    figure.suptitle(f"{data.experiment}: examples for training and validation{more}", fontsize=8, x=0.01, ha="left")
    return figure


def _counts(holdings: pd.DataFrame) -> tuple[np.ndarray, list[str]]:
    """Return the examples by client and class, int64 [clients, classes], and the clients' domains."""
    table = holdings.pivot_table(index="client", columns="label", values="count", aggfunc="sum", fill_value=0)
    table = table.reindex(columns=range(int(holdings["label"].max()) + 1), fill_value=0)
    domains = holdings.drop_duplicates("client").set_index("client")["domain"]
    return table.to_numpy(), [str(domains[client]) for client in table.index]
