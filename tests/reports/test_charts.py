"""The charts: that each shows the numbers of the tables, in each format, and refuses what it cannot show."""

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from small_results import add

from helpers.commands import command
from helpers.score_rows import add_rows, row
from rayfed.core.errors import UsageError
from rayfed.core.round_record import MapPoint, RepresentationMap
from rayfed.records.files import read_holdings, write_holdings, write_map
from rayfed.records.storage import open_storage
from rayfed.reports.charts import KINDS, chart_data, draw
from rayfed.reports.charts.chart import image_bytes, styled
from rayfed.reports.read import read

main = command("report")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("figures")
    for seed in (0, 1):
        add(home, f"a{seed}", "fedavg", seed, 0.5 + seed / 10, partition_hash=f"h{seed}", partition_seed=seed)
        for mu in (0.01, 0.1, 1.0):
            values = {"algorithm.mu": mu, "partition_hash": f"h{seed}", "partition_seed": seed}
            add(home, f"p{mu}{seed}", "fedprox", seed, 0.5 + mu / 10 + seed / 20, **values)
    add(home, "d0", "dp_fedbn", 0, 0.3, epsilon=1.5, partition_hash="h0", partition_seed=0)
    storage = open_storage(home).child("e")
    holdings = [(0, "a", "train", 0, 5), (0, "a", "test", 1, 9), (1, "b", "train", 1, 7), (1, "b", "val", 1, 1)]
    write_holdings(storage, "h0", holdings)
    points = [MapPoint(0, "a", 0, 0.0, 1.0), MapPoint(1, "b", 1, 2.0, 3.0)]
    for number, of_round in ((1, points[:1]), (2, points)):
        of_points = RepresentationMap("tsne", "global", "test", "features", of_round)
        write_map(storage.child("maps"), "a0", number, of_points)
    return home


def spec_of(kind: str, folder: Path, **choices: Any) -> dict[str, Any]:
    return styled(draw(kind, chart_data(read(folder), **choices)).chart)


def data_of(spec: dict[str, Any]) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(spec["data"]["values"]), keep_default_na=False, dtype={"x": object, "text": str})


def panels_of(kind: str, folder: Path) -> list[dict[str, Any]]:
    """The panels with their data, which a single one leaves to the chart."""
    spec = spec_of(kind, folder)
    return [{"data": spec.get("data"), **panel} for panel in spec["concat"]]


def sensitivities(folder: Path) -> dict[str, dict[str, Any]]:
    """The panels by the key that they show."""
    return {panel["layer"][0]["encoding"]["x"]["title"]: panel for panel in panels_of("sensitivity", folder)}


class TestKinds:
    def test_curves_have_a_band_over_seeds(self, folder: Path) -> None:
        rows = data_of(spec_of("curves", folder)).set_index(["method", "round"])
        assert rows.loc["fedavg", "y"].tolist() == pytest.approx([56.0, 57.0])  # means of 51 and 61, 52 and 62
        half = 10 / 2**0.5
        assert rows.loc[("fedavg", 1), ["low", "high"]].tolist() == pytest.approx([56 - half, 56 + half], rel=1e-5)
        assert rows.loc[("dp_fedbn", 1), ["low", "high"]].tolist() == pytest.approx([31.0, 31.0])  # of a single seed
        assert "± 1 sd over 1 to 2 seeds" in draw("curves", chart_data(read(folder))).caption

    def test_bytes_add_up(self, folder: Path) -> None:
        rows = data_of(spec_of("bytes", folder))
        assert rows.loc[rows["method"] == "fedavg", "x"].astype(float).tolist() == pytest.approx([0.01, 0.02])

    def test_the_clock_of_trials_that_have_one(self, folder: Path) -> None:
        rows = data_of(spec_of("clock", folder))
        assert set(rows["method"]) == {"fedprox mu=0.01", "fedprox mu=0.1", "fedprox mu=1"}
        assert set(rows["x"].astype(float)) == {40.0, 80.0}

    def test_only_private_methods_spend(self, folder: Path, tmp_path: Path) -> None:
        rows = data_of(spec_of("epsilon", folder))
        assert set(rows["method"]) == {"dp_fedbn"}
        assert rows["x"].astype(float).tolist() == pytest.approx([1.5, 3.0])
        add(tmp_path, "t", "fedavg", 0, 0.5)
        with pytest.raises(UsageError, match="no trial spent a privacy budget"):
            spec_of("epsilon", tmp_path)
        assert draw("curves", chart_data(read(tmp_path))).caption == "e: mean over clients, a single seed"

    def test_sensitivity(self, folder: Path) -> None:
        (panel,) = sensitivities(folder).values()
        assert panel["layer"][0]["encoding"]["x"]["scale"] == {"type": "log"}
        rows = data_of(panel)
        assert rows["x"].astype(float).tolist() == pytest.approx([0.01, 0.1, 1.0])
        assert rows["y"].tolist() == pytest.approx([54.6, 55.5, 64.5])  # 52, 2.5 by seeds, and mu / 10
        assert rows["chosen"].tolist() == [0, 0, 1]

    def test_null_is_a_value_and_parts_lines(self, tmp_path: Path) -> None:
        """A line joins what differs in the key of its panel alone, also where another value is null."""
        cases = ((0.5, None, 0.2), (1.0, None, 0.4), (1.0, 2, 0.6))
        for number, (cohort, epochs, mean) in enumerate(cases):
            add(tmp_path, f"t{number}", "fedavg", 0, mean, **{"cohort_share": cohort, "local.epochs": epochs})
        add(tmp_path, "u", "fedbn", 0, 0.5, **{"cohort_share": 1.0, "algorithm.mu": 3.0})
        panels = sensitivities(tmp_path)
        drawn = {
            key: {line: rows.set_index("x")["y"].to_dict() for line, rows in data_of(panel).groupby("line")}
            for key, panel in panels.items()
        }
        assert drawn == {  # percent; 2 of the last round on average over both domains
            "local.epochs": {"fedavg cohort_share=0.5": {"none": 22}, "fedavg cohort_share=1": {"none": 42, "2": 62}},
            "cohort_share": {"fedavg local.epochs=none": {"0.5": 22, "1": 42}, "fedavg local.epochs=2": {"1": 62}},
        }
        order = {key: panel["layer"][0]["encoding"]["x"]["sort"] for key, panel in panels.items()}
        assert order == {"local.epochs": ["2", "none"], "cohort_share": ["0.5", "1"]}

    def test_partitions(self, folder: Path) -> None:
        (panel,) = panels_of("partition", folder)  # h1 was not recorded
        assert panel["title"] == "h0, seed 0"
        assert data_of(panel).to_numpy().tolist() == [[0, 0, "a", 5], [1, 1, "b", 8]]  # for training and validation
        assert read_holdings(open_storage(folder).child("e"), "h1") is None

    def test_maps(self, folder: Path) -> None:
        by_domain, by_class = panels_of("tsne", folder)
        assert by_domain["title"] == ["fedavg", "seed 0, round 2: by domain"]
        assert data_of(by_class)[["x", "y"]].astype(float).to_numpy().tolist() == [[0.0, 1.0], [2.0, 3.0]]
        assert by_class["encoding"]["color"]["field"] == "label"

    def test_time(self, folder: Path) -> None:
        rows = data_of(spec_of("time", folder))
        parts = rows[rows["method"] == "fedavg"].set_index("part")["seconds"].to_dict()
        assert parts == {"broadcast": 0, "train": 3, "upload": 0, "aggregate": 1, "evaluate": 2, "other": 0.5}

    def test_infinite_means_are_not_drawn(self, tmp_path: Path) -> None:
        for mu, loss in ((0, float("inf")), (1, 1.5)):
            add_rows(tmp_path, f"t{mu}", [row(1, 0, "a", "test", "global", "loss", loss, 10)], algorithm__mu=mu)
        assert data_of(spec_of("curves", tmp_path))["method"].tolist() == ["fedavg mu=1"]

    def test_many_methods_are_those_that_validation_chose(self, tmp_path: Path) -> None:
        for number in range(9):
            add(tmp_path, f"t{number}", "fedprox", 0, 0.5 + number / 100, **{"algorithm.mu": number})
        chart = draw("curves", chart_data(read(tmp_path)))
        assert chart.remark == "; hyperparameters chosen by validation only"
        (shown,) = styled(chart.chart)["params"]
        assert shown["value"] == ["fedprox mu=8"]


def test_formats(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = draw("time", chart_data(read(folder)))
    for suffix, start in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<svg")):
        content = image_bytes(chart, suffix)
        assert content.startswith(start)
        if suffix != "pdf":  # in which the order of resources varies
            assert content == image_bytes(chart, suffix)
    path = tmp_path / "time.svg"
    assert main([str(folder), "--plot", str(path), "--kind", "time"]) == 0
    assert path.read_bytes() == content
    assert f"Plot: {path}" in capsys.readouterr().out


_OF_CHANNELS = {kind for kind in KINDS if KINDS[kind].function.startswith("channel:")}  # test_channel_charts.py


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in _OF_CHANNELS])
def test_every_kind_becomes_an_image(folder: Path, kind: str) -> None:
    picture = image_bytes(draw(kind, chart_data(read(folder))), "svg").decode()
    assert "aria-roledescription" in picture  # of axes or marks: something was drawn


def test_a_partition_is_recorded_with_the_trial(here: Path) -> None:
    import rayfed

    config = {"data": {"domains": ["plain", "font"], "per_domain": 20}, "model.name": "mlp", "rounds": 1}
    result = rayfed.run({**config, "local.batch_size": 4}, keep_state=False)
    digest = result.trials["partition_hash"].iloc[0]
    holdings = pd.read_parquet(f"results/run/partitions/{digest}.parquet")
    rows = result.metrics.query("metric == 'accuracy' and split == 'test' and round == 1").set_index("client")["n"]
    assert holdings[holdings["split"] == "test"].groupby("client")["count"].sum().to_dict() == rows.to_dict()
    assert set(holdings["domain"]) == {"plain", "font"}
