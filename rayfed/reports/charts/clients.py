"""A heat map of the clients: a row per method, a column per client, at the round that the rule picks."""

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.reports.captions import RULE_CAPTIONS
from rayfed.reports.charts.chart import WIDTH, Chart, ChartData, inline, of_methods, row_axis, with_methods
from rayfed.reports.read import Tables, picked_values
from rayfed.reports.selection import CLIENT, TRIAL
from rayfed.reports.summary import SCORE, seed_values
from rayfed.reports.view import filter_rows

_MOST_NUMBERS = 25  # of clients whose values are printed in the cells


def each_client(data: ChartData) -> Chart:
    """Return the heat map of means over seeds. Clients are sorted by domain, then by number."""
    rows, rule = data.scores()
    values = _client_scores(data.tables, data.metric, data.split)
    if not values.empty:
        values = filter_rows(values, data.tables, data.view)
        values = values[(values["rule"] == rule) & np.isfinite(values["value"])]
    if values.empty:
        raise UsageError(f"plot: no client has {data.split} {data.metric}; these values are the server's")
    methods = rows.drop_duplicates("order")[["order", "hyperparameters", "chosen"]]
    values = with_methods(
        values.drop(columns=["hyperparameters", "chosen"], errors="ignore").merge(methods, on="order")
    )
    values = values.assign(value=values["value"] * data.scale)
    chart = _heat_map(values, data, better=bool(rows["higher_is_better"].iloc[0]))
    seeds = sorted(set(values["seeds"]))  # a client that was set aside at some seeds has fewer
    counted = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[-1]}"
    over = "a single seed" if seeds == [1] else f"mean over {counted} seeds"
    if _has_several_partitions(data.tables):
        over += " with other partitions, so a client holds other data in each"
    caption = RULE_CAPTIONS[rule].split(":")[0].format(criterion=data.criterion)
    return of_methods(chart, values, f"{data.experiment}: each client, {caption}; {over}")


def _client_scores(tables: Tables, metric: str, split: str) -> pd.DataFrame:
    """Return the mean over seeds of each participant's values on a split, a row per method, point, rule and client.

    The columns are experiment, algorithm, order, `SCORE` without quantity, client, domain ("" where it has none), value
    and the number of seeds. Where trials leave out one domain each, a client of one number holds different domains, and
    there is a row for each of them. A rule picks the round of a trial as in the tables of results, except that `best5`
    takes each client's own best rounds.
    """
    done = tables.done
    rows = picked_values(tables.scores, done, metric, split, tables.criteria)
    rows = rows[rows["quantity"].str.startswith(CLIENT) & (rows["metric"] == metric) & (rows["split"] == split)]
    rows = rows.assign(client=rows["quantity"].str.removeprefix(CLIENT).astype(int))
    score = [*SCORE, "client", "domain"]
    seeds = seed_values(rows, done, score)
    means = seeds.groupby(["experiment", "order", *score])["value"].agg(value="mean", seeds="count").reset_index()
    algorithms = done[["order", "algorithm"]].drop_duplicates("order")
    return means.merge(algorithms, on="order").drop(columns="quantity")


def _has_several_partitions(tables: Tables) -> bool:
    """Return whether the values of a method are means over several partitions."""
    if "partition_hash" not in tables.trials:
        return False
    hashes = tables.done.merge(tables.trials[[*TRIAL, "partition_hash"]], on=TRIAL)
    return bool(hashes.groupby("order")["partition_hash"].nunique().gt(1).any())


def _heat_map(values: pd.DataFrame, data: ChartData, *, better: bool) -> Any:
    of_rows = [(str(row.domain), int(row.client)) for row in values.itertuples()]
    holders = sorted(set(of_rows))
    few = len(holders) <= _MOST_NUMBERS
    several = len({domain for domain, _ in holders}) > 1
    most = max(3, (WIDTH - 140) // len(holders) // 7)  # characters below a column
    names = [f"{client}\n{domain[:most]}" if several and domain else str(client) for domain, client in holders]
    label_of = dict(zip(holders, names, strict=True))
    y, height = row_axis(values)
    axis = alt.Axis(labelAngle=0, labels=few, ticks=False, labelOverlap="greedy")
    title = None if few else f"{len(holders)} clients, sorted by domain and number"
    base = alt.Chart().encode(x=alt.X("holder:N", sort=names, title=title, axis=axis), y=y)
    scale = alt.Scale(scheme="viridis", reverse=not better)
    legend = alt.Legend(title=data.score_title, orient="bottom", gradientLength=200)
    value = alt.Tooltip("value:Q", title=data.score_title, format=".4~g")
    tooltip = ["method:N", "client:N", "domain:N", value, "seeds:Q"]
    cells = base.mark_rect().encode(color=alt.Color("value:Q", scale=scale, legend=legend), tooltip=tooltip)
    middle = (values["value"].min() + values["value"].max()) / 2
    bright = f"datum.value > {middle:.6g}" if better else f"datum.value < {middle:.6g}"
    colour = alt.condition(bright, alt.value("black"), alt.value("white"))
    numbers = base.mark_text().encode(text="text:N", color=colour)
    texts = [f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}" for value in values["value"]]
    frame = values.assign(holder=[label_of[holder] for holder in of_rows], text=texts)[
        ["method", "row", "holder", "client", "domain", "value", "seeds", "text"]
    ]
    return alt.layer(cells, *([numbers] if few else []), data=inline(frame)).properties(width=WIDTH, height=height)
