"""docs/algorithms.md, made from the code: `python -m rayfed.cli.algorithm_pages > docs/algorithms.md`."""

import dataclasses
import sys
from typing import Any

import numpy as np
from torch import nn

from rayfed.algorithm import Algorithm, Phase, State
from rayfed.algorithms import ALGORITHMS
from rayfed.cli.help import _default
from rayfed.core.ids import ClientIndex
from rayfed.core.moment import Moment
from rayfed.core.optim import SGD
from rayfed.core.registry import resolve
from rayfed.core.rng import torch_state_kept
from rayfed.core.trees import named_tensors
from rayfed.data.population import Client, Examples, Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.evaluation import Evaluation, downloads
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.server import Server
from rayfed.models.build import build_model

_INTRODUCTION = """\
# Algorithms

Made from the code by `python -m rayfed.cli.algorithm_pages`; a test keeps it so. For each method: its text (paper,
rules,
and how open questions were settled), what two clients with a small batch-norm network are sent in the second round and
have kept since the first (in numbers), the model that is scored where `evaluate.points` is not given, and its keys.
"""


def pages() -> str:
    """The whole document."""
    return "\n".join([_INTRODUCTION, *(_page(name) for name in ALGORITHMS)])


def _page(name: str) -> str:
    kind = resolve(name, ALGORITHMS, where="algorithm.name")
    algorithm = kind()
    text = (sys.modules[kind.__module__].__doc__ or "").strip()
    down, kept = after_a_round(algorithm)
    own = "" if (kind.__doc__ or "").startswith(f"{kind.__name__}(") else (kind.__doc__ or "").strip()
    facts = {
        "source": algorithm.reference,
        "down": _fields(down),
        "averaged": ", ".join(algorithm.averaged) or "nothing",
        "kept by the client": _fields(kept),
        "default_eval_point": algorithm.default_eval_point,
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
    parts = [(algorithm.setup_exchanges, "before round 1"), (algorithm.round_exchanges, "in a round")]
    parts.append((algorithm.final_exchanges, "after the last round"))
    return ", ".join(f"{len(exchanges)} {when}" for exchanges, when in parts if exchanges)


def after_a_round(algorithm: Algorithm) -> tuple[dict[str, int], dict[str, int]]:
    """Numbers by field of what a client is sent in the second round, and of what it has kept since the first."""
    with torch_state_kept():
        plan, population = _example(algorithm)
        fleet = LocalFleet(plan, population)
        server = Server(plan, population, fleet, Evaluation(every=plan.rounds))
        next(record for record in server.run() if record.stage == "round")
        ctx = server.ctx.at(Moment("round", 2), cohort=server.participants)
        down, unicast = downloads(server.algorithm.round_exchanges[0], ctx, server.state)
    first = ClientIndex(0)
    return _numbers(down | unicast.get(first, {})), _numbers(fleet.host.states[first])


def _numbers(state: State) -> dict[str, int]:
    counts = {key: sum(tensor.numel() for _, tensor in named_tensors(value)) for key, value in state.items()}
    return {key: count for key, count in counts.items() if count}


def _fields(numbers: dict[str, int]) -> str:
    return ", ".join(f"{key} ({count})" for key, count in numbers.items()) or "nothing"


def _example(algorithm: Any) -> tuple[Blueprint, Population]:
    if any(field.name == "server_steps" for field in dataclasses.fields(algorithm)):
        algorithm = dataclasses.replace(algorithm, server_steps=1)  # changes no size, and takes less time
    part = Examples(np.zeros((12, 3, 28, 28), np.uint8), np.arange(12) % 4)
    clients = tuple(Client(i, "d", part, part, part) for i in range(2))
    population = Population("example", clients, 10, (3, 28, 28))
    plan = Blueprint(
        algorithm=algorithm,
        model=build_model("digits_cnn", {"width": 0.125}, (3, 28, 28), 10),
        loss=nn.functional.cross_entropy,
        batch_norm="aggregate",
        optimizer=SGD(lr=1e-4),  # sizes are all that matters, and nothing may diverge
        local=Phase("train", steps=2),
        batch_size=2,
        drop_last=True,
        rounds=2,
        cohort=2,
        seed=0,
    )
    return plan, population


if __name__ == "__main__":
    print(pages())
