"""The partitions of an experiment: the number of training examples by client and class."""

from matplotlib.figure import Figure

from rayfed.core.errors import UsageError
from rayfed.data.partitions.plot import draw_counts
from rayfed.reports.chart_data import recorded_partitions
from rayfed.reports.figures.data import FigureData
from rayfed.reports.figures.style import new_figure

_MOST_PANELS = 6


def draw_partitions(data: FigureData) -> Figure:
    """Return a panel for each partition that the trials had, up to six.

    Raises:
        UsageError: no partition was recorded.
    """
    known = recorded_partitions(data.home, data.tables.trials)
    if not known:
        raise UsageError("plot: no partition was recorded with these results; rayfed partition --plot draws one")
    shown = known[:_MOST_PANELS]
    clients = max(len(partition.clients) for partition in shown)
    columns = min(len(shown), 3 if clients <= 20 else 2 if clients <= 50 else 1)
    lines = -(-len(shown) // columns)
    width = min(5.5, max(3.4, 1.5 + 0.16 * clients)) if columns > 1 else min(12.0, max(6.0, 2.5 + 0.22 * clients))
    figure = new_figure(width * columns, 0.6 + 3.4 * lines)
    for number, partition in enumerate(shown):
        axes = figure.add_subplot(lines, columns, number + 1)
        draw_counts(axes, partition.counts, partition.domains, legend=number == 0)
        words = "" if partition.seed is None else f", seed {partition.seed}"
        axes.set_title(f"{partition.digest}{words}", fontsize=8, loc="left")
    more = f"; {len(known) - len(shown)} more are not drawn" if len(known) > len(shown) else ""
    figure.suptitle(f"{data.experiment}: examples for training and validation{more}", fontsize=8, x=0.01, ha="left")
    return figure
