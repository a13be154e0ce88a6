"""Gauges on Ray's metrics, and the board of Grafana that shows them."""

import json
from pathlib import Path

import pytest

from rayfed.distributed import gauges

BOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


class Noting:
    def __init__(self, name, about, tag_keys):
        self.name, self.tag_keys, self.values = name, tag_keys, []

    def set(self, value, tags):
        self.values.append((value, tags["trial"]))


def test_values(monkeypatch):
    monkeypatch.setattr(gauges, "Gauge", Noting)
    tracker = gauges.Gauges()
    row = {"default_eval_point": "global", "selection_metric": "loss", "selection_mode": "min"}
    tracker.begin("t", row, None)
    tracker.record("t", 1, {"global/val/loss": 0.5, "round/clients_per_second": 3.0})
    tracker.record("t", 2, {"global/val/accuracy": 0.5, "round/gpu_bytes": 7.0})
    tracker.end("t", "done")
    found = {name: gauge.values for name, gauge in tracker._gauges.items()}
    assert found == {
        "rayfed_round": [(1.0, "t"), (2.0, "t")],
        "rayfed_validation": [(0.5, "t")],
        "rayfed_clients_per_second": [(3.0, "t")],
        "rayfed_gpu_bytes": [(7.0, "t")],
    }


@pytest.mark.parametrize("name", gauges.GAUGES)
def test_the_board_shows_every_gauge(name):
    board = json.loads(BOARD.read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert f'ray_{name}{{trial=~"$trial"}}' in shown
