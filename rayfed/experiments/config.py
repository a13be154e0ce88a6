"""The configuration: one validated tree, the same names in YAML files, on the command line and in Python.

`Config.read` takes a nested mapping, dotted keys, or both, and refuses what is unknown, of a wrong type or out of range
with one line. What depends on the data (a batch larger than a client) is checked by `rayfed.experiments.plan`.
"""

import dataclasses
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayfed.algorithm import Algorithm
from rayfed.algorithms import ALGORITHMS
from rayfed.core.errors import UsageError
from rayfed.core.options import build, check_renamed, checked, option, suggestion
from rayfed.core.registry import resolve
from rayfed.core.task import BATCH_NORM_POLICIES
from rayfed.experiments.sources import merged
from rayfed.metrics.base import Metric, build_metrics
from rayfed.results.files import check_name

POINTS = ("global", "downloaded", "trained", "adapted")


@dataclass(frozen=True, kw_only=True)
class Local:
    """local.*: how a client trains."""

    epochs: int | None = option(None, low=1, help="local epochs in a round; 1 where local.steps is not given either")
    steps: int | None = option(None, low=1, help="local steps in a round, in place of epochs")
    batch_size: int = option(10, low=1, help="examples in a batch")
    drop_last: bool = option(True, help="leave out the examples that do not fill a batch, anew in every epoch")
    optimizer: str = option("sgd", choices=("sgd", "adam"), help="local optimiser, fresh in every round")
    lr: float = option(0.01, above=0, help="learning rate")
    momentum: float = option(0.0, low=0, below=1, help="SGD's momentum")
    nesterov: bool = option(False, help="Nesterov's form of momentum")
    weight_decay: float = option(0.0, low=0, help="L2 penalty, added to the gradient")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """evaluate.*: when and what to score."""

    every: int = option(1, low=1, help="score after every so many rounds; always after the last")
    initial: bool = option(False, help="score before the first round, too")
    points: list[str] | None = option(
        None, choices=POINTS, help="models to score; by default the one that the algorithm's paper scores"
    )
    splits: list[str] = option(["val", "test"], choices=("train", "val", "test"), help="parts of the clients' data")
    clients: str = option(
        "all", choices=("all", "selected"), help="whose models and data: all participants', or those of the round only"
    )
    adapt_epochs: int = option(1, low=1, help="local epochs before scoring at the point `adapted`")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """placement.*: where clients run. It never changes what is computed, except for width (see there)."""

    hosts: int = option(0, low=0, help="0: in this process, without Ray; k: k Ray actors among which clients are dealt")
    vmap_clients: int = option(
        1,
        low=1,
        help="clients that a host trains at once by torch.vmap: for GPUs, on a CPU it gains nothing; other last bits",
        formerly=["width"],
    )
    cpus: float = option(1.0, low=0, help="CPUs that a host reserves")
    gpus: float = option(0.0, low=0, help="GPUs that a host reserves: a whole number, or 1/k for a whole k")
    server_cpus: float = option(0.0, low=0, help="CPUs that the server reserves; it works while the hosts wait")
    server_gpus: float = option(0.0, low=0, help="GPUs that the server reserves: a whole number, or 1/k")
    threads: int = option(1, low=1, help="torch threads of a host; other last bits than 1")
    data_on_device: bool | None = option(
        None,
        help="whether a host keeps its clients' inputs in its memory, or the GPU's; false: reads them batch by batch; "
        "null: keeps them where they take at most a quarter of it",
        formerly=["resident"],
    )
    autoscale: bool = option(False, help="let an autoscaling cluster start the nodes that are missing")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """checkpoint.*: how often the whole state is saved."""

    every: int = option(0, low=0, help="save after every so many rounds; 0: never")


@dataclass(frozen=True)
class Named:
    """A piece chosen by name, and its options as given."""

    name: str | None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree, validated. `algorithm` is ready; the other pieces are built when needed."""

    algorithm: Algorithm
    algorithm_name: str
    data: Named
    partition: Named
    model: Named
    augment: Named
    local: Local
    evaluate: Evaluate
    placement: Placement
    checkpoint: Checkpoint
    metrics: dict[str, Metric]
    rounds: int = option(10, low=1, help="communication rounds")
    cohort: int | float = option(1.0, help="clients in a round: a whole number of them, or a share up to 1.0")
    unseen_clients: int | float = option(
        0,
        low=0,
        help="clients, a number or a share below 1.0, that take no part in training and are scored after it; drawn by "
        "the seed",
        formerly=["newcomers"],
    )
    leave_out: str | None = option(
        None, help='a domain that nobody holds; the server\'s model is scored on it, split "ood"'
    )
    batch_norm: str = option(
        "aggregate",
        choices=BATCH_NORM_POLICIES,
        help="batch-norm layers: averaged with their statistics, left with the client, only the statistics left with "
        "the client, or neither trained nor updated",
    )
    seed: int = option(0, low=0, help="everything random in training follows from it")
    results: str = option("results", help="folder of the Parquet tables")
    experiment: str = option("run", help="folder inside it; one sweep or a few runs that belong together")
    resume: bool = option(
        False,
        help="go on from the checkpoint of the same configuration; trusts that the data are what they were, and looks "
        "only at the code of your own classes",
    )

    @classmethod
    def read(cls, *sources: Mapping[str, Any]) -> "Config":
        """The configuration that `sources` say, later ones winning; see the module's text.

        Raises:
            UsageError: what cannot be, in one line.
        """
        tree = _at_home(merged(*sources))
        named = ("algorithm", *_CHOSEN)
        scalars = {f.name: f for f in dataclasses.fields(cls) if f.metadata}
        known = [*_GROUPS, *named, "metrics", *scalars]
        for key in tree:
            if key not in known:
                check_renamed(key, scalars.values())
                raise UsageError(f"{key}: no such key; {suggestion(key, known)}")
        for key in (*_GROUPS, *named):
            if not isinstance(tree.get(key, {}), Mapping):
                raise UsageError(f"{key}={tree[key]!r}: a group of keys; did you mean {key}.name={tree[key]}?")
        hints = typing.get_type_hints(cls)
        given = {name: f for name, f in scalars.items() if name in tree}
        values = {name: checked(tree[name], hints[name], f.metadata, where=name) for name, f in given.items()}
        chosen = dict(tree.get("algorithm", {}))
        config = cls(
            algorithm_name=str(chosen.get("name", "fedavg")),
            algorithm=build_algorithm(chosen, where="algorithm"),
            data=_named(tree, "data", "mini_digits"),
            partition=_named(tree, "partition", None),
            model=_named(tree, "model", "cnn"),
            augment=_named(tree, "augment", "none"),
            metrics=build_metrics(tree.get("metrics", {})),
            **{name: build(kind, tree.get(name, {}), where=name) for name, kind in _GROUPS.items()},
            **values,
        )
        config._check()
        return config

    def _check(self) -> None:
        check_name(self.experiment, "experiment")
        if self.local.epochs is not None and self.local.steps is not None:
            raise UsageError("local.epochs and local.steps are both given; a round has so many of one or of the other")
        if self.local.optimizer == "adam" and (self.local.momentum or self.local.nesterov):
            raise UsageError("local.momentum: Adam has moments of its own; use local.optimizer=sgd or leave it out")
        if self.local.nesterov and not self.local.momentum:
            raise UsageError("local.nesterov=true: is a form of momentum; give local.momentum above 0, such as 0.9")
        cohort = self.cohort
        if (isinstance(cohort, int) and cohort < 1) or not cohort > 0 or (isinstance(cohort, float) and cohort > 1):
            raise UsageError(f"cohort={cohort}: give a number of clients from 1, or a share above 0 and up to 1.0")
        if isinstance(self.unseen_clients, float) and self.unseen_clients >= 1:
            raise UsageError(f"unseen_clients={self.unseen_clients}: give a number of clients, or a share below 1.0")
        for key in ("gpus", "server_gpus"):
            share = getattr(self.placement, key)
            slots = round(1 / share) if 0 < share < 1 else 0
            if (slots and abs(1 / share - slots) > 0.02 * slots) or (share > 1 and share != int(share)):
                better = f"1/{slots} = {1 / slots:.4g}" if share < 1 else round(share)
                raise UsageError(f"placement.{key}={share:g}: must be a whole number or 1/k for a whole k, as {better}")

    def tree(self) -> dict[str, Any]:
        """Every value as a nested dict, defaults included: a column each in the table of trials."""
        own = {"name": self.algorithm_name} | algorithm_values(self.algorithm)
        groups = {name: dataclasses.asdict(getattr(self, name)) for name in _GROUPS}
        scalars = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata}
        chosen = {name: {"name": getattr(self, name).name} | getattr(self, name).options for name in _CHOSEN}
        metrics = {name: dataclasses.asdict(metric) for name, metric in self.metrics.items()}
        return {"algorithm": own, **chosen, **groups, "metrics": metrics, **scalars}


_GROUPS: dict[str, type] = {"local": Local, "evaluate": Evaluate, "placement": Placement, "checkpoint": Checkpoint}
_CHOSEN = ("data", "partition", "model", "augment")


def _at_home(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with ~ expanded in results, data.* and partition.*, which hold paths: no shell does so after a "="."""

    def expanded(value: Any) -> Any:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        return os.path.expanduser(value) if isinstance(value, str) else value

    groups = {key: tree[key] for key in ("data", "partition") if isinstance(tree.get(key), Mapping)}
    found = {key: {name: expanded(value) for name, value in group.items()} for key, group in groups.items()}
    return tree | found | ({"results": expanded(tree["results"])} if "results" in tree else {})


def _named(tree: Mapping[str, Any], key: str, default: str | None) -> Named:
    options = dict(tree.get(key, {}))
    name = options.pop("name", default)
    if name is not None and not isinstance(name, str):
        raise UsageError(f"{key}.name={name!r}: expected a text, got {type(name).__name__}")
    return Named(name, options)


def build_algorithm(values: Mapping[str, Any] | str, *, where: str) -> Algorithm:
    """The algorithm called `name` with its hyperparameters; a field that is itself an algorithm is built likewise."""
    options = {"name": values} if isinstance(values, str) else dict(values)
    name = options.pop("name", "fedavg")
    if not isinstance(name, str):
        raise UsageError(f"{where}.name={name!r}: expected a text, got {type(name).__name__}")
    found = resolve(name, ALGORITHMS, where=f"{where}.name")
    if not (isinstance(found, type) and issubclass(found, Algorithm) and dataclasses.is_dataclass(found)):
        raise UsageError(f"{where}.name={name}: must be a dataclass that derives from rayfed.algorithm.Algorithm")
    needed = ("init", "start", "step", "finish", "aggregate")
    if missing := [hook for hook in needed if getattr(found, hook) is getattr(Algorithm, hook)]:
        hooks = f"{', '.join(missing)}; derive from FedAvg, or see rayfed/algorithm.py"
        raise UsageError(f"{where}.name={name}: {found.__name__} has no hook {hooks}")
    for key, hint in typing.get_type_hints(found).items():
        if key in options and isinstance(hint, type) and issubclass(hint, Algorithm):
            inner = options[key]
            if not isinstance(inner, (str, Mapping)):
                raise UsageError(f"{where}.{key}={inner!r}: expected an algorithm's name, or a group with its keys")
            options[key] = build_algorithm(inner, where=f"{where}.{key}")
    return build(found, options, where=where, also=("name",))


def algorithm_values(algorithm: Any) -> dict[str, Any]:
    """The hyperparameters of an algorithm as plain values; a nested algorithm as a group with its name."""
    values = {}
    for f in dataclasses.fields(algorithm):
        if not f.init:
            continue  # no key
        value = getattr(algorithm, f.name)
        nested = isinstance(value, Algorithm)
        values[f.name] = {"name": value.name} | algorithm_values(value) if nested else value
    return values
