"""Every space that ships can be drawn, and every configuration drawn from it is valid."""

from pathlib import Path

import pytest

from rayfed.config import Config
from rayfed.sources import from_file
from rayfed.space import read_space

SPACES = sorted((Path(__file__).parent.parent / "tune_spaces").glob("*.yaml"))


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_space_is_valid(path):
    space = read_space(from_file(path))
    configs = [Config.read(values) for values in space.trials()]
    assert len(configs) == len(space.seeds) * sum(len(arm) for arm in space.arms)
    assert {config.experiment for config in configs} == {path.stem}


def test_the_papers_grids_are_there():
    assert {path.stem for path in SPACES} >= {"demo", "adcol", "dbe", "feddebias", "fraug"}
    mus = {c["algorithm"]["mu"] for arm in _space("adcol").arms for c in arm if c["algorithm"]["name"] == "adcol"}
    assert mus == {0, 10, 1, 0.1, 0.01, 0.001}
    whole = read_space(from_file(_path("dbe")), {"search.samples": None})
    assert len(whole.arms[1]) == 12 * 11


def _path(name):
    return next(path for path in SPACES if path.stem == name)


def _space(name):
    return read_space(from_file(_path(name)))
