"""Small tasks beside the configured one, on which `rayfed check` tries an algorithm."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.core.errors import UsageError
from rayfed.core.rng import global_state_kept
from rayfed.experiments.config import Config
from rayfed.experiments.plan import Given, Plan, make_plan
from rayfed.losses.base import Loss

TASKS = ("pixels", "next words", "two inputs", "half frozen")
"""Classes of the pixels of images, the next words of sentences, classes of an image and a table, and classes of images
by a model whose first layer is constant."""

_CLIENTS, _WORDS, _WIDTH = 3, 9, 8


def task_plan(config: Config, task: str) -> Plan:
    """Return a plan of the algorithm of `config` on one of `TASKS`.

    A method that refuses the plain model gets one with batch norm, and then one with LoRA.

    Raises:
        UsageError: The algorithm refuses the task; of the refusals, the one of the plain model.
    """
    chosen = dataclasses.replace(config.chosen_algorithm, options=dict(config.chosen_algorithm.options))
    chosen.options.pop("personal", None)  # names of weights of the user's model
    values = {"local.batch_size": 8, "seed": config.seed}
    config = dataclasses.replace(Config.read(values), chosen_algorithm=chosen)
    clients, refusals = [_client(task, seed) for seed in range(_CLIENTS)], []
    loss: Loss | None = F.cross_entropy if task == "pixels" else _of_words if task == "next words" else None
    with global_state_kept():
        for extra in ("", "batch norm", "lora"):
            try:
                return make_plan(config, Given(clients=clients, model=partial(_Model, task, extra), loss=loss))
            except UsageError as refused:
                refusals.append(refused)
    raise refusals[0]


def _client(task: str, seed: int) -> Mapping[str, Any]:
    def part(n: int) -> tuple[Any, np.ndarray]:
        image, words = rng.normal(size=(n, 1, 8, 8)).astype(np.float32), rng.integers(0, _WORDS, (n, 6))
        bright = (image > seed / 4).astype(np.int64)[:, 0]
        if task == "next words":
            return words[:, :-1], words[:, 1:]
        x = {"image": image, "table": image[:, 0, 0]} if task == "two inputs" else image
        return x, bright if task == "pixels" else bright[:, 0, 0]

    rng = np.random.default_rng(seed)
    return {"train": part(40), "val": part(12), "test": part(12)}


def _of_words(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of `outputs` [n, length, words] for the words `y` [n, length]."""
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten())


class _Model(nn.Module):
    """Encodes images [n, 1, 8, 8] with a table [n, 8] or without, or words [n, length], and ends in one layer."""

    def __init__(self, task: str, extra: str) -> None:
        super().__init__()
        self.pixels, self.words, width = task == "pixels", task == "next words", _WIDTH
        self.first = nn.Embedding(_WORDS, width) if self.words else nn.Conv2d(1, width, 3, padding=1)
        self.first.requires_grad_(task != "half frozen")
        self.second = nn.GRU(width, width, batch_first=True) if self.words else nn.Linear(width, width)
        self.third = _Lora() if extra == "lora" else nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if extra == "batch norm" else nn.Identity()
        self.last = nn.Conv2d(width, 2, 1) if self.pixels else nn.Linear(width, _WORDS if self.words else 2)

    def forward(self, image: Tensor, table: Tensor | None = None) -> Tensor:
        z = self.second(self.first(image))[0] if self.words else self.second(self.first(image).movedim(1, 3)).relu()
        z = z if self.pixels or self.words else z.mean((1, 2))
        z = self.third(z if table is None else z + table)
        z = self.norm(z.flatten(0, -2)).view_as(z).relu()
        logits: Tensor = self.last(z.movedim(3, 1) if self.pixels else z)
        return logits


class _Lora(nn.Module):
    """A constant linear layer with an adapter, in the form of peft's."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.scaling = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False), {"default": 2.0}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(_WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, _WIDTH, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))
        return outputs
