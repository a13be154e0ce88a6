"""`--profile`: the traces, and the parts of a round's time."""

import gzip
import json
from collections import Counter

import pytest

import rayfed
from helpers.commands import command
from rayfed.experiments.profile import profile_text, round_parts
from rayfed.records.storage import open_storage

QUICK = {
    "data": {"domains": ["plain", "font"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"batch_size": 8, "lr": 0.1},
    "rounds": 4,
    "evaluate.every": 2,
}
ROW = {
    "round": 1,
    "stage": "round",
    "seconds_broadcast": 0.1,
    "seconds_train": 4.0,
    "seconds_upload": 0.3,
    "seconds_aggregate": 0.2,
    "seconds_evaluate": 1.0,
    "seconds_total": 6.0,
    "balance": 0.75,
}


def spans(path):
    """Return how often each named span is in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


class TestParts:
    def test_they_add_up_to_the_round_and_its_recording(self):
        parts = round_parts(ROW, 0.5)
        assert parts == pytest.approx(
            {"training": 3.0, "evaluation": 1.0, "waiting": 1.0, "exchange": 0.4, "server": 0.6, "recording": 0.5}
        )
        assert sum(parts.values()) == pytest.approx(6.5)

    @pytest.mark.parametrize("balance", [None, float("nan"), 1.0])
    def test_nobody_waits_without_hosts(self, balance):
        assert round_parts(ROW | {"balance": balance}, 0.0)["waiting"] == 0

    def test_text(self, tmp_path):
        home = open_storage(tmp_path)
        assert profile_text(home, "t", [ROW]) == "no profile: no round was run"
        recording = [{"round": number, "seconds": took} for number, took in {0: 9.0, 1: 0.5, 2: 1.5}.items()]
        home.child("profile", "t").write("recording.json", json.dumps(recording).encode())
        text = profile_text(home, "t", [ROW, ROW | {"round": 2}, ROW | {"round": 3}])
        assert text.startswith("a round took 7 s (mean of 2 rounds):")
        assert "recording      1.0000 s  14.3%" in text


class TestWithoutHosts:
    def test_two_rounds_are_traced_and_the_outcome_is_the_same(self, tmp_path):
        plain = rayfed.run(QUICK | {"results": str(tmp_path / "plain")})
        result = rayfed.run(QUICK | {"results": str(tmp_path)}, profile=True)
        assert result.weights_hash == plain.weights_hash
        folder = tmp_path / "run" / "profile" / result.trial
        assert {file.name for file in folder.iterdir()} == {"server.json.gz", "recording.json"}
        found = spans(folder / "server.json.gz")
        assert {name: found[name] for name in ("broadcast", "aggregate", "train clients 0", "train clients 1")} == {
            "broadcast": 2,
            "aggregate": 2,
            "train clients 0": 2,
            "train clients 1": 2,
        }
        assert found["evaluate"] == 1  # of rounds 2 and 3, the second is scored
        assert [entry["round"] for entry in json.loads((folder / "recording.json").read_text())] == [1, 2, 3, 4]

    def test_a_single_round(self, tmp_path, monkeypatch, capfd):
        monkeypatch.chdir(tmp_path)
        given = ("data.per_domain=60", "model.name=mlp", "local.batch_size=8", "rounds=1")
        assert command("run")(["--profile", *given]) == 0
        out, err = capfd.readouterr()
        assert "profiler" not in err  # which torch's tracer prints of itself
        assert "a round took " in out
        assert ": server.json.gz; open them in chrome://tracing" in out
        assert "graphs" not in out  # on a CPU
        assert spans(next(tmp_path.glob("results/run/profile/*/server.json.gz")))["aggregate"] == 1


@pytest.mark.slow
@pytest.mark.ray
def test_hosts_and_server_are_traced_on_ray(tmp_path):
    from helpers.ray_session import start_ray

    start_ray()
    place = {"hosts": 2, "cpus": 0.5}
    result = rayfed.run(QUICK | {"results": str(tmp_path), "placement": place}, profile=True)
    folder = tmp_path / "run" / "profile" / result.trial
    assert spans(folder / "server.json.gz")["aggregate"] == 2
    trained = spans(folder / "host0.json.gz") + spans(folder / "host1.json.gz")
    assert (trained["train clients 0"], trained["train clients 1"]) >= (2, 2)
