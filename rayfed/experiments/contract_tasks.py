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
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan, make_plan
from rayfed.losses.base import Loss

TASKS = ("pixels", "next words", "two inputs", "half frozen")
"""Classes of the pixels of images, the next words of sentences, classes of an image and a table, and classes of images
by a model whose first layer is constant."""

_CLIENTS = 3
_WORDS = 9
_WIDTH = 8


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
    clients = [_client(task, seed) for seed in range(_CLIENTS)]
    refusals = []
    with global_state_kept():
        for extra in ("", "batch norm", "lora"):
            given = Given(clients=clients, model=partial(_Model, task, extra), loss=_loss(task))
            try:
                return make_plan(config, given)
            except UsageError as refused:
                refusals.append(refused)
    raise refusals[0]


def _loss(task: str) -> Loss | None:
    """Return the loss that is given with a task; None: the one that its labels need."""
    if task == "pixels":
        return F.cross_entropy
    if task == "next words":
        return _of_words
    return None


def _client(task: str, seed: int) -> Mapping[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "train": _examples(task, rng, 40, seed),
        "val": _examples(task, rng, 12, seed),
        "test": _examples(task, rng, 12, seed),
    }


def _examples(task: str, rng: np.random.Generator, n: int, seed: int) -> tuple[Any, np.ndarray]:
    """Return the inputs and labels of `n` examples; `seed` also shifts how bright an image of class 1 is."""
    image = rng.normal(size=(n, 1, 8, 8)).astype(np.float32)
    words = rng.integers(0, _WORDS, (n, 6))
    if task == "next words":
        return words[:, :-1], words[:, 1:]
    bright = (image > seed / 4).astype(np.int64)[:, 0]
    if task == "pixels":
        return image, bright
    if task == "two inputs":
        return {"image": image, "table": image[:, 0, 0]}, bright[:, 0, 0]
    return image, bright[:, 0, 0]


def _of_words(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of `outputs` [n, length, words] for the words `y` [n, length]."""
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten())


class _Model(nn.Module):
    """Encodes images [n, 1, 8, 8] with a table [n, 8] or without, or words [n, length], and ends in one layer."""

    def __init__(self, task: str, extra: str) -> None:
        super().__init__()
        self.pixels = task == "pixels"
        self.words = task == "next words"
        self.first: nn.Module
        self.second: nn.Module
        if self.words:
            self.first = nn.Embedding(_WORDS, _WIDTH)
            self.second = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        else:
            self.first = nn.Conv2d(1, _WIDTH, 3, padding=1)
            self.second = nn.Linear(_WIDTH, _WIDTH)
        self.first.requires_grad_(task != "half frozen")
        self.third = _third_layer(extra)
        self.norm = _norm_layer(extra)
        self.last = _last_layer(task)

    def forward(self, image: Tensor, table: Tensor | None = None) -> Tensor:
        z: Tensor = self.first(image)
        if self.words:
            z, _ = self.second(z)
        else:
            z = self.second(z.movedim(1, 3)).relu()
        if not self.pixels and not self.words:
            z = z.mean((1, 2))
        if table is not None:
            z = z + table
        z = self.third(z)
        normed = self.norm(z.flatten(0, -2))
        z = normed.view_as(z).relu()
        if self.pixels:
            z = z.movedim(3, 1)
        logits: Tensor = self.last(z)
        return logits


def _third_layer(extra: str) -> nn.Module:
    if extra == "lora":
        return _Lora()
    return nn.Linear(_WIDTH, _WIDTH)


def _norm_layer(extra: str) -> nn.Module:
    if extra == "batch norm":
        return nn.BatchNorm1d(_WIDTH)
    return nn.Identity()


def _last_layer(task: str) -> nn.Module:
    if task == "pixels":
        return nn.Conv2d(_WIDTH, 2, 1)
    if task == "next words":
        return nn.Linear(_WIDTH, _WORDS)
    return nn.Linear(_WIDTH, 2)


class _Lora(nn.Module):
    """A constant linear layer with an adapter, in the form of peft's."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
        self.scaling = {"default": 2.0}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(_WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, _WIDTH, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        low_rank = self.lora_A["default"](x)
        outputs: Tensor = self.base_layer(x) + 2 * self.lora_B["default"](low_rank)
        return outputs
