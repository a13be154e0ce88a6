"""Whether a trial can be placed: pure arithmetic, before Ray starts."""

import math

import pytest

from rayfed.core.errors import UsageError
from rayfed.experiments.capacity import bundles, check_fits, check_sweep, memory_share, most_on_node, reserved
from rayfed.experiments.config import Config, Placement


def node(cpus, gpus=0):
    return {"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)}


def refusal(nodes, **placement):
    with pytest.raises(UsageError) as caught:
        check_fits(Placement(**placement), nodes)
    return str(caught.value)


class TestShares:
    @pytest.mark.parametrize("key", ["gpus", "server_gpus"])
    @pytest.mark.parametrize(
        ("share", "better"), [(0.6, "1/2 = 0.5"), (0.4, "1/2 = 0.5"), (0.9, "1/1 = 1"), (1.5, "2")]
    )
    def test_others_are_refused_with_the_nearest(self, key, share, better):
        with pytest.raises(UsageError) as caught:
            Config.read({"placement": {"hosts": 12, key: share}})
        assert str(caught.value) == (
            f"placement.{key}={share:g}: must be an integer or 1/k for an integer k, such as {better}"
        )


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"hosts": 0, "cpus": 2}, [{"CPU": 2}]),
        ({"hosts": 0, "gpus": 1, "server_gpus": 0.5}, [{"CPU": 1, "GPU": 1}]),
        ({"hosts": 2, "cpus": 0.5}, [{}, {"CPU": 0.5}, {"CPU": 0.5}]),  # that of the server comes first, though empty
        (
            {"hosts": 2, "cpus": 1, "gpus": 0.25, "server_cpus": 0.5, "server_gpus": 0.25},
            [{"CPU": 0.5, "GPU": 0.25}, *[{"CPU": 1, "GPU": 0.25}] * 2],
        ),
        ({"hosts": 1, "cpus": 0, "gpus": 1}, [{}, {"GPU": 1}]),
    ],
)
def test_bundles(placement, expected):
    assert bundles(Placement(**placement)) == expected


class TestFitting:
    @pytest.mark.parametrize(
        ("nodes", "placement"),
        [
            ([node(96, 6)], {"hosts": 12, "gpus": 0.5}),
            ([node(8, 1)], {"hosts": 3, "gpus": 0.33}),
            ([node(8, 2)], {"hosts": 1, "gpus": 1, "server_gpus": 1 / 3}),
            ([node(4, 1)], {"hosts": 3, "gpus": 0.25, "server_gpus": 0.25}),
            ([node(2), node(2)], {"hosts": 4}),
            ([node(8), node(1, 1)], {"hosts": 1, "cpus": 1, "gpus": 1, "server_cpus": 8}),
            ([node(1)], {"hosts": 10, "cpus": 0.1}),
            ([node(1)], {"hosts": 50, "cpus": 0}),
            ([node(1)], {"hosts": 50, "gpus": 1, "autoscale": True}),
        ],
    )
    def test_there_is_room(self, nodes, placement):
        check_fits(Placement(**placement), nodes)

    @pytest.mark.parametrize(
        ("nodes", "placement"),
        [
            ([node(96, 5)], {"hosts": 12, "gpus": 0.5}),
            ([node(8, 2)], {"hosts": 2, "gpus": 1, "server_gpus": 1 / 3}),  # a share lies on one GPU
            ([node(2), node(2)], {"hosts": 1, "cpus": 3}),  # a bundle lies on one node
            ([node(8, 1), node(8, 1)], {"hosts": 1, "gpus": 2}),
            ([node(1, 4), node(16)], {"hosts": 4, "cpus": 1, "gpus": 1}),  # which has both
            ([node(2)], {"hosts": 8, "cpus": 0.25, "server_cpus": 0.25}),
            ([node(1)], {"hosts": 0, "cpus": 2}),
            ([], {"hosts": 1}),
        ],
    )
    def test_there_is_none(self, nodes, placement):
        refusal(nodes, **placement)


@pytest.mark.parametrize(
    ("bundle", "node", "most"),
    [
        ({"CPU": 1.0}, {"CPU": 8.0}, 8),
        ({"CPU": 3.0}, {"CPU": 8.0}, 2),
        ({"CPU": 0.1}, {"CPU": 1.0}, 10),
        ({"CPU": 1.0, "GPU": 0.25}, {"CPU": 16.0, "GPU": 2.0}, 8),
        ({"CPU": 1.0, "GPU": 0.3333}, {"CPU": 16.0, "GPU": 2.0}, 6),
        ({"CPU": 1.0, "GPU": 2.0}, {"CPU": 16.0, "GPU": 5.0}, 2),
        ({"CPU": 4.0, "GPU": 0.25}, {"CPU": 16.0, "GPU": 2.0}, 4),
        ({"GPU": 1.0}, {"CPU": 16.0}, 0),
        ({}, {"CPU": 16.0}, math.inf),
    ],
)
def test_how_many_fit_on_a_node_and_share_its_memory(bundle, node, most):
    assert most_on_node(bundle, node) == most
    assert memory_share(bundle, node, 1) == 1.0
    assert memory_share(bundle, node, 100) == 1 / min(100, max(1, most))


def test_a_refusal_has_the_numbers():
    text = refusal([node(2)], hosts=12, cpus=1, gpus=0.5, server_cpus=2)
    assert text.startswith(
        "placement.hosts=12: a trial needs 14 CPU and 6 GPU, of which 1 CPU and 0.5 GPU on one node, but there is 1 "
        "node with 2 CPU and 0 GPU; use fewer hosts"
    )


class TestReserved:
    def test_a_server_that_trains_shares_the_first_hosts_gpu(self):
        tree = {"algorithm": {"name": "adcol"}, "placement": {"hosts": 2, "gpus": 1}}
        config = Config.read(tree)
        assert reserved(config) == [{"GPU": 0.25}, {"CPU": 1, "GPU": 0.75}, {"CPU": 1, "GPU": 1}]
        for other in ({"server_gpus": 0}, {"gpus": 0}, {"hosts": 0}):
            config = Config.read({**tree, "placement": {"hosts": 2, "gpus": 1} | other})
            assert reserved(config) == bundles(config.placement)
        assert reserved(Config.read(tree | {"algorithm": {"name": "fedavg"}})) == bundles(Placement(hosts=2, gpus=1))


def test_a_host_reserves_something():
    with pytest.raises(UsageError, match=r"^placement\.cpus=0: a process that trains reserves something"):
        check_sweep([Placement(hosts=2, cpus=0, server_cpus=0.5)])


def test_rays_client_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(UsageError, match=r"^RAY_ADDRESS=ray://head:10001: .* ray job submit --address"):
        check_sweep([Placement(hosts=1)])
