"""Maps of representations in the plane, as Parquet files of coordinates."""

from rayfed.core.records import MapPoint, RepresentationMap
from rayfed.records.storage import Storage


def write_map(folder: Storage, trial: str, round: int, map: RepresentationMap) -> None:
    """Write `<trial>-round<r>-<metric>-<point>-<split>-<layer>.parquet` to `folder`.

    The columns are client (-1: a test set that belongs to no client), domain, label, x and y, with one row per example.
    """
    import pandas as pd  # imported late: the process of the recorder rarely writes a map

    name = map.name.rpartition(":")[2]
    layer = map.layer.replace(".", "_")
    table = pd.DataFrame(map.points, columns=list(MapPoint._fields))
    folder.write(f"{trial}-round{round}-{name}-{map.point}-{map.split}-{layer}.parquet", table.to_parquet(index=False))
