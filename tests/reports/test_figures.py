"""The plots: that each shows the numbers of the tables, in each format, and refuses what it cannot show."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from small_results import add

from helpers.commands import command
from helpers.score_rows import row, write
from rayfed.core.errors import UsageError
from rayfed.core.records import MapPoint, RepresentationMap
from rayfed.records.holdings import read_holdings, write_holdings
from rayfed.records.maps import write_map
from rayfed.records.storage import open_storage
from rayfed.records.trials import record_trial
from rayfed.records.writer import TrialWriter
from rayfed.reports.figures.kinds import KINDS, draw, figure_data
from rayfed.reports.figures.style import image_bytes
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
    write_map(storage.child("maps"), "a0", 2, RepresentationMap("tsne", "global", "test", "features", points))
    return home


@pytest.fixture(scope="module")
def data(folder: Path):
    return figure_data(folder, read(folder))


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_yticklabels()]


class TestKinds:
    def test_curves_have_a_band_over_seeds(self, data) -> None:
        (axes,) = draw("curves", data).axes
        line = next(line for line in axes.lines if line.get_label() == "fedavg")
        assert line.get_ydata() == pytest.approx([56.0, 57.0])  # means of 51 and 61, 52 and 62
        assert len(axes.collections) == 4  # dp_fedbn has one seed and no band
        assert "± 1 sd over 1 to 2 seeds" in axes.get_title(loc="left")

    def test_a_single_seed_is_named(self, tmp_path: Path) -> None:
        add(tmp_path, "t", "fedavg", 0, 0.5)
        (axes,) = draw("curves", figure_data(tmp_path, read(tmp_path))).axes
        assert axes.get_title(loc="left") == "e: mean over clients, a single seed"
        assert not axes.collections

    def test_bytes_add_up(self, data) -> None:
        (axes,) = draw("bytes", data).axes
        assert axes.lines[0].get_xdata() == pytest.approx([0.01, 0.02])

    def test_only_private_methods_spend(self, data, tmp_path: Path) -> None:
        (axes,) = draw("epsilon", data).axes
        assert [line.get_label() for line in axes.lines] == ["dp_fedbn"]
        assert axes.lines[0].get_xdata() == pytest.approx([1.5, 3.0])
        add(tmp_path, "t", "fedavg", 0, 0.5)
        with pytest.raises(UsageError, match="no trial spent a privacy budget"):
            draw("epsilon", figure_data(tmp_path, read(tmp_path)))

    def test_sensitivity(self, folder: Path, data) -> None:
        (axes,) = draw("sensitivity", data).axes
        assert axes.get_xlabel() == "algorithm.mu   (ring: chosen by validation)"
        assert axes.get_xscale() == "log"
        line = next(line for line in axes.lines if len(line.get_xdata()) == 3)
        assert line.get_xdata() == pytest.approx([0.01, 0.1, 1.0])
        assert line.get_ydata() == pytest.approx([54.6, 55.5, 64.5])  # 52, 2.5 by seeds, and mu / 10
        ring = axes.lines[-1]
        assert (ring.get_xdata().tolist(), ring.get_ydata().tolist()) == ([1.0], pytest.approx([64.5]))
        with pytest.raises(UsageError, match=r"^key=local.lr: does not vary"):
            draw("sensitivity", figure_data(folder, read(folder), key="local.lr"))

    def test_null_is_a_value_and_parts_lines(self, tmp_path: Path) -> None:
        """A line joins what differs in the key of its panel alone, also where another value is null."""
        cases = ((0.5, None, 0.2), (1.0, None, 0.4), (1.0, 2, 0.6))
        for number, (cohort, epochs, mean) in enumerate(cases):
            add(tmp_path, f"t{number}", "fedavg", 0, mean, **{"cohort": cohort, "local.epochs": epochs})
        add(tmp_path, "u", "fedbn", 0, 0.5, **{"cohort": 1.0, "algorithm.mu": 3.0})
        axes = draw("sensitivity", figure_data(tmp_path, read(tmp_path))).axes
        panels = {panel.get_xlabel().split()[0]: panel for panel in axes}
        shown = {
            key: {
                name: [round(y, 6) for y in box[0].get_ydata()]
                for box, name in zip(*panel.get_legend_handles_labels(), strict=True)
            }
            for key, panel in panels.items()
        }
        assert shown == {  # percent; 2 of the last round on average over both domains
            "local.epochs": {"fedavg cohort=0.5": [22.0], "fedavg cohort=1.0": [62.0, 42.0]},
            "cohort": {"fedavg local.epochs=none": [22.0, 42.0], "fedavg local.epochs=2": [62.0]},
        }
        ticks = {key: [text.get_text() for text in panel.get_xticklabels()] for key, panel in panels.items()}
        assert ticks == {"local.epochs": ["2", "none"], "cohort": ["0.5", "1.0"]}

    def test_switches_are_true_and_false_and_one_client_is_not_all(self, tmp_path: Path) -> None:
        for number, (cohort, prbm) in enumerate(((1, True), (1, False), (1.0, False), (20, False))):
            add(tmp_path, f"t{number}", "dbe", 0, 0.5, **{"cohort": cohort, "algorithm.prbm": prbm})
        panels = draw("sensitivity", figure_data(tmp_path, read(tmp_path))).axes
        ticks = {panel.get_xlabel().split()[0]: [t.get_text() for t in panel.get_xticklabels()] for panel in panels}
        assert ticks == {"algorithm.prbm": ["false", "true"], "cohort": ["1", "1.0", "20"]}

    def test_clients_that_were_set_aside_at_some_seeds_have_fewer(self, tmp_path: Path) -> None:
        for seed in (0, 1):
            record_trial(tmp_path, "e", f"t{seed}", {"algorithm": "fedavg", "seed": seed, "status": "done"})
            with TrialWriter(tmp_path, "e", f"t{seed}", "fedavg", seed) as writer:
                write(writer, [row(1, c, "a", "test", "global", "accuracy", 0.5, 10) for c in (0, 1)[: 2 - seed]])
        axes = draw("clients", figure_data(tmp_path, read(tmp_path))).axes[0]
        assert "mean over 1 to 2 seeds" in axes.get_title(loc="left")

    def test_clients(self, data) -> None:
        axes = draw("clients", data).axes[0]
        assert labels(axes)[:2] == ["dp_fedbn", "fedavg"]
        # dp_fedbn, domain a and b; fedavg
        np.testing.assert_allclose(axes.images[0].get_array()[:2], [[22.0, 42.0], [47.0, 67.0]])
        assert [text.get_text() for text in axes.get_xticklabels()] == ["0\na", "1\nb"]

    def test_partitions(self, data, folder: Path) -> None:
        (axes,) = draw("partition", data).axes  # h1 was not recorded
        assert axes.get_title(loc="left") == "h0, seed 0"
        assert axes.collections[0].get_offsets().tolist() == [[0, 0], [1, 1]]
        areas = axes.collections[0].get_sizes()
        assert areas[0] / areas[1] == pytest.approx(5 / 8)  # for training and validation
        assert read_holdings(open_storage(folder).child("e"), "h1") is None

    def test_maps(self, data) -> None:
        by_domain, by_class = draw("tsne", data).axes
        assert by_domain.get_title() == "fedavg, seed 0, round 2: by domain"
        assert sorted(points.get_offsets().tolist()[0] for points in by_class.collections) == [[0.0, 1.0], [2.0, 3.0]]

    def test_long_names_of_methods_leave_room(self, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
        keys = ("local.batch_size", "local.optimizer", "model.hidden", "data.per_domain", "partition.clients")
        for number in range(2):
            add(tmp_path, f"t{number}", "fedavg", 0, 0.5, **dict.fromkeys(keys, str(number) * 16))
        data = figure_data(tmp_path, read(tmp_path))
        for kind in ("clients", "time"):
            image_bytes(draw(kind, data), "png")
        assert not [warning for warning in recwarn.list if warning.category is UserWarning]  # matplotlib's of layouts

    def test_time(self, data) -> None:
        (axes,) = draw("time", data).axes
        widths = {container.get_label(): container.patches[0].get_width() for container in axes.containers}
        parts = {"broadcast": 0, "train": 3, "upload": 0, "aggregate": 1, "evaluate": 2, "other": 0.5}
        assert widths == pytest.approx(parts)


def test_formats(data, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = draw("time", data)
    for suffix, start in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")):
        content = image_bytes(figure, suffix)
        assert content.startswith(start)
        assert content == image_bytes(draw("time", data), suffix)  # no date, and no random names
    path = tmp_path / "time.svg"
    assert main([str(folder), "--plot", str(path), "--kind", "time"]) == 0
    assert path.read_bytes() == content
    assert f"Plot: {path}" in capsys.readouterr().out


def test_a_partition_is_recorded_with_the_trial(tmp_path: Path, monkeypatch) -> None:
    import rayfed

    monkeypatch.chdir(tmp_path)
    config = {"data": {"domains": ["plain", "font"], "per_domain": 20}, "model.name": "mlp", "rounds": 1}
    result = rayfed.run({**config, "local.batch_size": 4}, keep_state=False)
    digest = result.trials["partition_hash"].iloc[0]
    holdings = pd.read_parquet(f"results/run/partitions/{digest}.parquet")
    rows = result.metrics.query("metric == 'accuracy' and split == 'test' and round == 1").set_index("client")["n"]
    assert holdings[holdings["split"] == "test"].groupby("client")["count"].sum().to_dict() == rows.to_dict()
    assert set(holdings["domain"]) == {"plain", "font"}


def test_every_kind_is_described() -> None:
    assert all(kind.shows and ":" in kind.function for kind in KINDS.values())
