"""A plot of a partition: the number of examples of each class and client, and the clients' domains."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from rayfed.core.errors import UsageError
from rayfed.data.dataset import ClientRows, Dataset
from rayfed.data.partitions.table import client_domain, partition_hash

MAX_BUBBLES = 50  # of clients or of classes; with more, the plot is a heat map
# Okabe and Ito's colours, distinguishable with all common forms of colour blindness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")


def class_counts(dataset: Dataset, clients: list[ClientRows]) -> np.ndarray:
    """Return the number of rows that each client trains on or validates with, by class; int64 [clients, classes]."""
    labels = [dataset.labels[np.concatenate([client.train, client.val])] for client in clients]
    return np.stack([np.bincount(values, minlength=dataset.num_classes) for values in labels])


def check_path(path: str | Path) -> None:
    """Raise UsageError if the file name does not end in .png."""
    if Path(path).suffix.lower() != ".png":
        raise UsageError(f"{path}: the plot is a PNG; give a name that ends in .png")


def draw(dataset: Dataset, clients: list[ClientRows], path: str | Path) -> None:
    """Write a PNG with clients on the x axis and classes on the y axis.

    The areas of bubbles, or a heat map if there are many clients or classes, show the number of examples for training
    and validation. Up to eight domains have a colour each; in a heat map, lines separate clients of different domains.

    Raises:
        UsageError: `path` does not end in .png, or cannot be written.
    """
    check_path(path)
    counts = class_counts(dataset, clients)
    domains = [client_domain(dataset, client) for client in clients]
    figure = Figure(figsize=(min(12.0, max(5.0, 2.5 + 0.22 * len(clients))), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_counts(axes, counts, domains)
    title = f"{dataset.name}: {counts.sum():,} examples for training, partition {partition_hash(dataset, clients)}"
    axes.set_title(title, fontsize=8, loc="left")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def draw_counts(axes: Axes, counts: np.ndarray, domains: list[str], *, legend: bool = True) -> None:
    """Draw the number of examples by client and class.

    Args:
        axes: Where to draw.
        counts: int64 [clients, classes].
        domains: The domain of each client.
        legend: Whether the figure gets a legend of the domains.
    """
    if max(counts.shape) <= MAX_BUBBLES:
        _bubbles(axes, counts, domains, legend=legend)
    else:
        _heat_map(axes, counts, domains)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


def _bubbles(axes: Axes, counts: np.ndarray, domains: list[str], *, legend: bool) -> None:
    names = sorted(set(domains), key=domains.index)
    colour = dict(zip(names, _COLOURS, strict=False)) if len(names) <= len(_COLOURS) else {}
    client, label = np.nonzero(counts)
    areas = 260 * counts[client, label] / counts.max()
    colours = [colour.get(domains[number], _COLOURS[0]) for number in client]
    axes.scatter(client, label, areas, c=colours, alpha=0.75, linewidths=0)
    axes.set_xlim(-0.8, counts.shape[0] - 0.2)
    axes.set_ylim(-0.8, counts.shape[1] - 0.2)
    axes.grid(alpha=0.2, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and 1 < len(names) <= len(_COLOURS):
        marks = [Line2D([], [], marker="o", linewidth=0, color=colour[name], label=name) for name in names]
        axes.figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _heat_map(axes: Axes, counts: np.ndarray, domains: list[str]) -> None:
    image = axes.imshow(np.ma.masked_equal(counts.T, 0), origin="lower", aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="examples")
    borders = [number for number in range(1, len(domains)) if domains[number] != domains[number - 1]]
    if len(borders) < MAX_BUBBLES:
        for border in borders:
            axes.axvline(border - 0.5, color="black", linewidth=0.6)
