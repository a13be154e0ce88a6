"""Every space that ships can be drawn, and every configuration drawn from it is valid."""

from pathlib import Path

import pytest

from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_file
from rayfed.experiments.space import read_space

SPACES = sorted((Path(__file__).parents[2] / "tune_spaces").glob("*.yaml"))


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_space_is_valid(path):
    space = read_space(from_file(path))
    configs = [Config.read(values) for values in space.trials()]
    assert len(configs) == len(space.seeds) * sum(len(arm) for arm in space.arms)
    assert {config.experiment for config in configs} == {path.stem}
