"""A plot of curves: the mean over clients at each evaluated round, with a band of one standard deviation over seeds."""

from pathlib import Path

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.core.errors import UsageError
from rayfed.results.metric_names import is_fraction

MOST_LINES = 8
# Okabe and Ito's colours, which can be told apart with every common colour blindness, without the pale yellow.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_LEGEND_CHARACTERS = 50  # longer labels do not fit beside each other
_DASHES = ("-", "--", "-.", ":")


def draw_curves(curves: pd.DataFrame, path: str | Path, *, metric: str, split: str) -> None:
    """Write a PNG, about 1000 pixels wide, of `curves` (one experiment, metric and split; see `Summary.curves`).

    Each line is an algorithm with its hyperparameters. If there are more than `MOST_LINES`, only the hyperparameters
    that validation chose are drawn for each algorithm, or the first ones if it chose none; the title says so.

    Raises:
        UsageError: `path` does not end in .png, or its folder cannot be written to.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise UsageError(f"{path}: plots are PNG files; give a name that ends in .png")
    means = curves[curves["quantity"] == "mean"]
    scale = 100 if is_fraction(metric) else 1
    remark = ""
    if means["order"].nunique() > MOST_LINES:
        ranked = means.sort_values(["chosen", "order"], ascending=[False, True])
        kept = ranked.drop_duplicates("algorithm")["order"]
        all_chosen = means[means["order"].isin(kept)]["chosen"].all()
        what = "hyperparameters chosen by validation" if all_chosen else "first hyperparameters of each algorithm"
        remark = f"; {what} only"
        means = means[means["order"].isin(kept)]

    figure = Figure(figsize=(6.6, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = 0
    for index, (_, line) in enumerate(means.groupby("order")):
        line = line.sort_values("round")
        colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[(index + index // len(_COLOURS)) % len(_DASHES)]
        middle, sd = line["mean"] * scale, line["sd"].fillna(0.0) * scale
        label = " ".join(filter(None, [line["algorithm"].iloc[0], line["hyperparameters"].iloc[0]]))
        longest = max(longest, len(label))
        mark = "o" if len(line) == 1 else None
        axes.plot(line["round"], middle, dash, color=colour, marker=mark, linewidth=1.6, label=label)
        if (sd > 0).any():
            axes.fill_between(line["round"], middle - sd, middle + sd, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel(f"{split} {metric}" + (" (%)" if scale == 100 else ""))
    seeds = means["seeds"].max()
    band = "band: ± 1 sd over seeds" if seeds > 1 else "one seed"
    axes.set_title(
        f"{means['experiment'].iloc[0]}: mean over clients, {band}{remark}", fontsize=8, loc="left", wrap=True
    )
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(
        loc="outside lower center", ncols=2 if longest <= _LEGEND_CHARACTERS else 1, fontsize=8, frameon=False
    )
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
