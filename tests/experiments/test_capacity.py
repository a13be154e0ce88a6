"""Whether a trial can be placed: pure arithmetic, before Ray starts."""

import re

import pytest

from rayfed.core.errors import UsageError
from rayfed.experiments.capacity import bundles, check_fits, check_run, check_sweep
from rayfed.experiments.config import Config, Placement


def fits(nodes, **placement):
    try:
        check_fits(Placement(**placement), nodes)
    except UsageError:
        return False
    return True


def node(cpus, gpus=0):
    return {"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)}


def refusal(nodes, **placement):
    with pytest.raises(UsageError) as caught:
        check_fits(Placement(**placement), nodes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestShares:
    @pytest.mark.parametrize("share", [1, 2, 8, 0.5, 0.25, 0.2, 0.1, 1 / 3, 0.333, 0.33, 0.1667, 0])
    def test_whole_numbers_and_one_kth_are_shares(self, share):
        assert Config.read({"placement": {"gpus": share, "server_gpus": share}}).placement.gpus == share

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


class TestBundles:
    def test_one_process_needs_one_bundle(self):
        assert bundles(Placement(hosts=0, cpus=2)) == [{"CPU": 2}]
        assert bundles(Placement(hosts=0, gpus=1, server_gpus=0.5)) == [{"CPU": 1, "GPU": 1}]

    def test_an_empty_server_bundle_comes_first_all_the_same(self):
        assert bundles(Placement(hosts=2, cpus=0.5)) == [{}, {"CPU": 0.5}, {"CPU": 0.5}]

    def test_server_and_hosts(self):
        place = Placement(hosts=2, cpus=1, gpus=0.25, server_cpus=0.5, server_gpus=0.25)
        assert bundles(place) == [{"CPU": 0.5, "GPU": 0.25}, *[{"CPU": 1, "GPU": 0.25}] * 2]

    def test_a_host_may_need_a_gpu_alone(self):
        assert bundles(Placement(hosts=1, cpus=0, gpus=1)) == [{}, {"GPU": 1}]


class TestFitting:
    def test_twelve_halves_of_eight_gpus(self):
        assert fits([node(96, 8)], hosts=12, gpus=0.5)
        assert fits([node(96, 6)], hosts=12, gpus=0.5)
        assert not fits([node(96, 5)], hosts=12, gpus=0.5)

    def test_a_share_lies_on_one_gpu(self):
        # 3 · 0.34 = 1.02; and two GPUs of which a third each is taken have no room for a whole
        assert fits([node(8, 1)], hosts=3, gpus=1 / 3)
        assert fits([node(8, 1)], hosts=3, gpus=0.33)
        assert not fits([node(8, 1)], hosts=4, gpus=1 / 3)
        assert fits([node(8, 2)], hosts=6, gpus=1 / 3)
        assert fits([node(8, 2)], hosts=1, gpus=1, server_gpus=1 / 3)
        assert not fits([node(8, 2)], hosts=2, gpus=1, server_gpus=1 / 3)

    def test_ten_tenths_are_one(self):
        assert fits([node(10, 1)], hosts=10, gpus=0.1)

    def test_the_server_takes_its_share_of_the_same_gpu(self):
        assert fits([node(4, 1)], hosts=3, gpus=0.25, server_gpus=0.25)
        assert not fits([node(4, 1)], hosts=4, gpus=0.25, server_gpus=0.25)

    def test_a_bundle_lies_on_one_node(self):
        assert fits([node(2), node(2)], hosts=4)
        assert not fits([node(2), node(2)], hosts=1, cpus=3)
        assert not fits([node(8, 1), node(8, 1)], hosts=1, gpus=2)
        assert fits([node(8), node(1, 1)], hosts=1, cpus=1, gpus=1, server_cpus=8)

    def test_a_node_needs_both_at_once(self):
        assert not fits([node(1, 4), node(16)], hosts=4, cpus=1, gpus=1)

    def test_shares_of_cpus(self):
        assert fits([node(2)], hosts=8, cpus=0.25)
        assert not fits([node(2)], hosts=8, cpus=0.25, server_cpus=0.25)
        assert fits([node(1)], hosts=10, cpus=0.1)

    def test_nothing_reserved_fits_anywhere(self):
        assert fits([node(1)], hosts=50, cpus=0)

    def test_one_process(self):
        assert fits([node(1)], hosts=0)
        assert not fits([node(1)], hosts=0, cpus=2)
        assert not fits([node(1)], hosts=0, gpus=1)

    def test_with_autoscaling_more_nodes_may_come(self):
        assert fits([node(1)], hosts=50, gpus=1, autoscale=True)

    def test_no_node_at_all(self):
        assert not fits([], hosts=1)

    def test_what_is_reserved_elsewhere_does_not_matter(self):
        nodes = [node(4, 1)]
        check_fits(Placement(hosts=4, gpus=0.25), nodes)
        assert nodes == [node(4, 1)]  # the arithmetic leaves its argument alone
        check_fits(Placement(hosts=4, gpus=0.25), nodes)


class TestMessage:
    def test_has_the_numbers(self):
        text = refusal([node(2)], hosts=12, cpus=1, gpus=0.5, server_cpus=2)
        assert text.startswith("placement.hosts=12: 12 hosts of 1 CPU and 0.5 GPU and a server of 2 CPU and 0 GPU")
        assert "14 CPU and 6 GPU in all" in text
        assert "1 node with 2 CPU and 0 GPU" in text
        assert {"placement.cpus", "placement.gpus", "placement.autoscale=true"} <= set(
            re.findall(r"placement[.\w=]+", text)
        )

    def test_without_a_server_of_its_own(self):
        text = refusal([node(2), node(4)], hosts=12)
        assert "server" not in text
        assert "are 2 nodes with 2 CPU and 0 GPU; 4 CPU and 0 GPU" in text

    def test_of_one_process(self):
        text = refusal([node(2)], gpus=1)
        assert text.startswith("placement.gpus=1: the process needs 1 CPU and 1 GPU")
        assert "fewer hosts" not in text


def test_auto_is_for_single_runs():
    check_run(Placement(hosts="auto"))
    with pytest.raises(UsageError, match=r"^placement.hosts=auto: is for single runs; in a sweep, give each trial"):
        check_sweep([Placement(hosts=1), Placement(hosts="auto")])
