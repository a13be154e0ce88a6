"""The search spaces in `benchmarks/experiments/` can be read, and the network of one of them is LoRA."""

from pathlib import Path

import pytest
import torch
import yaml

from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.space import configurations, read_space

FOLDER = Path(__file__).parents[2] / "benchmarks" / "experiments"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_space_has_configurations(file):
    assert list(configurations(read_space(yaml.safe_load(file.read_text()))))


def test_only_adapters_and_the_last_layer_are_trained_and_sent(monkeypatch):
    monkeypatch.chdir(FOLDER)
    small = {"data.per_domain": 20, "data.domains": ["plain", "font"], "partition.clients": 4}
    space = yaml.safe_load((FOLDER / "privacy_lora.yaml").read_text())
    common = {key: value for key, value in space.items() if key not in ("seeds", "arms")}
    plan = make_plan(Config.read(common, small, {"privacy.sigma": 0}))
    task = plan.blueprint.context(plan.population, "cpu").task
    trained = {name: value.numel() for name, value in task.initial_weights().items() if name in task.trainable}
    assert sum(trained.values()) == 8 * (3 * 28 * 28 + 256) + 257 * 10
    module = plan.blueprint.model
    adapted = next(layer for layer in module.modules() if hasattr(layer, "lora_A"))
    x = torch.randn(2, 3 * 28 * 28)
    expected = x @ (adapted.base_layer.weight + adapted.lora_B.weight @ adapted.lora_A.weight).T
    torch.testing.assert_close(adapted(x), expected + adapted.base_layer.bias)
    assert adapted.lora_B.weight.abs().max() == 0
