"""Maps of representations in the plane: a Parquet file of places, and a picture beside it."""

from pathlib import Path

import pandas as pd

from rayfed.metrics.tsne import Map


def write_map(folder: Path, trial: str, round: int, found: Map) -> Path:
    """Writes `<trial>-round<r>-<metric>-<point>-<split>-<layer>.parquet` and `.png` into `folder`; returns the former.

    The columns are client (-1: a test set that nobody holds), domain, label, x and y, a row an example.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layer = found.layer.replace(".", "_")
    path = folder / f"{trial}-round{round}-{found.name.rpartition(':')[2]}-{found.point}-{found.split}-{layer}.parquet"
    table = pd.DataFrame(found.places, columns=["client", "domain", "label", "x", "y"])
    table.to_parquet(path, index=False)
    draw_map(table, path.with_suffix(".png"), f"{trial}, round {round}: {found.point} model, {found.split} data")
    return path


def draw_map(table: pd.DataFrame, path: Path, title: str) -> None:
    """The same points twice, by domain and by class."""
    from matplotlib.figure import Figure  # takes most of a second to import

    figure = Figure(figsize=(11, 5), layout="constrained")
    for panel, column in zip(figure.subplots(1, 2), ("domain", "label"), strict=True):
        groups = table.groupby(column)
        for number, (name, rows) in enumerate(groups):
            colour = f"C{number}" if groups.ngroups <= 10 else None
            panel.scatter(rows["x"], rows["y"], s=8, alpha=0.7, color=colour, label=str(name))
        panel.set_title({"domain": "by domain", "label": "by class"}[column])
        panel.set_xticks([])
        panel.set_yticks([])
        if groups.ngroups <= 20:
            panel.legend(markerscale=2, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
