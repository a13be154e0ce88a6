"""What CUDA's own graphs do: order on its streams, shown by a stand-in, and captures of a large step on a GPU."""

import dataclasses

import numpy as np
import pytest
import torch

from helpers.algorithm_cases import everything
from helpers.cuda_streams import Streams
from helpers.federations import blueprint
from rayfed.algorithms.fedavg import FedAvg
from rayfed.data.population import Client, Examples, Population
from rayfed.engine import graphs
from rayfed.engine.graphs import REPLAYED, CudaCapture, NotCaptured
from rayfed.engine.host import LocalFleet
from rayfed.engine.purity import facts
from rayfed.engine.server import Evaluation, Server
from rayfed.models.base import build_model


@pytest.fixture
def streams(monkeypatch):
    """Replace `torch.cuda`, where captures use it."""
    streams = Streams()
    for name in ("CUDAGraph", "Stream", "current_stream", "graph", "graph_pool_handle", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
    for name in ("get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
    graphs._stream_of.cache_clear()
    yield streams
    graphs._stream_of.cache_clear()


@pytest.mark.parametrize(("raises_at", "error"), [(1, NotCaptured), (3, NotCaptured), (4, RuntimeError), (None, None)])
def test_what_comes_after_a_capture_waits_for_its_kernels_also_where_it_raised(streams, raises_at, error):
    """Otherwise memory that an error frees is used again while kernels still write to it."""
    outer, runs = streams.outer, []

    def run():
        runs.append(streams.current)
        streams.launch()
        if len(runs) == raises_at:
            raise RuntimeError("out of memory")

    capture = CudaCapture(torch.device("cpu"))
    if error is None:
        capture(run)
    else:
        with pytest.raises(error, match="out of memory"):
            capture(run)
    (side,) = {*runs}
    assert side is not outer
    assert side.waited == {outer: 0}
    assert outer.waited == {side: len(runs)}
    assert streams.current is outer
    assert streams.mode == 0


class EndsInItem(FedAvg):
    """FedAvg whose step reads a number at its end, when all of its kernels were launched."""

    def step(self, ctx, work, down, batch):
        work, metrics = super().step(ctx, work, down, batch)
        metrics["loss"].item()
        return work, metrics


def images(clients=2, examples=160):
    """Return a federation of noise [3, 32, 32] in ten classes."""
    rng = np.random.default_rng(0)

    def draw(n):
        return Examples(rng.normal(size=(n, 3, 32, 32)).astype(np.float32), rng.integers(0, 10, n))

    people = [Client(i, "noise", draw(examples), draw(0), draw(10)) for i in range(clients)]
    return Population("noise", tuple(people), 10, (3, 32, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", [FedAvg, EndsInItem])
def test_a_resnet_has_the_same_weights_with_and_without_graphs(algorithm):
    people, device = images(), torch.device("cuda")
    torch.manual_seed(0)
    model = build_model("resnet18", {}, (3, 32, 32), 10)
    plan = blueprint(algorithm(), people, model=model, rounds=2, deterministic=True)
    found = []
    for with_graphs in (False, True):
        changed = dataclasses.replace(plan, cuda_graphs=with_graphs)
        server = Server(changed, people, LocalFleet(changed, people, device), Evaluation(points=()), device)
        list(server.run())
        found.append(facts(everything(server)))
    assert found[0] == found[1]
    counts = server.fleet.host.graphs.counts
    assert (counts[REPLAYED] > 0) == (algorithm is FedAvg)
    assert any("cannot be captured" in reason for reason in counts) == (algorithm is EndsInItem)
