"""The cluster files: what `ray up` checks before it talks to a cloud, and what would only show where it costs money.

Also the files for Kubernetes and SLURM.
"""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["cluster.yaml", "cluster-gcp.yaml"])
def written(request):
    return yaml.safe_load((ROOT / request.param).read_text())


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


def test_what_make_and_pip_need_is_copied(written, tmp_path):
    copied = {Path(local).name for local in written["file_mounts"].values()}
    stamp = re.search(r"^\$\(STAMP\): (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert stamp is not None
    assert copied >= {"Makefile", "README.md", "rayfed", *stamp.group(1).split()}
    for remote, local in written["file_mounts"].items():
        if local.startswith("./"):
            assert (ROOT / local).exists(), f"{local} -> {remote}"
            (tmp_path / remote.removeprefix("~/rayfed/")).symlink_to(ROOT / local)
    build = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.dist-info/**/LICENSE"))


@pytest.mark.parametrize("written", ["cluster.yaml"], indirect=True)
@pytest.mark.parametrize("name", ["cluster.yaml", "docs/cluster.md"])
def test_the_examples_train_on_the_gpus_that_are_rented(written, name):
    """They outlive the connection, and the machines that may be taken away."""
    text = re.sub(r"\\\n#?\s*", "", (ROOT / name).read_text()).partition("## Kubernetes")[0]
    commands = re.findall(r"^[# ] .*(?:ray exec|ray job submit) .*rayfed sweep .*$", text, re.MULTILINE)
    assert commands
    for one in commands:
        assert "--tmux" in one or "job submit" in one
        assert {"placement.gpus=1", "placement.autoscale=true"} <= set(re.split(r"[ ']", one)), one
    for kind, node in written["available_node_types"].items():
        assert node["node_config"]["InstanceType"].startswith("g") == (kind != written["head_node_type"])


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


@pytest.mark.parametrize("written", ["cluster.yaml"], indirect=True)
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


@pytest.fixture(scope="module")
def documents():
    return {part["kind"]: part for part in yaml.safe_load_all((ROOT / "cluster-kubernetes.yaml").read_text())}


class TestKubernetes:
    def test_versions_and_authentication(self, documents):
        cluster = documents["RayJob"]["spec"]["rayClusterSpec"]
        pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert pinned is not None
        assert cluster["rayVersion"] == pinned[1]
        assert f"\nFROM rayproject/ray:{pinned[1]}-" in (ROOT / "Dockerfile").read_text()
        images = {
            container["image"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
            for container in group["template"]["spec"]["containers"]
        }
        assert [f"docker build -t {image} ." for image in images] == re.findall(
            r"docker build .*? \.(?= )", (ROOT / "cluster-kubernetes.yaml").read_text()
        )
        assert cluster["authOptions"] == {"mode": "token"}
        assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"


class TestSlurm:
    SCRIPT = ROOT / "cluster-slurm.sh"

    def test_every_node_runs_the_same_command(self, tmp_path):
        """Scripts play SLURM and Ray."""
        (tmp_path / "bin").mkdir()
        for name, text in {
            "python": "echo 10.0.0.7",
            "srun": 'echo "$@" > ran; stat -c %a ~/.ray/auth_token >> ran; '
            "echo $RAY_AUTH_MODE $RAY_ADDRESS $RAY_TMPDIR >> ran",
            "ray": "mkdir -p ~/.ray; echo secret > ~/.ray/auth_token",
        }.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_NNODES": "2"}
        given = ["rayfed", "sweep", "my space.yaml", "seeds=[0, 1]"]
        for length, short in ((39, []), (40, ["/tmp"])):
            folder = {"TMPDIR": "/" + "x" * (length - 1)}
            subprocess.run([str(self.SCRIPT), *given], check=True, cwd=tmp_path, env=environment | folder)
            command, mode, variables = (tmp_path / "ran").read_text().splitlines()
            assert command == (
                "--cpus-per-task=1 ray symmetric-run --address 10.0.0.7:6379 --min-nodes 2 --num-cpus 1 --num-gpus 0 "
                "-- rayfed sweep my space.yaml seeds=[0, 1]"
            )
            assert mode == "600"
            assert variables.split() == ["token", "10.0.0.7:6379", *short]
        assert "\n#SBATCH --exclusive\n" in self.SCRIPT.read_text()

    def test_ray_has_the_options(self):
        from click.testing import CliRunner
        from ray.scripts.symmetric_run import symmetric_run

        said = CliRunner().invoke(symmetric_run, ["--help"])
        assert said.exit_code == 0
        assert {"--address", "--min-nodes"} <= set(re.findall(r"--[a-z-]+", said.output))
