"""The seed of a partition: it follows that of the run where the partition draws who holds what."""

import sys

import numpy as np
import pytest

import rayfed
from rayfed.data.loading import load
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan

DATA = {"domains": ["plain", "font"], "per_domain": 60}


@pytest.mark.parametrize(
    ("name", "options", "follows"),
    [
        ("iid", {"clients": 3}, True),
        ("dirichlet", {"clients": 3}, True),
        ("classes", {}, True),
        ("domain_mixes", {"clients_per_domain": 2}, True),
        ("domains", {}, False),
        (None, {}, False),
    ],
)
def test_follows_the_run_unless_the_data_say_who_holds_what(name, options, follows):
    hashes = [load("mini_digits", DATA, name, options, seed=seed).partition_hash for seed in (0, 1)]
    pinned = [load("mini_digits", DATA, name, options | {"seed": seed}, seed=5).partition_hash for seed in (0, 1)]
    assert hashes == (pinned if follows else [pinned[0], pinned[0]])
    assert pinned[0] != pinned[1]


def test_the_seed_that_was_used_is_recorded(here):
    common = {"data": DATA, "model.name": "mlp", "rounds": 1, "local.batch_size": 4}
    iid = {"partition": {"name": "iid", "clients": 2}}
    rows = [
        rayfed.run({**common, **more, "seed": 2}, keep_state=False).trials.iloc[0]
        for more in (iid, {"partition": {"name": "iid", "clients": 2, "seed": 4}}, {})
    ]
    assert [row["partition_seed"] for row in rows] == [2, 4, 0]
    assert rows[0]["partition_hash"] == load("mini_digits", DATA, "iid", {"clients": 2, "seed": 2}).partition_hash
    x = np.zeros((4, 3), np.float32), np.zeros(4, int)
    own = rayfed.run({"model.name": "mlp", "rounds": 1, "local.batch_size": 2}, clients=[{"train": x, "test": x}])
    assert own.trials["partition_seed"].isna().all()


def test_the_server_needs_no_source_of_a_partition_of_ones_own(tmp_path, monkeypatch):
    """It may run on another machine than the command, and names the partition in its first row."""
    (tmp_path / "own_partition.py").write_text("from rayfed.data.partitions.pooled import Iid as Own\n")
    values = {"data": DATA, "partition": {"name": "own_partition:Own", "clients": 2}, "seed": 3}
    with monkeypatch.context() as here:
        here.syspath_prepend(str(tmp_path))
        plan = make_plan(Config.read(values))
    del sys.modules["own_partition"]
    assert plan.values()["partition_seed"] == 3
