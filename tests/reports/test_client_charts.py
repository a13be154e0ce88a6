"""The heat map of clients over rounds: that a cell is the score of its client and round, and how many become fewer."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from helpers.score_rows import add_rows, row
from rayfed.core.errors import UsageError
from rayfed.core.round_record import SERVER
from rayfed.reports.charts import chart_data, draw
from rayfed.reports.charts.chart import Chart, styled
from rayfed.reports.page import page_html
from rayfed.reports.read import read
from rayfed.reports.summary import View

WARDS = ("north", "south", "west")


def ward_rows(base: float, metric: str = "accuracy", rounds: int = 3) -> list[Any]:
    """In round n, client c has the value base + c/10 + n/100."""
    return [
        row(n, c, WARDS[c], "test", "global", metric, base + c / 10 + n / 100, 5)
        for n in range(1, rounds + 1)
        for c in range(3)
    ]


def drawn(folder: Path, **view: Any) -> Chart:
    return draw("clients", chart_data(read(folder), View(**view)))


def panels(chart: Chart) -> list[dict[str, Any]]:
    spec = styled(chart.chart)
    return [{"data": spec.get("data"), **panel} for panel in spec["concat"]]


def cells(panel: dict[str, Any]) -> pd.DataFrame:
    """The values by client (rows) and round (columns)."""
    frame = pd.read_csv(io.StringIO(panel["data"]["values"]), dtype={"client": str, "rounds": str})
    return frame.pivot(index="client", columns="round", values="y")


def test_a_cell_is_the_mean_over_seeds_that_share_a_partition(tmp_path: Path) -> None:
    for seed in (0, 1):
        add_rows(tmp_path, f"t{seed}", ward_rows(0.5 + seed / 5), seed=seed, partition_hash="h")
    chart = drawn(tmp_path)
    (panel,) = panels(chart)
    assert panel["title"] == "fedavg, mean over 2 seeds"
    assert panel["encoding"]["y"]["sort"] == list(WARDS)
    found = cells(panel)
    for c, ward in enumerate(WARDS):
        assert found.loc[ward].tolist() == pytest.approx([60 + 10 * c + n for n in (1, 2, 3)])  # percent
    assert chart.caption == "e: test accuracy (%) of each client over rounds"


def test_seeds_with_other_clients_are_not_mixed(tmp_path: Path) -> None:
    for seed in (3, 4):
        add_rows(tmp_path, f"t{seed}", ward_rows(seed / 10), seed=seed, partition_hash=f"h{seed}")
    (panel,) = panels(drawn(tmp_path))
    assert panel["title"] == "fedavg, seed 3"
    assert cells(panel).loc["north"].tolist() == pytest.approx([31, 32, 33])


def test_bright_is_good_and_methods_share_a_scale(tmp_path: Path) -> None:
    for name, base in (("fedavg", 0.0), ("scaffold", 0.3)):
        add_rows(tmp_path, name, [*ward_rows(base), *ward_rows(base, "loss")], algorithm=name)
    first, second = panels(drawn(tmp_path))
    assert (first["title"], second["title"]) == ("fedavg, seed 0", "scaffold, seed 0")
    assert first["encoding"]["color"] == second["encoding"]["color"]
    scale = first["encoding"]["color"]["scale"]
    assert (scale["domain"], scale["reverse"]) == ([1.0, 53.0], False)
    of_loss = panels(drawn(tmp_path, metric="loss"))[0]["encoding"]["color"]["scale"]
    values = [base + c / 10 + n / 100 for base in (0, 0.3) for c in range(3) for n in (1, 2, 3)]
    assert of_loss["domain"] == pytest.approx(np.percentile(values, [2, 98]), rel=0.01)
    assert of_loss["reverse"]


def test_rounds_in_which_a_client_was_not_scored_stay_empty(tmp_path: Path) -> None:
    rows = [scored for scored in ward_rows(0.5) if (scored.round, scored.score.client) not in {(2, 0), (3, 1)}]
    rows[0] = rows[0].with_(value=float("nan"))
    add_rows(tmp_path, "t", rows)
    (panel,) = panels(drawn(tmp_path))
    missing = cells(panel).isna()
    assert missing.loc[list(WARDS), [1, 2, 3]].to_numpy().tolist() == [
        [True, True, False],
        [False, False, True],
        [False, False, False],
    ]


def test_many_clients_are_ranked_and_many_rounds_are_joined(tmp_path: Path) -> None:
    clients, rounds = 90, 130
    rank = np.random.default_rng(0).permutation(clients)  # 0 is the best
    rows = [
        row(n, c, "mixed", "test", "global", "loss", float(rank[c] + n / 1000), 5)
        for n in range(1, rounds + 1)
        for c in range(clients)
    ]
    add_rows(tmp_path, "t", rows)
    chart = drawn(tmp_path, metric="loss")
    (panel,) = panels(chart)
    names = panel["encoding"]["y"]["sort"]
    found = cells(panel).loc[names]
    assert found.shape == (40, 60)
    assert names[:2] == ["1–3", "4–6"]
    assert names[-1] == "89–90"
    assert [int(name.partition("–")[0]) for name in found.columns.astype(str)][:4] == [1, 4, 7, 10]
    assert found.iloc[0, 0] == pytest.approx(1 + 0.002)  # of ranks 0, 1, 2, and of rounds 1, 2, 3
    assert found.iloc[-1, -1] == pytest.approx(88.5 + 0.1295)  # of ranks 88 and 89, and of rounds 129 and 130
    assert "a row is the mean of several clients" in chart.caption


def test_clients_without_a_domain_of_their_own_go_by_number(tmp_path: Path) -> None:
    def names(*domains: str) -> list[str]:
        folder = tmp_path / "-".join(domains)
        add_rows(folder, "t", [row(1, c, name, "test", "global", "accuracy", 0.5, 5) for c, name in enumerate(domains)])
        return list(panels(drawn(folder))[0]["encoding"]["y"]["sort"])

    assert names("mixed", "mixed", "mixed") == ["0", "1", "2"]
    assert names("a", "b", "a") == ["0 a", "1 b", "2 a"]
    assert names("a", "b", "c") == ["a", "b", "c"]


def test_of_many_methods_four_are_drawn(tmp_path: Path) -> None:
    for number, name in enumerate(("fedavg", "fedprox", "scaffold", "moon", "ditto", "feddyn")):
        add_rows(tmp_path, name, ward_rows(number / 10), algorithm=name)
    chart = drawn(tmp_path)
    assert len(panels(chart)) == 4
    assert chart.caption.endswith("; 2 more methods are not drawn")


def test_values_of_the_server_have_no_clients(tmp_path: Path) -> None:
    add_rows(tmp_path, "t", [row(1, SERVER, "d", "ood", "global", "accuracy", 0.5, 5)])
    with pytest.raises(UsageError, match=r"^plot: no client has a value of ood accuracy$"):
        drawn(tmp_path)


def test_the_page_has_it(tmp_path: Path) -> None:
    add_rows(tmp_path, "t", ward_rows(0.5), rounds=3)
    assert "Clients over rounds" in page_html(tmp_path)
