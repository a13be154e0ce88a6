"""Maps of representations in the plane: a Parquet file of coordinates, and a plot beside it."""

from pathlib import Path

import pandas as pd

from rayfed.core.records import MapPoint, RepresentationMap


def write_map(folder: Path, trial: str, round: int, map: RepresentationMap) -> Path:
    """Write `<trial>-round<r>-<metric>-<point>-<split>-<layer>.parquet` and `.png` to `folder`; return the former path.

    The columns are client (-1: a test set that belongs to no client), domain, label, x and y, with one row per example.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = map.name.rpartition(":")[2]
    layer = map.layer.replace(".", "_")
    path = folder / f"{trial}-round{round}-{name}-{map.point}-{map.split}-{layer}.parquet"
    table = pd.DataFrame(map.points, columns=list(MapPoint._fields))
    table.to_parquet(path, index=False)
    draw_map(table, path.with_suffix(".png"), f"{trial}, round {round}: {map.point} model, {map.split} data")
    return path


def draw_map(table: pd.DataFrame, path: Path, title: str) -> None:
    """Plot the examples twice, coloured by domain and by class."""
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
