"""A run on a GPU that fails, or with steps that a CUDA graph repeats wrongly, ends with one line and can go on."""

import pytest
import torch

import rayfed
from helpers import taped_graphs
from helpers.commands import TWO_CLIENTS, command
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.trees import tree_map
from rayfed.engine import device, graphs
from rayfed.engine.graphs import StepGraphs
from rayfed.engine.host import Host, LocalFleet

LOST = """CUDA error: device lost
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1"""
run = command("run")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_gpu_that_is_lost_ends_a_run_with_one_line_and_the_same_command_goes_on(here, monkeypatch, capsys):
    exchange = LocalFleet.exchange

    def lost(self, request, down, unicast):
        if request.moment.round == 3:
            raise RuntimeError(LOST)
        return exchange(self, request, down, unicast)

    values = {**TWO_CLIENTS, "rounds": 4, "checkpoint.every": 1, "results": "results"}
    expected = rayfed.run(values, experiment="whole").weights_hash
    with monkeypatch.context() as context:
        context.setattr(LocalFleet, "exchange", lost)
        with pytest.raises(RuntimeError, match="device lost"):
            rayfed.run(values)
        arguments = [f"{key}={value}" for key, value in flat(values)]
        assert run([*arguments, "experiment=lost"]) == 1
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if "CUDA" in line]
    assert line.startswith("rayfed: RuntimeError: CUDA error: device lost; the GPU fails in this process from now on")
    assert "and the same command with resume=true continues (" in line
    assert run([*arguments, "experiment=lost", "resume=true"]) == 0
    assert capsys.readouterr().out.endswith(f"weights {expected}\n")


def flat(values, above=""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def test_memory_of_a_gpu_that_fails_is_left_alone(monkeypatch):
    def fail():
        raise RuntimeError(LOST)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    device.release_memory()


FACTOR = 1.0


class Scaled(FedAvg):
    """Multiplies gradients by a global variable, which changes in the third round."""

    def broadcast(self, ctx, server):
        global FACTOR
        if ctx.round == 3:
            FACTOR = 1.5
        return super().broadcast(ctx, server)

    def correct(self, ctx, grads, work, down):
        return tree_map(lambda g: g * FACTOR, grads)


def test_a_step_that_a_graph_repeats_wrongly_ends_a_run_with_one_line(here, monkeypatch, capsys):
    monkeypatch.setattr(graphs, "ENOUGH_STEPS", 2)
    monkeypatch.setattr(graphs, "CHECK_AFTER", 20)
    made = Host.__init__

    def with_graphs(self, *given, **more):
        made(self, *given, **more)
        self.graphs = StepGraphs(taped_graphs.capture)

    monkeypatch.setattr(Host, "__init__", with_graphs)
    values = {**TWO_CLIENTS, "rounds": 9, "local.epochs": 2, "results": "results"}
    arguments = [f"{key}={value}" for key, value in flat(values)]
    assert run([*arguments, f"algorithm.name={__name__}:Scaled"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "graph" in line]
    assert line.startswith(
        "rayfed: ImpureHook: Scaled.step: gives other numbers than its CUDA graph, which has repeated"
    )
    assert "set placement.cuda_graphs=false" in line
