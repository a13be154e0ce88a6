"""A picture of a partition: which client holds how much of which class, and of which domain."""

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

MOST_BUBBLES = 50  # clients, or classes; above that the picture is a heat map
# Okabe and Ito's colours, told apart with every common colour blindness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")


def counts(dataset: Dataset, parts: list[ClientRows]) -> np.ndarray:
    """int64 [clients, classes]: how many rows of each class a client has for training and validation."""
    labels = [dataset.labels[np.concatenate([part.train, part.val])] for part in parts]
    return np.stack([np.bincount(own, minlength=dataset.num_classes) for own in labels])


def check_path(path: str | Path) -> None:
    """Refuses a name that does not end in .png."""
    if Path(path).suffix.lower() != ".png":
        raise UsageError(f"{path}: the picture is a PNG; give a name that ends in .png")


def draw(dataset: Dataset, parts: list[ClientRows], path: str | Path) -> None:
    """Writes a PNG of clients (across) and classes (up): bubbles with areas as the counts, or a heat map of many.

    What is counted are examples for training and validation. Up to eight domains have a colour each; in a heat map,
    lines part the clients of different domains.

    Raises:
        UsageError: `path` does not end in .png, or cannot be written.
    """
    check_path(path)
    held = counts(dataset, parts)
    domains = [client_domain(dataset, part) for part in parts]
    figure = Figure(figsize=(min(12.0, max(5.0, 2.5 + 0.22 * len(parts))), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if max(held.shape) <= MOST_BUBBLES:
        _bubbles(axes, held, domains)
    else:
        _heat(axes, held, domains)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    words = f"{dataset.name}: {held.sum():,} examples for training, partition {partition_hash(dataset, parts)}"
    axes.set_title(words, fontsize=8, loc="left")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def _bubbles(axes: Axes, held: np.ndarray, domains: list[str]) -> None:
    names = sorted(set(domains), key=domains.index)
    colour = dict(zip(names, _COLOURS, strict=False)) if len(names) <= len(_COLOURS) else {}
    client, label = np.nonzero(held)
    areas = 260 * held[client, label] / held.max()
    colours = [colour.get(domains[number], _COLOURS[0]) for number in client]
    axes.scatter(client, label, areas, c=colours, alpha=0.75, linewidths=0)
    axes.set_xlim(-0.8, held.shape[0] - 0.2)
    axes.set_ylim(-0.8, held.shape[1] - 0.2)
    axes.grid(alpha=0.2, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if 1 < len(names) <= len(_COLOURS):
        marks = [Line2D([], [], marker="o", linewidth=0, color=colour[name], label=name) for name in names]
        axes.figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _heat(axes: Axes, held: np.ndarray, domains: list[str]) -> None:
    image = axes.imshow(np.ma.masked_equal(held.T, 0), origin="lower", aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="examples")
    borders = [number for number in range(1, len(domains)) if domains[number] != domains[number - 1]]
    if len(borders) < MOST_BUBBLES:
        for border in borders:
            axes.axvline(border - 0.5, color="black", linewidth=0.6)
