"""Maps of representations (t-SNE), as the metric `tsne` has written them while trials ran."""

import io
import re
from typing import Any

import altair as alt
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.reports.charts.chart import COLOURS, WIDTH, Chart, ChartData, inline, method_label

_MOST_MAPS = 6
_MOST_NAMES = 20  # of domains or classes in a legend
_FILE = re.compile(
    r"(?P<trial>.+)-round(?P<round>\d+)-(?P<name>[^-]+)-(?P<point>[^-]+)-(?P<split>[^-]+)-(?P<layer>.*)\.parquet"
)


def last_of_each_method(data: ChartData) -> Chart:
    """Return two panels for each method, coloured by domain and by class: the last map of its first seed."""
    home, trials = data.home.child("maps"), data.trials
    found = [{**match.groupdict(), "file": match[0]} for file in home.files() if (match := _FILE.fullmatch(file))]
    files = pd.DataFrame(found, columns=[*_FILE.groupindex, "file"])
    files = files.assign(round=files["round"].astype(int)).merge(trials, on="trial")
    files = files.sort_values(["order", "seed", "round"], ascending=[True, True, False], kind="stable")
    files = files.drop_duplicates("order")
    if files.empty:
        raise UsageError(
            "plot: no map of representations was written by a trial that is done; run with metrics.tsne=true"
        )
    panels = [
        _panel(pd.read_parquet(io.BytesIO(home.read(str(file["file"])))), column).properties(
            title=[method_label(file), f"seed {file['seed']}, round {file['round']}: {words}"]
        )
        for _, file in files.head(_MOST_MAPS).iterrows()
        for column, words in (("domain", "by domain"), ("label", "by class"))
    ]
    first = files.iloc[0]
    caption = f"{data.experiment}: map of representations, {first['point']} model, {first['split']} data"
    more = f"; {len(files) - _MOST_MAPS} more methods are not drawn" if len(files) > _MOST_MAPS else ""
    return Chart(alt.concat(*panels, columns=2).resolve_scale(color="independent"), caption + more)


def _panel(points: pd.DataFrame, column: str) -> Any:
    """Return the map of `points` (columns client, domain, label, x and y), coloured by `column`."""
    names = sorted(points[column].fillna("").unique())
    scale = alt.Scale(range=list(COLOURS)) if len(names) <= len(COLOURS) else alt.Scale(scheme="category20")
    legend = alt.Legend(title=None, orient="bottom", columns=4) if len(names) <= _MOST_NAMES else None
    plain = alt.Axis(labels=False, ticks=False, grid=False, title=None)
    around = alt.Scale(zero=False)
    chart = alt.Chart(inline(points[["client", "domain", "label", "x", "y"]])).mark_circle(size=16, opacity=0.7)
    return chart.encode(
        x=alt.X("x:Q", axis=plain, scale=around),
        y=alt.Y("y:Q", axis=plain, scale=around),
        color=alt.Color(f"{column}:N", sort=[str(name) for name in names], scale=scale, legend=legend),
        tooltip=["client:N", "domain:N", "label:N"],
    ).properties(width=WIDTH // 2, height=WIDTH // 2)
