"""The JSON schema for editors: it takes every packaged space, and refuses what the commands refuse."""

import json
from pathlib import Path

import pytest
import yaml

from helpers.commands import command
from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.schema import json_schema

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]
SPACES = sorted((ROOT / "tune_spaces").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator():
    schema = json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(json.loads(json.dumps(schema)))


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_takes_the_packaged_spaces(validator, path):
    assert [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))] == []


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"algorithm": {"name": "fedprox", "mu": 0.1}, "local.lr": 0.1, "cohort_share": 0.5},
        {"algorithm": {"name": "mine:Method", "anything": 1}},
        {"algorithm.name": "mine:Method", "algorithm.anything": 1},
        {"algorithm": {"name": "mixup", "base": {"name": "fedprox", "mu": 1}}},
        {"algorithm": {"name": "mixup", "base": "scaffold"}, "algorithm.base.server_lr": 0.5},
        {"metrics": {"ece": True, "mdl": {"every": 5}}, "metrics.tsne.every": 3},
        {"partition": {"name": None}, "evaluate": {"points": ["global"]}, "placement.hosts": "auto"},
        {"experiment": 2024, "local": {"epochs": None, "steps": 3}},
    ],
)
def test_takes_what_the_commands_take(validator, values):
    assert [error.message for error in validator.iter_errors(values)] == []
    if "mine:Method" not in str(values):
        Config.read(values)


@pytest.mark.parametrize(
    "values",
    [
        {"round": 3},
        {"rounds": 0},
        {"rounds": "ten"},
        {"local": {"lrr": 1}},
        {"local.lr": -1},
        {"local.lrr": 1},
        {"algorithm": {"name": "fedporx"}},
        {"algorithm": {"name": "fedprox", "muu": 1}},
        {"algorithm": {"name": "fedprox", "mu": -1}},
        {"algorithm": {"name": "fedavg", "mu": 1}},
        {"algorithm": {"name": "mixup", "base": {"name": "fedprox", "muu": 1}}},
        {"data": {"name": "mnist", "domain": ["x"]}},
        {"evaluate": {"points": ["trainde"]}},
        {"metrics": {"eece": True}},
        {"metrics": {"ece": {"evry": 1}}},
        {"batch_norm": "averaged"},
    ],
)
def test_refuses_what_the_commands_refuse(validator, values):
    assert list(validator.iter_errors(values))
    with pytest.raises(UsageError):
        Config.read(values)


def test_completes_with_meanings_and_defaults(validator):
    properties = validator.schema["properties"]
    assert properties["local"]["anyOf"][0]["properties"]["lr"] == properties["local.lr"]
    assert (properties["local.lr"]["description"], properties["local.lr"]["default"]) == ("learning rate", 0.01)
    assert properties["algorithm.mu"]["anyOf"]
    assert validator.schema["definitions"]["configuration"]["properties"].keys() < properties.keys()


def test_is_printed_by_a_command(capsys):
    assert command("docs")(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "rayfed: a configuration or a search space"
