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


def test_the_papers_grids_are_there():
    assert {path.stem for path in SPACES} >= {"demo", "adcol", "dbe", "feddebias", "fraug"}
    mus = {"fedprox": set(), "adcol": set()}
    for values in _drawn("adcol"):
        if values["algorithm"]["name"] in mus:
            mus[values["algorithm"]["name"]].add(values["algorithm"]["mu"])
    assert mus == {"fedprox": {10, 1, 0.1, 0.01, 0.001}, "adcol": {0, 10, 1, 0.1, 0.01, 0.001}}
    of_adcol = [v for v in _drawn("per_fedavg") if v["algorithm"].get("alpha") == v["local"]["lr"] == 0.01]
    assert {values["algorithm"]["beta"] for values in of_adcol} == {0.001, 0.01}
    whole = read_space(from_file(_path("dbe")), {"search.samples": None})
    assert len(whole.arms[1]) == 12 * 11


def test_feddebias_and_its_baselines_have_the_grids_of_its_paper():
    own = _of("feddebias")
    found = [(o["lam"], o["mu"], o.get("tau2")) for o in own if o.get("pseudo") is None]
    table_9 = [(lam, 0, None) for lam in (0.1, 0.5, 1)]
    table_7 = [(0, 0.5, tau) for tau in (0, 0.1, 0.5, 1, 2)]
    table_8 = [(0.1, 0.5, tau) for tau in (0, 0.5, 1, 2)]
    assert found == [*table_9, *table_7, *table_8]
    assert [(o["k_mix"], o["transfer"]) for o in own if o.get("pseudo") == "mixture"] == [(0, "once"), (1, "once")]
    assert {(o["mu"], *o["widths"]) for o in _of("moon")} == {(mu, 256, 128) for mu in (0.01, 0.1, 1, 10)}
    assert {o["mu"] for o in _of("fedprox")} == {0.001, 0.01, 0.1}
    assert {o["weight_adversary"] for o in _of("dann")} == {0.01, 0.1, 1}
    assert {o["lam"] for o in _of("fedmix")} == {0.01, 0.1, 0.2}


def test_fraug_has_the_grid_of_the_authors_code_for_digits():
    own = [Config.read(values).algorithm for values in _drawn("fraug") if values["algorithm"]["name"] == "fraug"]
    assert {(a.alpha, a.distance_g, a.distance_rt, a.interpolate) for a in own} == {(1, "prototype_mse", "mmd", False)}
    rates = (0.05, 0.025)
    assert [(a.beta, a.lr_g, a.lr_m) for a in own] == [(b, g, m) for b in (0.1, 1, 10) for g in rates for m in rates]
    assert {values["algorithm"]["embeddings"] for values in _drawn("fraug_noise")} == {"u"}


def _of(name):
    """The options with which the space of this name has the algorithm of this name."""
    return [values["algorithm"] for values in _drawn(name) if values["algorithm"]["name"] == name]


def _drawn(name):
    return [values for arm in _space(name).arms for values in arm]


def _path(name):
    return next(path for path in SPACES if path.stem == name)


def _space(name):
    return read_space(from_file(_path(name)))
