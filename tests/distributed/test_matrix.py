"""Everything that can be chosen by name, in each way of running: the same weights everywhere, to the last bit.

The components are taken from the registries and put together in pairs rather than in all combinations. Every path is
relative to a folder that is neither the repository's nor the one in which Ray was started.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import rayfed
from helpers import data_files
from helpers.algorithm_cases import CASES
from helpers.commands import command
from helpers.ray_session import start_ray
from rayfed.algorithms import ALGORITHMS
from rayfed.augment import AUGMENTS
from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.data.partitions import PARTITIONS
from rayfed.data.sets import DATASETS
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.sources import merged
from rayfed.losses import LOSSES
from rayfed.metrics import METRICS
from rayfed.models import MODELS
from rayfed.sampling import SAMPLERS

pytestmark = pytest.mark.ray

Arm = dict[str, Any]

OWN = """
import math
from dataclasses import dataclass
from pathlib import Path

import torchvision  # at the top, as users do it
from torch import nn

from helpers.federations import Adapter
from rayfed.algorithms.fedavg import FedAvg

TITLE = Path("title.txt").read_text()  # in the folder in which the command was given


def network(shape, num_classes):
    layer = torchvision.ops.Conv2dNormActivation(shape[0], 4)
    return nn.Sequential(layer, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, num_classes))


def adapted(shape, num_classes):
    layer = Adapter(nn.Linear(math.prod(shape), 8))
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), nn.Linear(8, num_classes))


@dataclass(frozen=True, kw_only=True)
class Reader(FedAvg):
    def finish(self, ctx, work, client, down, data):  # runs in the hosts
        assert Path("title.txt").read_text() == TITLE == "mine"
        return super().finish(ctx, work, client, down, data)

    def aggregate(self, ctx, server, replies):  # runs in the server
        assert Path("title.txt").read_text() == "mine"
        return super().aggregate(ctx, server, replies)
"""

OF_USERS: list[Arm] = [
    {
        "algorithm.name": "matrix_own:Reader",
        "model.name": "matrix_own:network",
        "data": {"name": "npz", "file": "own.npz"},
    },
    {"model.name": "resnet18", "data.name": "mnist", "partition": {"name": "iid", "clients": 2}},
]
"""The user's own code and files, and a model of torchvision on data in a relative RAYFED_DATA."""

BASE: Arm = {
    "data": {"name": "mini_digits", "domains": ["plain", "font"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "rounds": 2,
    "evaluate.every": 2,
    "local": {"steps": 2, "batch_size": 4, "lr": 0.01},
    "placement.hosts": 0,
    "faults.restarts": 0,
}
ON_RAY = ("run with hosts", "sweep", "sweep with hosts")


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    """The working directory, with the user's files; and Ray, started elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        start_ray()
        folder = tmp_path_factory.mktemp("matrix")
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("RAYFED_DATA", data_files.ROOT)
        patch.setenv("RAYFED_CACHE", "cache")
        Path("matrix_own.py").write_text(OWN)
        Path("title.txt").write_text("mine")
        data_files.write_npz()
        data_files.write_idx("MNIST")
        yield


def outcomes(way: str, arms: list[Arm], experiment: str) -> pd.DataFrame:
    """Return status, error, final weights and scores of each arm, run in one of the ways; the index is the trial."""
    common = merged(BASE, {"experiment": f"{experiment} {way}", "placement.hosts": 2 if "hosts" in way else 0})
    if way.startswith("sweep"):
        rayfed.sweep({**common, "seeds": [0], "search.max_concurrent": 2, "arms": arms}, quiet=True)
    else:
        for arm in arms:
            with contextlib.suppress(Exception):  # recorded, unless the run could not begin
                rayfed.run(merged(common, arm), quiet=True, keep_state=False)
    tables = rayfed.read_results("results", common["experiment"])
    scores = tables.metrics.sort_values(["round", "client", "domain", "split", "point", "metric"]).groupby("trial")
    trials = tables.trials.set_index("trial").sort_index()[["status", "error", "weights_hash"]]
    return trials.assign(scores=scores["value"].agg(lambda values: values.to_numpy().tobytes()))


@pytest.fixture(scope="module")
def users_alone():
    return [outcomes("run", [arm], f"users {number}") for number, arm in enumerate(OF_USERS)]


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("run with hosts", 0),
        pytest.param("sweep with hosts", 1, marks=pytest.mark.slow),
        pytest.param("sweep", 0, marks=pytest.mark.slow),
    ],
)
def test_the_users_code_and_files(users_alone, way, number):
    """Each of the two arms once; a sweep without hosts has fewer kinds of processes than the one with hosts."""
    assert users_alone[number]["status"].tolist() == ["done"]
    pd.testing.assert_frame_equal(outcomes(way, [OF_USERS[number]], f"users {number}"), users_alone[number])


# Everything in the registries

MODEL_OF = {"ag_news": "fasttext", "uci_har": "har_cnn", "mini_scans": "unet"}
"""The models that are for one dataset."""
TOO_LARGE = ("vgg11", "huggingface")  # half a gigabyte of weights in each process; a folder of weights is needed
SMALL: dict[str, Arm] = {
    "torchvision": {"arch": "mnasnet0_5"},
    "cct": {"depth": 1, "heads": 1, "head_width": 16},
    "digits_cnn": {"width": 0.1},
    "vgg11_mean": {"width": 0.1},
    "mdl": {"sizes": 2, "seeds": 1, "steps": 10, "hidden": 8},
}
"""Options of components that have no default, or a slow one."""
OTHER_MODELS: list[Arm] = [{"name": "mlp", "hidden": [8], "batch_norm": True}, {"name": "matrix_own:adapted"}]
"""The models of algorithms that refuse the plain one: with batch norm, and with LoRA."""


def components(options: dict[str, Arm]) -> dict[str, list[Arm]]:
    """Return the values that choose each component, by kind; `options` are those of the datasets."""
    data: list[Arm] = [{"data": {"name": name, **options.get(name, {})}} for name in DATASETS]
    for arm in data:
        arm["partition"] = {"name": "iid", "clients": 2}
        if name := MODEL_OF.get(arm["data"]["name"]):
            arm["model"] = {"name": name}
    models = [name for name in MODELS if name not in (*MODEL_OF.values(), *TOO_LARGE)]
    split = {name: {"clients": 3} if "clients" in fields_of(PARTITIONS[name]) else {} for name in PARTITIONS}
    split["file"] = {"file": "parts.parquet"}
    return {
        "data": data,
        "model": [{"model": {"name": name, **SMALL.get(name, {})}} for name in models],
        "partition": [{"partition": {"name": name, **split[name]}} for name in PARTITIONS],
        "augment": [{"augment.name": name} for name in AUGMENTS],
        "loss": [{"loss.name": name} for name in LOSSES],
        "sampling": [{"sampling.name": name, "cohort": 1} for name in SAMPLERS],
        "metrics": [{"metrics": {name: SMALL.get(name, True)}} for name in METRICS],
    }


def fields_of(target: str) -> set[str]:
    return {field.name for field in dataclasses.fields(resolve(target, {}, where="name"))}


def works(arm: Arm) -> bool:
    """Return whether the components of an arm go together."""
    try:
        make_plan(Config.read(merged(BASE, arm)))
    except UsageError:
        return False
    return True


def arms_of(options: dict[str, Arm]) -> list[Arm]:
    """Return few arms that have everything: an arm per algorithm, with components of which no other arm has any."""
    left, arms = components(options), []
    for name in ALGORITHMS:
        arm: Arm = {"algorithm": CASES[name].options}
        others = (merged(arm, {"model": model}) for model in OTHER_MODELS)
        arm = next((tried for tried in (arm, *others) if works(tried)), arm)  # if none works, its trial says why
        for candidates in left.values():
            for component in candidates[:3]:
                is_apart = arm.keys().isdisjoint(component.keys() - {"partition"})
                if is_apart and works(merged(arm, component)):
                    arm = merged(arm, component)
                    candidates.remove(component)
                    break
        arms.append(arm)
    return arms + [component for candidates in left.values() for component in candidates]  # each with FedAvg


@pytest.fixture(scope="module")
def arms():
    options = data_files.write_all()
    shape = ["data.domains=[plain,font]", "data.per_domain=60"]
    assert command("partition")([*shape, "--save", "parts.parquet"]) == 0
    return arms_of(options)


@pytest.fixture(scope="module")
def alone(arms):
    return outcomes("run", arms, "everything")


@pytest.mark.slow
def test_everything_runs_in_process(arms, alone):
    assert alone["error"].dropna().to_dict() == {}
    assert len(alone) == len(arms)


@pytest.mark.slow
@pytest.mark.parametrize("way", ON_RAY)
def test_everything_runs_on_ray(arms, alone, way):
    pd.testing.assert_frame_equal(outcomes(way, arms, "everything"), alone)
