"""Scores have the same bits on any number of hosts and for any number of clients that train at once."""

import numpy as np
import pytest

import rayfed
from helpers.ray_session import start_ray

pytestmark = pytest.mark.ray


def clients(count):
    """Return clients with 4 to 16 examples of each part, of which blocks have different numbers."""
    rng = np.random.default_rng(0)

    def part(size):
        y = rng.integers(0, 3, size)
        return (rng.normal(size=(size, 9)) + y[:, None]).astype(np.float32), y

    people = []
    for _ in range(count):
        people.append({name: part(int(rng.integers(4, 17))) for name in ("train", "val", "test")})
    return people


@pytest.mark.parametrize(
    "places",
    [
        ((0, 1), (2, 1), (0, 50), (2, 50)),
        pytest.param(
            ((0, 1), (1, 1), (2, 1), (4, 1), (0, 10), (2, 10), (0, 50), (4, 50)), marks=pytest.mark.slow, id="all"
        ),
    ],
)
def test_the_global_model_has_the_same_scores_everywhere(tmp_path, places):
    start_ray()
    people = clients(150)  # two blocks of 64 and one of 22
    common = {"model.name": "mlp", "rounds": 1, "cohort": 50, "local.steps": 2, "local.batch_size": 4}
    common |= {"local.drop_last": True, "evaluate.initial": True, "evaluate.points": ["global"]}
    after, before = {}, {}
    for hosts, width in places:
        options = common | {"placement.hosts": hosts, "placement.vmap_clients": width}
        result = rayfed.run(options, clients=people, results=str(tmp_path / f"{hosts}-{width}"), quiet=True)
        rows = result.metrics.query("point == 'global'").sort_values(["round", "client", "split", "metric"])
        assert len(rows) == 2 * 150 * 2 * 2
        before[hosts, width] = rows.query("round == 0")["value"].tolist()
        after[hosts, width] = rows.query("round == 1")["value"].tolist()
    for key, values in before.items():  # of the initial model, which is the same for any width
        assert values == before[0, 1], key
    for (hosts, width), values in after.items():
        assert values == after[0, width], (hosts, width)
