"""Damaged files of results: they are read, or refused in one line."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rayfed
from helpers.damage import damages, files_below
from rayfed.core.errors import StorageError
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
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    rayfed.run({**RUN, "results": str(folder)})
    return folder


def check_results(finished, tmp_path_factory, draw):
    damaged = tmp_path_factory.mktemp("damaged")
    shutil.copytree(finished, damaged, dirs_exist_ok=True)
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
