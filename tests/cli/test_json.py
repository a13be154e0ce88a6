"""`--json`: one document on stdout, also where a command is refused."""

import json

import pytest

from helpers.commands import command

QUICK = ["data={domains: [plain, font], per_domain: 60}", "model={name: mlp, hidden: [8]}", "rounds=2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def document(capsys, name, *arguments):
    capsys.readouterr()
    code = command(name)([*arguments, "--json"])
    out, err = capsys.readouterr()
    content = json.loads(out, parse_constant=pytest.fail)
    assert (content["command"], content["exit_code"]) == (name, code)
    return content, err


def test_run_sweep_and_report(capsys):
    ran, err = document(capsys, "run", *QUICK)
    assert "algorithm" in err  # the summary
    assert ran["trial"]["status"] == "done"
    assert ran["trial"]["weights_hash"] == ran["weights_hash"]
    assert ran["trial"]["algorithm.name"] == "fedavg"
    space = {"arms": "[{algorithm.name: fedavg}, {algorithm: {name: fedprox, mu: 0.1}}]", "experiment": "s"}
    with open("space.yaml", "w") as file:
        file.writelines(f"{key}: {value}\n" for key, value in space.items())
    swept, _ = document(capsys, "sweep", "space.yaml", *QUICK, "search.max_concurrent=1")
    assert [row["status"] for row in swept["trials"]] == ["done", "done"]
    reported, _ = document(capsys, "report", "results", "--experiment", "s")
    assert reported["trials"] == swept["trials"]
    assert reported["table"] == swept["table"]
    chosen = {row["algorithm"]: row for row in swept["table"] if row["metric"] == "accuracy" and row["split"] == "test"}
    assert set(chosen) == {"fedavg", "fedprox"}


def test_list_and_refusals(capsys):
    listed, _ = document(capsys, "list")
    assert "fedavg" in listed["algorithm"]
    assert "demo" in listed["spaces"]
    refused, err = document(capsys, "run", "local.lr=-1")
    assert refused["exit_code"] == 2
    assert refused["error"].startswith("local.lr=-1")
    assert err == f"rayfed: {refused['error']}\n"
    known, _ = document(capsys, "list", "fedprox", "models")
    mu = known["fedprox"]["algorithm"]["keys"]["algorithm.mu"]
    assert mu == {"default": "0.01", "help": "μ, weight of the proximal term; 0 is FedAvg"}
    assert "mlp" in known["model"]
    space, _ = document(capsys, "list", "demo")
    assert space["demo"]["spaces"]["file"].endswith("demo.yaml")
    refused, _ = document(capsys, "list", "fedprx")
    assert refused["error"] == "fedprx: no such kind or name; did you mean fedprox?"


def test_doctor_and_check(capsys):
    found, _ = document(capsys, "doctor", "--no-ray")
    assert found["checks"][0]["subject"] == "versions"
    kept, _ = document(capsys, "check", *QUICK)
    assert kept["kept"]
    assert all(finding["kept"] for finding in kept["findings"])
