"""cluster.yaml: what `ray up` checks before it talks to AWS, and what would only show on a cluster that costs money."""

import copy
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def written():
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


@pytest.fixture(scope="module")
def prepared(written):
    """With Ray's defaults merged in, as `ray up` does it."""
    util = pytest.importorskip("ray.autoscaler._private.util")
    return util.prepare_config(copy.deepcopy(written))


def test_ray_accepts_it(written, prepared):
    import jsonschema
    from ray import autoscaler
    from ray.autoscaler._private.util import validate_config

    schema = json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(written, schema)
    validate_config(prepared)


def test_refuses_a_misspelt_key(prepared):
    import jsonschema
    from ray.autoscaler._private.util import validate_config

    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepared | {"max_wrokers": 3})


def test_counts_make_sense(prepared):
    types = prepared["available_node_types"]
    assert prepared["head_node_type"] in types
    workers = {name: kind for name, kind in types.items() if name != prepared["head_node_type"]}
    assert workers
    for kind in workers.values():
        assert 0 <= kind["min_workers"] <= kind["max_workers"] <= prepared["max_workers"]
    assert types[prepared["head_node_type"]]["max_workers"] == 0
    assert all(kind["node_config"]["InstanceType"] for kind in types.values())


def test_everything_that_is_copied_exists(written):
    for remote, local in written["file_mounts"].items():
        if local.startswith("./") and local != "./README.md":
            assert (ROOT / local).exists(), f"{local} -> {remote}"


def test_what_make_needs_is_copied(written):
    copied = {Path(local).name for local in written["file_mounts"].values()}
    stamp = re.search(r"^\$\(STAMP\): (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert stamp is not None
    assert copied >= {"Makefile", "README.md", "rayfed", *stamp.group(1).split()}


def test_authentication_stays_on(written):
    assert "~/.ray/auth_token" in written["file_mounts"]
    for commands in (written["head_start_ray_commands"], written["worker_start_ray_commands"]):
        (start,) = [command for command in commands if "ray start" in command]
        assert "RAY_AUTH_MODE=token" in start
    assert "--dashboard-host=127.0.0.1" in " ".join(written["head_start_ray_commands"])
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in " ".join(written["head_start_ray_commands"])


def test_commands_are_valid_shell(written):
    for key in ("setup_commands", "head_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        for command in written[key]:
            subprocess.run(["bash", "-n", "-c", command], check=True)


def test_workers_get_the_image_that_the_head_runs(prepared, tmp_path):
    """The command that rewrites the head's copy of this file; a script plays the instance's metadata service."""
    fake = tmp_path / "curl"
    fake.write_text('#!/bin/sh\ncase "$*" in *PUT*) echo secret ;; *secret*ami-id) echo ami-123 ;; *) exit 1 ;; esac\n')
    fake.chmod(0o755)
    copy_on_head = tmp_path / "ray_bootstrap_config.yaml"
    copy_on_head.write_text(json.dumps(prepared))
    (command,) = [command for command in prepared["head_setup_commands"] if "ray_bootstrap_config" in command]
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], check=True, env=environment)

    expected = copy.deepcopy(prepared)
    for kind in expected["available_node_types"].values():
        kind["node_config"]["ImageId"] = "ami-123"
    assert json.loads(copy_on_head.read_text()) == expected
