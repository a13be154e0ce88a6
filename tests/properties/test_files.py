"""Damaged files of every reader, of checkpoints and of results: they are read, or refused in one line."""

import shutil

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rayfed
from helpers.damage import damages, files_below, in_one_line
from helpers.image_sets import WRITERS, options
from rayfed.api import _saved_checkpoints
from rayfed.core.errors import StorageError, UsageError
from rayfed.data.loading import load, load_partitioned
from rayfed.data.partitions.file import save
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.reports.read import read, read_events
from rayfed.reports.render import render

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
FEW = settings(max_examples=6, deadline=None, suppress_health_check=CHECKS, derandomize=True)
MANY = settings(max_examples=80, deadline=None, suppress_health_check=CHECKS)
EXAMPLES = pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])


def _npz(folder):
    random, n = np.random.default_rng(0), 64
    images, labels = random.integers(0, 255, (n, 8, 8), dtype=np.uint8), np.arange(n) % 3
    np.savez(folder / "own.npz", images=images, labels=labels, client=np.arange(n) % 4, is_test=np.arange(n) % 5 == 0)
    return {"data_name": "npz", "data_options": {"file": str(folder / "own.npz")}}


def _parquet(folder):
    frame = pd.DataFrame({"a": np.arange(60.0), "b": np.arange(60) % 7, "label": np.arange(60) % 3})
    frame.to_parquet(folder / "own.parquet")
    return {
        "data_name": "parquet",
        "data_options": {"file": str(folder / "own.parquet"), "features": ["a", "b"]},
        "partition_name": "iid",
        "partition_options": {"clients": 3},
    }


def _partition(folder):
    path = folder / "split.parquet"
    save(*load_partitioned("mini_digits", {"per_domain": 20}), path)
    return {
        "data_name": "mini_digits",
        "data_options": {"per_domain": 20},
        "partition_name": "file",
        "partition_options": {"file": str(path)},
    }


def _set(name):
    """A dataset in its published form, with the options that it is loaded with."""

    def write(folder):
        WRITERS[name](folder)
        return {"data_name": name, "data_options": options(name, folder)}

    return write


SETS = {
    "npz": _npz,
    "parquet": _parquet,
    "partition": _partition,
    **{name: _set(name) for name in ("cifar10", "digits5", "imagefolder")},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Each dataset, whole; what is cached of it is in a folder of its own."""
    written = {}

    def get(name):
        if name not in written:
            folder = tmp_path_factory.mktemp(name)
            written[name] = folder, SETS[name](folder)
        return written[name]

    return get


def check_reader(whole, tmp_path_factory, monkeypatch, name, draw):
    folder, arguments = whole(name)
    damaged = tmp_path_factory.mktemp("damaged")
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    monkeypatch.setenv("RAYFED_CACHE", str(damaged / "cache"))
    file = draw.draw(st.sampled_from(files_below(damaged)))
    file.write_bytes(draw.draw(damages())(file.read_bytes()))
    moved = {
        part: {
            key: value.replace(str(folder), str(damaged)) if isinstance(value, str) else value
            for key, value in options.items()
        }
        for part, options in arguments.items()
        if part.endswith("options")
    }
    try:
        population = load(**arguments | moved)
        for part in population.examples():
            part.x[:]
    except UsageError as error:
        in_one_line(error)
    finally:
        shutil.rmtree(damaged)


@pytest.mark.parametrize("name", SETS)
@EXAMPLES
def test_damaged_data(whole, tmp_path_factory, monkeypatch, name, examples):
    @examples
    @given(draw=st.data())
    def check(draw):
        check_reader(whole, tmp_path_factory, monkeypatch, name, draw)

    check()


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
    @examples
    @given(draw=st.data())
    def check(draw):
        check_checkpoint(finished, tmp_path_factory, draw)

    check()


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
    @examples
    @given(draw=st.data())
    def check(draw):
        check_results(finished, tmp_path_factory, draw)

    check()
