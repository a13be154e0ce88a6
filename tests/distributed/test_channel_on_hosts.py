"""All parts of a channel together: one hash on any number of hosts, after a resume, after faults, asynchronously."""

import os
import signal

import pandas as pd
import pytest

import rayfed
from helpers.ray_processes import meanwhile, processes, wait_until
from helpers.ray_session import start_ray
from helpers.sleeping import last_rounds, ran, sleeping_here

pytestmark = pytest.mark.ray

CHANNELS = {
    "bounded": {  # nothing is gathered: hosts sum up what clients have clipped, compressed and changed
        "privacy": {"sigma": 0.01, "delta": 0.01, "clip": 0.5, "quantile": 0.5, "bits_noise": 1},
        "compression": {"name": "topk", "share": 0.2, "down": {"name": "cast", "type": "int8"}},
        "attack": {"name": "sign_flip", "share": 0.3},
        "robust": {"name": "norm_bound", "bound": 0.4},
    },
    "gathered": {  # the server has all updates of a round, and remembers
        "privacy": {"sigma": 0.01, "delta": 0.01, "clip": 0.5},
        "compression": {"name": "qsgd", "levels": 7, "feedback": True},
        "attack": {"name": "minmax", "share": 0.3},
        "robust": {"name": "centred_clipping", "radius": 0.3},
    },
    "poisson": {
        "privacy": {"sigma": 0.01, "delta": 0.01, "clip": 0.5},
        "compression": {"name": "randk", "share": 0.3},
        "attack": {"name": "label_flip", "share": 0.3},
        "robust": {"name": "norm_bound"},
        "sampling.name": "poisson",
        "cohort": 3,
    },
    "local": {
        "privacy": {"sigma": 0.001, "delta": 0.01, "clip": 0.5, "local": True},
        "compression": {"name": "sign"},
        "attack": {"name": "alie", "share": 0.3},
        "robust": {"name": "krum", "byzantine": 1},
    },
}
COMMON = {
    "data": {"domains": ["plain", "font"], "per_domain": 60},
    "partition": {"name": "iid", "clients": 6},
    "model": {"name": "mlp", "hidden": [8], "batch_norm": True},
    "local": {"steps": 2, "batch_size": 4, "lr": 0.05},
    "rounds": 6,
}
BUFFERED = {
    "schedule": {"name": "buffered", "concurrency": 4, "buffer": 3},
    "clock": {"step_seconds": 1, "speed_spread": 1, "up_mbps": 0.1},
}
LATE = {"gathered": CHANNELS["gathered"] | BUFFERED}
LATE["local"] = {**CHANNELS["local"], **BUFFERED, "robust": {"name": "median"}}
LATE["bounded"] = {
    **CHANNELS["bounded"],
    **BUFFERED,
    "privacy": {"sigma": 0.01, "delta": 0.01, "clip": 0.5},
    "compression": {"name": "topk", "share": 0.2},
}


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    with sleeping_here(tmp_path_factory.mktemp("channel"), "sleeping_channel", seeds=[0]):
        start_ray()
        yield


def digest(given, experiment, **more):
    config = {**COMMON, "algorithm.name": "scaffold", **given, "experiment": experiment, **more}
    return rayfed.run(config, keep_state=False, quiet=True).weights_hash


@pytest.mark.parametrize("name", CHANNELS)
@pytest.mark.parametrize("numbers", [(0, 2), pytest.param((0, 1, 2, 4), marks=pytest.mark.slow)])
def test_any_number_of_hosts_gives_one_hash(name, numbers):
    hashes = {
        digest(CHANNELS[name], f"{name}-{hosts}-of-{numbers[-1]}", **{"placement.hosts": hosts}) for hosts in numbers
    }
    assert len(hashes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_asynchronous_rounds_give_one_hash(name):
    hashes = {digest(LATE[name], f"late-{name}-{hosts}", **{"placement.hosts": hosts}) for hosts in (0, 1, 2, 4)}
    assert len(hashes) == 1
    rounds = pd.read_parquet(f"results/late-{name}-0/rounds")
    assert rounds["staleness_max"].max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANNELS)
@pytest.mark.parametrize("hosts", [0, 2])
def test_a_run_that_resumes_gives_the_same_hash(name, hosts):
    expected = digest(CHANNELS[name], f"whole-{name}-{hosts}")
    values = {"placement.hosts": hosts, "checkpoint.every": 1}
    stopped = _interrupted_after(3, {**CHANNELS[name], **values}, f"half-{name}-{hosts}")
    assert stopped >= 3
    assert digest(CHANNELS[name], f"half-{name}-{hosts}", **values, resume=True) == expected


def _interrupted_after(rounds, given, experiment):
    """Interrupt a run after so many rounds, and return how many it had done."""

    def interrupt():
        wait_until(lambda: _done(experiment) >= rounds)
        os.kill(os.getpid(), signal.SIGINT)

    given = {**given, "algorithm.name": "sleeping_channel:Sleeping"}
    with meanwhile(interrupt), pytest.raises(KeyboardInterrupt):
        digest(given, experiment, rounds=500)
    return _done(experiment)


def _done(experiment):
    try:
        return int(pd.read_parquet(f"results/{experiment}/rounds")["round"].max())
    except (OSError, ValueError, KeyError):  # a folder without a file yet has no column
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bounded", "gathered"])
def test_a_killed_host_gives_the_same_hash(name):
    given = {**COMMON, **CHANNELS[name], "algorithm.name": "sleeping_channel:Sleeping", "rounds": 20}
    given["checkpoint.every"] = 5
    expected = rayfed.run({**given, "results": f"quiet-{name}"}, keep_state=False, quiet=True).weights_hash

    def kill():
        wait_until(lambda: max(last_rounds(f"killed-{name}"), default=-1) >= 7)
        wait_until(lambda: len(processes("RayHost")) == 2)
        os.kill(processes("RayHost")[0], signal.SIGKILL)

    values = [f"{key}={value}".replace("'", "").replace("True", "true") for key, value in given.items()]
    with meanwhile(kill):
        code, said = ran("run", values, f"results=killed-{name}", "placement.hosts=2")
    assert code == 0, said
    (row,) = pd.read_parquet(f"killed-{name}/run/trials").to_dict("records")
    assert (row["status"], row["weights_hash"]) == ("done", expected)
    assert "it starts again" in said
