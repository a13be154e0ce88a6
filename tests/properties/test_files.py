"""Damaged files of checkpoints and of results: they are read, or refused in one line."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rayfed
from helpers.damage import damages, files_below, in_one_line
from rayfed.api import _saved_checkpoints
from rayfed.core.errors import StorageError, UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.reports.read import read, read_events
from rayfed.reports.render import render

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
FEW = settings(max_examples=6, deadline=None, suppress_health_check=CHECKS, derandomize=True)
MANY = settings(max_examples=80, deadline=None, suppress_health_check=CHECKS)
EXAMPLES = pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])


RUN = {
    "algorithm.name": "scaffold",
    "data": {"domains": ["plain", "font"], "per_domain": 20},
    "model": {"name": "mlp", "hidden": [4]},
    "local.batch_size": 4,
    "rounds": 3,
    "checkpoint.every": 1,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run with checkpoints, and its plan."""
    folder = tmp_path_factory.mktemp("finished")
    rayfed.run({**RUN, "results": str(folder)})
    return folder, make_plan(Config.read(RUN, {"results": str(folder), "resume": True}))


def check_checkpoint(finished, tmp_path_factory, draw):
    folder, plan = finished
    damaged = tmp_path_factory.mktemp("damaged")
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    for file in draw.draw(st.lists(st.sampled_from(files_below(damaged / "run/checkpoints")), min_size=1, unique=True)):
        file.write_bytes(draw.draw(damages())(file.read_bytes()))
    config = Config.read(RUN, {"results": str(damaged), "resume": True})
    try:
        saved = _saved_checkpoints(plan.__class__(**{**vars(plan), "config": config}), quiet=True)
        assert saved[0]["content"]["round"] in (1, 2, 3)
    except UsageError as error:
        in_one_line(error)
    finally:
        shutil.rmtree(damaged)


@EXAMPLES
def test_damaged_checkpoints(finished, tmp_path_factory, examples):
    examples(given(draw=st.data())(lambda draw: check_checkpoint(finished, tmp_path_factory, draw)))()


def check_results(finished, tmp_path_factory, draw):
    folder, _ = finished
    damaged = tmp_path_factory.mktemp("damaged")
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    tables = [file for file in files_below(damaged / "run") if file.suffix == ".parquet"]
    file = draw.draw(st.sampled_from(tables))
    file.write_bytes(draw.draw(damages())(file.read_bytes()))
    refusals = []
    for reader in (read, read_events, render):
        try:
            reader(damaged)
        except StorageError as error:
            refusals.append(str(error))
    assert all(line.startswith(f"{file}: damaged, ") and "\n" not in line for line in refusals)
    shutil.rmtree(damaged)


@EXAMPLES
def test_damaged_results(finished, tmp_path_factory, examples):
    examples(given(draw=st.data())(lambda draw: check_results(finished, tmp_path_factory, draw)))()
