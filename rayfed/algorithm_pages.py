"""docs/algorithms.md, made from the code: `python -m rayfed.algorithm_pages > docs/algorithms.md`."""

import dataclasses
import sys
from typing import Any

import numpy as np
from torch import nn

from rayfed.algorithm import Algorithm, Context, Phase
from rayfed.algorithms import ALGORITHMS
from rayfed.data.population import Client, Examples, Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.resident import client_data
from rayfed.help import _default
from rayfed.models.build import build_model
from rayfed.optim import SGD
from rayfed.registry import resolve
from rayfed.tree import tensors

_INTRODUCTION = """\
# Algorithms

Made from the code by `python -m rayfed.algorithm_pages`; a test keeps it so. For each method: its text (paper, rules,
and how open questions were settled), what is sent and kept with a small batch-norm network, the model that is scored
where `evaluate.points` is not given, and its keys.
"""


def pages() -> str:
    """The whole document."""
    return "\n".join([_INTRODUCTION, *(_page(name) for name in ALGORITHMS)])


def _page(name: str) -> str:
    kind = resolve(name, ALGORITHMS, where="algorithm.name")
    algorithm = kind()
    text = (sys.modules[kind.__module__].__doc__ or "").strip()
    own = "" if (kind.__doc__ or "").startswith(f"{kind.__name__}(") else (kind.__doc__ or "").strip()
    facts = {
        "source": algorithm.source,
        "down": _fields(algorithm, "down"),
        "averaged": ", ".join(algorithm.averaged) or "nothing",
        "kept by the client": _fields(algorithm, "client"),
        "scored": algorithm.scored,
        "exchanges": _exchanges(algorithm),
    }
    lines = [f"## {name}", "", "```text", text, "```", ""]
    lines += [own, ""] if own else []
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    keys = [field for field in dataclasses.fields(algorithm) if field.init]
    if keys:
        lines += ["", "| key | default | meaning |", "|---|---|---|"]
        lines += [f"| `algorithm.{f.name}` | {_default(f)} | {f.metadata.get('help', '')} |" for f in keys]
    return "\n".join([*lines, ""])


def _exchanges(algorithm: Algorithm) -> str:
    parts = [(algorithm.setup_exchanges, "before round 1"), (algorithm.trips, "in a round")]
    parts.append((algorithm.final_exchanges, "after the last round"))
    return ", ".join(f"{count} {when}" for count, when in parts if count)


def _fields(algorithm: Algorithm, where: str) -> str:
    ctx, population = _example(algorithm)
    ctx = ctx.at(stage="round", round=1, cohort=(0, 1))
    if where == "down":
        state = algorithm.broadcast(ctx, algorithm.init(ctx))
    else:
        state = algorithm.join(ctx.at(client=0, examples=4, data=client_data(population, 0, ctx.task)))
    return ", ".join(f"{key} ({_count(value)})" for key, value in state.items() if _count(value)) or "nothing"


def _count(value: Any) -> int:
    return sum(tensor.numel() for _, tensor in tensors(value))


def _example(algorithm: Algorithm) -> tuple[Context, Population]:
    part = Examples(np.zeros((4, 3, 28, 28), np.uint8), np.arange(4))
    clients = tuple(Client(i, "d", part, part, part) for i in range(2))
    population = Population("example", clients, 10, (3, 28, 28))
    plan = Blueprint(
        algorithm=algorithm,
        model=build_model("digits_cnn", {"width": 0.125}, (3, 28, 28), 10),
        loss=nn.functional.cross_entropy,
        batch_norm="aggregate",
        optimizer=SGD(lr=0.1),
        local=Phase("train", epochs=1),
        batch_size=2,
        drop_last=True,
        rounds=1,
        cohort=2,
        seed=0,
    )
    return plan.context(population, "cpu"), population


if __name__ == "__main__":
    print(pages())
