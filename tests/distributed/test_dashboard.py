"""What Ray's dashboard and its metrics show of trials: the names of processes, and gauges."""

from collections import defaultdict

import pytest
import ray

from helpers.ray_processes import actor_names
from helpers.ray_session import start_ray
from rayfed.core.records import Record, Score
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.recorder_actor import RecorderProcess
from rayfed.experiments.config import Placement

VALUES = {"algorithm": {"name": "fedavg"}, "seed": 0, "default_eval_point": "global", "selection_metric": "loss"}


def record(round, **scores):
    return Record(
        stage="round",
        round=round,
        cohort=2,
        seconds=defaultdict(float, total=4.0),
        busy=[1.0, 3.0],
        scores=[
            Score(split=split, point="global", metric="loss", value=value, n=1, higher_is_better=False)
            for split, value in scores.items()
        ],
    )


def test_gauges_show_the_last_round_of_each_trial(monkeypatch, tmp_path):
    shown = {}

    class Shown:
        def __init__(self, name, description, tag_keys):
            self.name, self.keys = name, set(tag_keys)

        def set(self, value, tags):
            assert set(tags) == self.keys
            shown[self.name, *tags.values()] = value

    monkeypatch.setattr("rayfed.distributed.recorder_actor.Gauge", Shown)
    monkeypatch.setattr("rayfed.distributed.recorder_actor.enter", lambda folder: None)  # it would stay for other tests
    recorder = RecorderProcess(str(tmp_path), "run", in_sweep=False, here=tmp_path)
    for trial in ("a", "b"):
        recorder.begin(trial, VALUES, 3, None)
    recorder.record("a", record(1, val=0.75, test=0.5))
    recorder.record("a", record(2))
    recorder.record("b", record(1, test=0.25))
    assert shown == {
        ("rayfed_round", "a"): 2,
        ("rayfed_round", "b"): 1,
        ("rayfed_busy", "a"): 0.5,
        ("rayfed_busy", "b"): 0.5,
        ("rayfed_score", "a", "loss", "val"): 0.75,
        ("rayfed_score", "b", "loss", "test"): 0.25,
    }


@pytest.mark.ray
def test_the_processes_of_hosts_are_named_after_their_trial():
    start_ray()
    pool = HostPool(Placement(hosts=2, cpus=0.1), [{}, {}, {}], None, name="fedavg-seed0")
    try:
        ray.get([actor.__ray_ready__.remote() for actor in pool.actors])
        assert {"fedavg-seed0 host 0", "fedavg-seed0 host 1"} <= actor_names("RayHost")
    finally:
        pool.close()
