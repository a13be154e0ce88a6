"""The benchmarks run, on next to nothing, and what they compare is the same work."""

import importlib
import json
import re
from pathlib import Path

import pytest
from torch.utils import backend_registration

from helpers.federations import blobs, blueprint, simulate
from helpers.ray_session import start_ray
from rayfed.algorithms.fedavg import FedAvg

HOME = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [path.stem for path in sorted(HOME.glob("[a-z]*.py"))]


def script(name):
    return importlib.import_module(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_is_measured(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        script(name).main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert {"--rounds", "--minutes", "--studies", "--count"} & set(re.findall(r"--[a-z]+", said))


def test_the_bare_loop_does_the_work_of_rayfed():
    bare = script("_bare")
    population = blobs(5)
    plan = blueprint(FedAvg(), population, rounds=2, batch_norm="aggregate")
    server, _ = simulate(plan, population)
    with bare.BareLoop(plan, population, processes=1, channels_last=False) as loop:
        before = bare.largest_difference(server.state["weights"], loop.state)
        assert loop.round() > 0
        loop.round()
    assert loop.steps == sum(len(client.train) // 5 for client in population.clients)
    assert before > 1e-2
    assert bare.largest_difference(server.state["weights"], loop.state) < 1e-6


@pytest.mark.slow
@pytest.mark.ray
def test_rounds_are_compared_and_ratios_printed(monkeypatch, capsys):
    start_ray()
    monkeypatch.delenv("RAYFED_DATA", raising=False)
    script("many_clients").main(["--clients", "5", "--images", "20", "--rounds", "2"])
    out = capsys.readouterr().out
    assert "random images in place of MNIST" in out
    difference = re.search(r"after 3 rounds, weights differ from rayfed.s by ([\d.e+-]+),", out)  # of two processes
    assert float(difference[1]) < 1e-5
    assert "5 clients of 20 images, 2 steps each; 2 rounds each" in out
    assert out.splitlines()[-1].startswith("rayfed, 2 hosts / bare loop")


def test_a_ratio_is_of_medians_and_is_held_against_its_target(capsys):
    seconds = {"rayfed": [2.0, 3.0, 40.0], "fast": [3.0, 2.0, 2.5], "slow": [3.0, 4.0, 3.5]}
    script("_rounds").show("title", seconds, {"fast": ("≤", 1.05), "slow": ("<", 1.0)})
    fast, slow = capsys.readouterr().out.splitlines()[-2:]
    assert fast.split("  ", 1)[1].split() == ["1.200", "(0.667", "to", "16.000)", "target", "≤", "1.05:", "missed"]
    assert slow.split("  ", 1)[1].split() == ["0.857", "(0.667", "to", "11.429)", "target", "<", "1:", "met"]


def test_equal_hashes_pass(capsys):
    assert script("bit_identity").main(["--algorithms", "fedavg", "--hosts", "0", "--rounds", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("equal")


def test_adcols_bytes_are_those_of_the_formula(monkeypatch, capsys):
    bench = script("adcol_bytes")
    asked = ["--rounds", "2", "--images", "30", "--sampling", "0.28", "1", "--hidden", "16"]
    assert bench.main(asked) == 0
    fedavg, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-3]]
    assert fedavg[-4:] == ["2", fedavg[-2], fedavg[-2], "0"]
    assert [row[3] for row in rows] == ["0.28,"] * 2 + ["1,"] * 2
    features, down = 64, 5 * 4 * (65 * 16 + 17 * 5)  # and 22 training images a party, of which 7 are 0.28 and more
    assert [int(row[-4].replace(",", "")) for row in rows] == [4 * features * 5 * n + down for n in (7, 7, 22, 22)]
    assert {row[-2] for row in rows} == {"0"}
    monkeypatch.setattr(bench, "measured", lambda plan: [1])
    assert bench.main(asked) == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="old torch")
def test_a_gpu_is_checked_in_every_section(tmp_path, capsys):
    """On the stand-in device, which is none for CUDA's asserts."""
    bench, file = script("gpu_check"), tmp_path / "rows.json"
    assert bench.main(["--device", "standin", "--tiny", "--rounds", "1", "--json", str(file)]) == 0
    assert capsys.readouterr().out.endswith(f"0 rows failed; all rows are in {file}\n")
    table = {name: {row["what"]: row["values"] for row in rows} for name, rows in json.loads(file.read_text()).items()}
    assert list(table) == list(bench.SECTIONS)
    assert table["smoke"]["states on disk"] == {"difference": 0}
    assert table["correctness"]["3 at once, cases"] == {"equal": 2, "tried": 2, "of": 2, "largest_difference": 0}
    assert table["determinism"]["deterministic, CNN"] == {"difference": 0}
    assert table["steps"]["mlp, Adam, K=3"]["us_per_step"] > 0
    assert table["rounds"]["4 clients, MLP, K=4"]["ratio"] > 0
    assert table["yardstick"]["cifar10, rate that falls"]["ms_per_round"] > 0
    assert table["yardstick"]["many clients scored"]["us_per_client"] > 0
    assert set(table["options"]) == {"TF32", "bf16", "vmap_clients=auto", "trials in one process"}
    assert table["options"]["TF32"]["difference"] == table["options"]["bf16"]["difference"] == 0  # this device has none
    assert table["options"]["vmap_clients=auto"]["clients_at_once"] >= 1
    assert table["assertion"]["label out of range"] == {"recognised": False, "this_process_computes": True}
