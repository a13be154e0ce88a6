"""rayfed's gauges at Ray's metrics endpoint, from which Prometheus scrapes them."""

import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray

from helpers.ray_session import start_ray
from helpers.score_rows import row
from rayfed.core.records import Record
from rayfed.distributed.monitoring import GAUGES, RecorderWithGauges
from rayfed.distributed.recording import DriversRecorder

pytestmark = pytest.mark.ray

VALUES = {"algorithm": {"name": "fedavg"}, "seed": 0, "default_eval_point": "global", "selection_metric": "loss"}


def record(round, **more):
    scores = [row(round, k, "a", "test", "global", "loss", value, 1).score for k, value in enumerate((0.25, 0.75))]
    parts = {"broadcast": 0.0, "train": 1.5, "upload": 0.0, "aggregate": 0.0, "evaluate": 0.0, "total": 2.0}
    given = {"stage": "round", "cohort": 8, "seconds": parts, "bytes_down": {"w": 30, "c": 12}, "bytes_up": {"w": 30}}
    return Record(round=round, scores=scores, **given, busy=[1.5, 0.5], epsilon=2.25, **more)


def scraped(trial):
    """Return the gauges of a trial at the metrics endpoint, by name and by the tags beside those of every trial."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    found = {}
    for name, tags, value in re.findall(r"^ray_rayfed_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        if pairs.get("trial") == trial:
            own = tuple(pairs[key] for key in ("metric", "split", "direction", "part", "host") if key in pairs)
            found[name, *own] = float(value)
    return found


def waited_for(trial, name, value, seconds=60):
    """Return the gauges once the one called `name` has `value`: Ray's processes report every ten seconds."""
    end = time.monotonic() + seconds
    while (found := scraped(trial)).get(name) != value:
        assert time.monotonic() < end, found
        time.sleep(0.5)
    return found


@pytest.mark.slow
def test_gauges_can_be_scraped(tmp_path):
    start_ray()
    recorder = DriversRecorder(str(tmp_path), "e", restarts=0, patience=60, say=print)
    try:
        call = recorder.actor
        ray.get(call.begin.remote("t", VALUES, 5, None))
        ray.get([call.record.remote("t", record(number)) for number in (1, 2, 3)])
        found = waited_for("t", ("round",), 3)
        assert found["running",] == 1
        assert found["rounds",] == 5
        assert found["score", "loss", "test"] == 0.5
        assert found["clients_per_second",] == 4
        assert (found["round_bytes", "down"], found["round_bytes", "up"]) == (42, 30)
        assert found["epsilon",] == 2.25
        assert (found["host_busy_seconds", "0"], found["host_busy_seconds", "1"]) == (1.5, 0.5)
        assert (found["round_seconds", "train"], found["round_seconds", "total"]) == (1.5, 2.0)
        recorder.end("t", {"status": "done"})
        assert waited_for("t", ("running",), 0)["round",] == 3
    finally:
        recorder.close()


def test_every_gauge_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text()
    assert [name for name in GAUGES if f"`ray_rayfed_{name}`" not in page] == []


def test_they_cost_next_to_nothing(tmp_path):
    """One round's gauges are set in well below a millisecond of a processor."""
    start_ray()
    recorder = RecorderWithGauges(str(tmp_path), "e")
    recorder.begin("t", VALUES, 1000, None)
    one, before = record(1), time.thread_time()
    for _ in range(200):
        recorder.record("t", one)
    with_gauges = time.thread_time() - before
    before = time.thread_time()
    for _ in range(200):
        super(RecorderWithGauges, recorder).record("t", one)
    assert (with_gauges - (time.thread_time() - before)) / 200 < 0.001
    recorder.close()
