"""The page docs/algorithms.md, which `rayfed docs --generate algorithms` makes from the code."""

import dataclasses
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn

from rayfed.algorithm import Algorithm, Phase, State
from rayfed.algorithms import ALGORITHMS, FAMILIES
from rayfed.cli.help import default_text
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

This page is generated from the code by `make docs`; `rayfed list NAME` prints one of its sections. A section has

- the paper, the update rules, and how ambiguities were settled;
- the state: what each of two clients with a small batch-norm network receives in the second round (*down*) and has kept
  since the first (*kept*), by field, as a count of numbers; the fields of which the server needs only the mean
  (*averaged*); and the model that is scored unless `evaluate.points` says otherwise (*scored*). It names only what
  differs from `fedavg`: down weights (224903), averaged weights, kept nothing, scored global, one exchange per round;
- the keys of the method, such as `algorithm.mu`, with their default and, in brackets, the allowed values and, where
  they were looked up, the defaults of the authors' code and of PFLlib. The authors' values are the defaults unless a
  description says otherwise.
"""
_USUAL = {"down": "weights (224903)", "averaged": "weights", "kept": "nothing", "scored": "global"}


def algorithms_page() -> str:
    """Return the text of the page."""
    lists = (f"- [{family}](#{_anchor(family)}): {_links(names)}" for family, names in FAMILIES.items())
    parts = [_INTRODUCTION, "The methods by family:\n", *lists, ""]
    described: dict[str, str] = {}  # by module, the first of its methods
    for family, names in FAMILIES.items():
        parts += [f"## {family}", "", *(_section(name, described) for name in names)]
    return "\n".join([*parts, ""])


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _links(names: Iterable[str]) -> str:
    return ", ".join(f"[`{name}`](#{name})" for name in names)


def _section(name: str, described: dict[str, str]) -> str:
    kind = resolve(name, ALGORITHMS, where="algorithm.name")
    text = (sys.modules[kind.__module__].__doc__ or "").strip()  # prose, and equations indented by four spaces
    first = described.setdefault(kind.__module__, name)
    doc = kind.__doc__ or ""
    class_text = "" if doc.startswith(f"{kind.__name__}(") else inspect.cleandoc(doc)  # dataclass writes the signature
    parts = [f"### {name}", text if first == name else f"Described with [`{first}`](#{first}).", class_text]
    parts += [_state(kind()), _options(kind)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _state(algorithm: Algorithm) -> str:
    """Return in one line how state and exchanges differ from those of FedAvg."""
    down, kept = after_a_round(algorithm)
    facts = {
        "down": _fields(down),
        "averaged": ", ".join(algorithm.averaged) or "nothing",
        "kept": _fields(kept),
        "scored": algorithm.default_eval_point,
    }
    words = [f"{fact} {value}" for fact, value in facts.items() if value != _USUAL[fact]]
    exchanges = _exchanges(algorithm)
    words += [f"exchanges {exchanges}"] if exchanges != "1 per round" else []
    return f"*State:* {'; '.join(words)}." if words else ""


def _options(kind: Any) -> str:
    """Return a list of the hyperparameters; those that `kind` inherits from another method are described there."""
    lines = []
    inherited: dict[str, list[str]] = {}  # by method
    for field in dataclasses.fields(kind):
        method = _inherited_from(kind, field)
        if method is not None:
            inherited.setdefault(method, []).append(f"`{field.name}`")
        elif field.init:
            lines.append(_option(field))
    lines += [f"- {', '.join(names)}: as in [`{method}`](#{method})" for method, names in inherited.items()]
    return "\n".join(lines)


def _inherited_from(kind: Any, field: "dataclasses.Field[Any]") -> str | None:
    """Return the method among the bases of `kind` that declares the same option."""
    methods = {resolve(name, ALGORITHMS, where="algorithm.name"): name for name in ALGORITHMS}
    for base in [base for base in kind.__mro__[1:] if base in methods]:
        for other in dataclasses.fields(base):
            if _declaration(other) == _declaration(field):
                return methods[base]
    return None


def _declaration(field: "dataclasses.Field[Any]") -> tuple[Any, ...]:
    return field.name, default_text(field), field.metadata


def _option(field: "dataclasses.Field[Any]") -> str:
    details = [_allowed(field.metadata)] if _allowed(field.metadata) else []
    details += [
        f"{'the authors' if name == 'authors' else name}: {value}"
        for name, value in field.metadata.get("elsewhere", {}).items()
    ]
    brackets = f" ({'; '.join(details)})" if details else ""
    return f"- `{field.name}` = {default_text(field)}{brackets}: {field.metadata.get('help', '')}"


def _allowed(metadata: Mapping[str, Any]) -> str:
    """Return the allowed values of an option, such as "≥ 0, < 1"."""
    if "choices" in metadata:
        return ", ".join(map(str, metadata["choices"]))
    signs = {"low": "≥", "above": ">", "high": "≤", "below": "<"}
    return ", ".join(f"{sign} {metadata[bound]:g}" for bound, sign in signs.items() if bound in metadata)


def _exchanges(algorithm: Algorithm) -> str:
    exchanges = {
        "before round 1": algorithm.setup_exchanges,
        "per round": algorithm.round_exchanges,
        "after the last round": algorithm.final_exchanges,
    }
    return ", ".join(f"{len(group)} {when}" for when, group in exchanges.items() if group)


def after_a_round(algorithm: Algorithm) -> tuple[dict[str, int], dict[str, int]]:
    """Count the numbers that a client receives in the second round, and those that it has kept since the first.

    Both counts are by field of the state. The clients are two with a small batch-norm network.
    """
    with torch_state_kept():
        plan, population = _example(algorithm)
        fleet = LocalFleet(plan, population)
        server = Server(plan, population, fleet, Evaluation(every=plan.rounds))
        next(record for record in server.run() if record.stage == "round")
        ctx = server.ctx.at(Moment("round", 2), cohort=server.participants)
        down, unicast = downloads(server.algorithm.round_exchanges[0], ctx, server.state)
    first = ClientIndex(0)
    return _numbers(down | unicast.get(first, {})), _numbers(fleet.states[first])


def _numbers(state: State) -> dict[str, int]:
    counts = {key: sum(tensor.numel() for _, tensor in named_tensors(value)) for key, value in state.items()}
    return {key: count for key, count in counts.items() if count}


def _fields(numbers: dict[str, int]) -> str:
    return ", ".join(f"{key} ({count})" for key, count in numbers.items()) or "nothing"


def _example(algorithm: Any) -> tuple[Blueprint, Population]:
    if any(field.name == "server_steps" for field in dataclasses.fields(algorithm)):
        algorithm = dataclasses.replace(algorithm, server_steps=1)  # faster, and the sizes are the same
    part = Examples(np.zeros((12, 3, 28, 28), np.uint8), np.arange(12) % 4)
    clients = tuple(Client(i, "d", part, part, part) for i in range(2))
    population = Population("example", clients, 10, (3, 28, 28))
    plan = Blueprint(
        algorithm=algorithm,
        model=build_model("digits_cnn", {"width": 0.125}, (3, 28, 28), 10),
        loss=nn.functional.cross_entropy,
        batch_norm="aggregate",
        optimizer=SGD(lr=1e-4),  # only the sizes matter, and training must not diverge
        local=Phase("train", steps=2),
        batch_size=2,
        drop_last=True,
        rounds=2,
        cohort=2,
        seed=0,
    )
    return plan, population
