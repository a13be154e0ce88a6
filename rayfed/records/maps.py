"""Maps of representations in the plane: a Parquet file of coordinates, and a plot beside it."""

import io
from typing import TYPE_CHECKING, Any

from rayfed.core.records import MapPoint, RepresentationMap
from rayfed.records.storage import Storage

if TYPE_CHECKING:
    import pandas as pd


def write_map(folder: Storage, trial: str, round: int, map: RepresentationMap) -> None:
    """Write `<trial>-round<r>-<metric>-<point>-<split>-<layer>.parquet` and `.png` to `folder`.

    The columns are client (-1: a test set that belongs to no client), domain, label, x and y, with one row per example.
    """
    import pandas as pd  # imported late: the process of the recorder rarely writes a map

    name = map.name.rpartition(":")[2]
    layer = map.layer.replace(".", "_")
    file = f"{trial}-round{round}-{name}-{map.point}-{map.split}-{layer}"
    table = pd.DataFrame(map.points, columns=list(MapPoint._fields))
    folder.write(f"{file}.parquet", table.to_parquet(index=False))
    folder.write(f"{file}.png", draw_map(table, f"{trial}, round {round}: {map.point} model, {map.split} data"))


def draw_map(table: "pd.DataFrame", title: str) -> bytes:
    """Return a PNG of the examples, coloured by domain and by class."""
    from matplotlib.figure import Figure  # takes most of a second to import

    figure = Figure(figsize=(11, 5), layout="constrained")
    for panel, column in zip(figure.subplots(1, 2), ("domain", "label"), strict=True):
        draw_panel(panel, table, column)
        panel.set_title({"domain": "by domain", "label": "by class"}[column])
    figure.suptitle(title)
    png = io.BytesIO()
    figure.savefig(png, dpi=120, format="png")
    return png.getvalue()


def draw_panel(panel: Any, table: "pd.DataFrame", column: str) -> None:
    """Draw the examples in `panel`, coloured by `column`, which is "domain" or "label"."""
    groups = table.groupby(column)
    for number, (name, rows) in enumerate(groups):
        colour = f"C{number}" if groups.ngroups <= 10 else None
        panel.scatter(rows["x"], rows["y"], s=8, alpha=0.7, color=colour, label=str(name))
    panel.set_xticks([])
    panel.set_yticks([])
    if groups.ngroups <= 20:
        panel.legend(markerscale=2, fontsize="small")
