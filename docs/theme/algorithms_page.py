"""The page docs/algorithms.md, which `make docs` makes from the code by running this file."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import rayfed
from rayfed.algorithm import Algorithm, State
from rayfed.algorithms import ALGORITHMS, FAMILIES
from rayfed.algorithms.fedavg import FedAvg
from rayfed.cli.help import default_text
from rayfed.core.errors import UsageError
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.registry import resolve
from rayfed.core.rng import global_state_kept
from rayfed.core.trees import named_tensors
from rayfed.engine.evaluation import Evaluation, downloads
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.experiments.checks.channel import channel_obstacles
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import CHANNEL_PARTS, Config
from rayfed.experiments.contract_tasks import TASKS, task_plan
from rayfed.experiments.plan import make_plan

_INTRODUCTION = """\
# Algorithms

`make docs` generates this page from the code. The table has the tasks on which `rayfed check` tries methods: classes of
pixels, next words, two inputs, and a half frozen model. Each method has its paper and update rules, followed by

- *State*, where it differs from FedAvg (down weights (224903), averaged weights, kept nothing, scored global, one
  exchange). With two clients and a small network it counts, by field, the numbers that a client receives in
  round 2 (*down*) and keeps from round 1 (*kept*). *Averaged* are fields of which the server needs only the mean,
  *scored* the model scored by default;
- its keys (`algorithm.mu`, for example) with defaults and, in brackets, choices and, where looked up, the defaults of
  the authors' code and of PFLlib. FedAvg's `weighting` is listed only where its default differs.

`rayfed list NAME` also prints how ambiguities were settled and how others' code differs.
"""
_CHANNEL = """\
Which methods take [privacy, compression, attacks and robust rules](privacy-and-attacks.md) follows from what their
clients send. `=` says that privacy needs `weighting=equal`, because ε does not cover numbers of examples. Attacks by
false data, `label_flip` and `backdoor` with its default factor, go with every method that sends anything.
"""
_USUAL = {"down": "weights (224903)", "averaged": "weights", "kept": "nothing", "scored": "global"}
_EXAMPLE = {
    "data": {"domains": ["plain", "font"], "per_domain": 20},
    "model": {"name": "digits_cnn", "width": 0.125},
    "local": {"steps": 2, "batch_size": 2, "lr": 1e-4},  # only the sizes matter, and training must not diverge
    "rounds": 2,
}


def algorithms_page() -> str:
    """Return the text of the page."""
    lists = [
        f"- [{family}](#{family.lower().replace(' ', '-')}): {', '.join(f'[`{name}`](#{name})' for name in names)}"
        for family, names in FAMILIES.items()
    ]
    described: dict[Any, Any] = {}  # with which method a module, or an option with its default, has been described
    parts = [_INTRODUCTION, *lists, "", *_table(), "", _CHANNEL, *_channel_table(), ""]
    for family, names in FAMILIES.items():
        parts += [f"## {family}", "", *(_section(name, described) for name in names)]
    return "\n".join(parts)


def _table() -> list[str]:
    """Return a table of what methods take: a line for each kind of methods, the largest one last, without names."""
    columns = "methods", "need a split", *TASKS
    groups: dict[tuple[bool, ...], list[str]] = {}
    for name in ALGORITHMS:
        config = Config.read({"algorithm.name": name})
        takes = (_is_taken(config, task) for task in TASKS)
        groups.setdefault((config.algorithm.traits.needs_split, *takes), []).append(f"`{name}`")
    *few, largest = sorted(groups, key=lambda kind: len(groups[kind]))
    rows = [(", ".join(groups[kind]), kind) for kind in few] + [("all others", largest)]
    lines = [columns, ["---"] * len(columns), *((names, *(("", "✓")[mark] for mark in kind)) for names, kind in rows)]
    return [f"|{'|'.join(line)}|" for line in lines]


def _channel_table() -> list[str]:
    """Return a table of the parts of a channel that methods take, with the reasons why others do not."""
    columns = "methods", *CHANNEL_PARTS, "why not"
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in ALGORITHMS:
        marks, reasons = _channel_of(name)
        groups.setdefault((*marks, "; ".join(dict.fromkeys(reasons))), []).append(f"`{name}`")
    rows = [(", ".join(names), *kind) for kind, names in groups.items()]
    return [f"|{'|'.join(line)}|" for line in (columns, ["---"] * len(columns), *rows)]


def _channel_of(name: str) -> tuple[list[str], list[str]]:
    """Return a mark for each part that a method takes, and why it does not take the others."""
    marks, reasons = [], []
    equal = {"algorithm.base.weighting": "equal"} if name == "mixup" else {"algorithm.weighting": "equal"}
    obstacles = _obstacles(name, {})
    is_weighed = obstacles["privacy"].endswith("weighting=equal")
    if is_weighed:
        obstacles["privacy"] = _obstacles(name, equal)["privacy"]
    for part in CHANNEL_PARTS:
        yes = "=" if is_weighed and part == "privacy" else "✓"
        marks.append("" if obstacles[part] else yes)
        reasons += [obstacles[part].partition(", which")[0]] if obstacles[part] else []
    return marks, reasons


def _obstacles(name: str, keys: dict[str, Any]) -> dict[str, str]:
    plan = task_plan(Config.read({"algorithm.name": name, **keys}), TASKS[-1])
    return channel_obstacles(Trial(plan.blueprint, plan.population), plan.blueprint.algorithm)


def _is_taken(config: Config, task: str) -> bool:
    try:
        task_plan(config, task)
    except UsageError:
        return False
    return True


def _section(name: str, described: dict[Any, Any]) -> str:
    kind = resolve(name, ALGORITHMS, where="algorithm.name")
    module = inspect.getmodule(kind)
    first = described.setdefault(module, name)
    path = Path(inspect.getfile(kind)).relative_to(Path(rayfed.__file__).parents[1]).as_posix()
    rules = [_rules(inspect.getdoc(module) or "")] if first == name else []
    source = f"[Source](../{path})." if first == name else f"Described with [`{first}`](#{first})."
    parts = [f"### {name}", *rules, f"{source} {_state(kind())}".strip(), *_options(name, kind, described)]
    return "\n\n".join(parts) + "\n"


def _rules(text: str) -> str:
    """Return the beginning of a module's text until its last equations, which are indented by four spaces."""
    paragraphs = re.split(r"\n\s*\n", text)
    last = max(i for i, paragraph in enumerate(paragraphs) if paragraph.startswith("    "))
    return "\n\n".join(paragraphs[: last + 1])


def _state(algorithm: Algorithm) -> str:
    """Return in one line how state and exchanges differ from those of FedAvg."""
    down, kept = after_a_round(algorithm)
    facts = {
        "down": _fields(down),
        "averaged": ", ".join(algorithm.averaged) or "nothing",
        "kept": _fields(kept),
        "scored": algorithm.traits.default_eval_point,
    }
    words = [f"{fact} {value}" for fact, value in facts.items() if value != _USUAL[fact]]
    exchanges = _exchanges(algorithm)
    words += [f"exchanges {exchanges}"] if exchanges != "1 per round" else []
    return f"*State:* {'; '.join(words)}." if words else ""


def _options(name: str, kind: Any, described: dict[Any, Any]) -> list[str]:
    """Return a list of the keys, and a sentence on those that an earlier method on the page has, too."""
    items: list[str] = []
    shared: dict[str, list[str]] = {}  # by method
    for field in _keys(kind):
        default, text = default_text(field), field.metadata.get("help", "")
        declaration = (field.name, text, str(field.metadata.get("elsewhere")))
        first, usual = described.setdefault(declaration, (name, default))
        if first == name:
            items.append(f"- `{field.name}={default}`{_alternatives(field)}: {text}")
        else:
            shared.setdefault(first, []).append(f"`{field.name}`" if default == usual else f"`{field.name}={default}`")
    also = []
    for method, keys in shared.items():
        if 3 < len(keys) == len(_keys(resolve(method, ALGORITHMS, where="algorithm.name"))):
            changed = [key for key in keys if "=" in key]
            also.append(f"all keys of [`{method}`](#{method}){', with ' * bool(changed)}{', '.join(changed)}")
        else:
            also.append(f"{', '.join(keys)}: as in [`{method}`](#{method})")
    return ["\n".join(items)] * bool(items) + [f"{'Also ' if items else ''}{'; '.join(also)}."] * bool(also)


def _keys(kind: Any) -> "list[dataclasses.Field[Any]]":
    inherited = () if kind is FedAvg else dataclasses.fields(FedAvg)
    return [
        field for field in dataclasses.fields(kind) if field.init and not any(field is other for other in inherited)
    ]


def _alternatives(field: "dataclasses.Field[Any]") -> str:
    """Return the choices of an option and other people's defaults, in brackets; an empty text without any."""
    details = [", ".join(map(str, field.metadata["choices"]))] if "choices" in field.metadata else []
    details += [f"{name}: {value}" for name, value in field.metadata.get("elsewhere", {}).items()]
    return f" ({'; '.join(details)})" if details else ""


def _exchanges(algorithm: Algorithm) -> str:
    exchanges = {
        "before round 1": algorithm.setup_exchanges,
        "per round": algorithm.round_exchanges,
        "after the last round": algorithm.final_exchanges,
    }
    return ", ".join(f"{len(group)} {when}" for when, group in exchanges.items() if group)


def after_a_round(algorithm: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Count the numbers that a client receives in the second round, and those that it has kept since the first.

    Both counts are by field of the state. The clients are two with a small batch-norm network.
    """
    if hasattr(algorithm, "server_steps"):
        algorithm = dataclasses.replace(algorithm, server_steps=1)  # faster, and the sizes are the same
    with global_state_kept():
        example = make_plan(Config.read(_EXAMPLE))
        plan = dataclasses.replace(example.blueprint, algorithm=algorithm)
        fleet = LocalFleet(plan, example.population)
        server = Server(plan, example.population, fleet, Evaluation(every=plan.rounds))
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


if __name__ == "__main__":
    (Path(__file__).parents[1] / "algorithms.md").write_text(algorithms_page(), encoding="utf-8")
