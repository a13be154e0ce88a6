"""The configuration: one validated tree with the same keys in YAML files, on the command line and in Python.

`Config.read` takes nested mappings, dotted keys, or both. It refuses unknown keys, wrong types and values out of range
with a message of one line. `rayfed.experiments.plan` checks what depends on the data, such as a batch that is larger
than a client.

Neither this module nor the check of groups and top-level keys imports torch; the check of a component's options does.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rayfed.core.errors import UsageError, shown
from rayfed.core.options import build, checked, is_near, no_such_key, option, symbol_of, type_hints
from rayfed.core.paths import check_name, lasting
from rayfed.core.record_privacy import RecordPrivacy
from rayfed.core.round_record import POINTS
from rayfed.core.words import counted
from rayfed.experiments.components import KINDS, Component, choose, choose_partition, class_of
from rayfed.experiments.sources import SPACE_KEYS, merged
from rayfed.metrics import METRICS, chosen_metrics
from rayfed.records.storage import check_location

if TYPE_CHECKING:
    from rayfed.algorithm import Algorithm
    from rayfed.metrics.base import Metric

BATCH_NORM_POLICIES = ("aggregate", "local", "local_statistics", "frozen")
"""The policies for batch-norm layers; see `rayfed.core.task.Task`."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """local.*: how a client trains."""

    epochs: int | None = option(None, low=1, help="local epochs per round; null: 1 epoch, unless local.steps is given")
    steps: int | None = option(None, low=1, help="local steps per round, instead of epochs")
    batch_size: int = option(10, low=1, help="examples per batch")
    drop_last: bool = option(
        True,
        help="drop the last, incomplete batch of each epoch, unless it is the only one; false: train on a smaller last "
        "batch",
    )
    optimizer: str = option("sgd", choices=("sgd", "adam", "adamw"), help="local optimiser")
    keep_optimizer: bool | None = option(
        None, help="keep the optimiser's state with the client between rounds; null: as the method does; most reset it"
    )
    lr: float = option(0.01, above=0, help="learning rate")
    momentum: float = option(0.0, low=0, below=1, help="momentum of SGD")
    nesterov: bool = option(False, help="use Nesterov momentum")
    weight_decay: float = option(
        0.0, low=0, help="weight decay: an L2 penalty, added to the gradient; of adamw, apart from it"
    )
    clip_norm: float | None = option(
        None, above=0, help="clip the gradient of every local step to this L2 norm over all weights; null: do not clip"
    )
    precision: str = option(
        "float32",
        choices=("float32", "bf16"),
        help="numbers that steps of local training compute with; bf16: layers by torch.autocast, with 8 significant "
        "bits; weights, sums and scores stay in float32",
    )
    label_smoothing: float = option(
        0.0, low=0, below=1, help="share of the label that training spreads over all classes; scores are by true labels"
    )
    privacy: RecordPrivacy | None = option(
        None, section=RecordPrivacy, help="DP-SGD, which protects single records, such as patients; null: none"
    )


@dataclass(frozen=True, kw_only=True)
class AvailabilityOptions:
    """availability.*: clients that do less work, drop out or are late."""

    least_work: float = option(
        1.0,
        above=0,
        high=1,
        help="each client of a round trains a random part of local.epochs or local.steps, at least this share",
    )
    dropout: float = option(0.0, low=0, below=1, help="probability that a sampled client drops out of a round")
    deadline: float | None = option(
        None, above=0, help="simulated seconds after which the server ignores the replies of a round; null: it waits"
    )


@dataclass(frozen=True, kw_only=True)
class ClockOptions:
    """clock.*: a simulated clock, on which clients train and send; nothing sleeps."""

    step_seconds: float = option(
        0.0, low=0, help="simulated seconds of a local step of the median client; 0: training takes no time"
    )
    speed_spread: float = option(
        0.0,
        low=0,
        help="how much clients differ: the standard deviation of the logarithms of their speed and of their bandwidths",
    )
    up_mbps: float | None = option(
        None, above=0, help="megabits per second that the median client sends; null: no limit"
    )
    down_mbps: float | None = option(
        None, above=0, help="megabits per second that the median client receives; null: no limit"
    )
    server_seconds: float = option(0.0, low=0, help="simulated seconds of an update of the server")
    profile: str | None = option(
        None,
        help="CSV or Parquet file of the clients' devices in place of drawn ones, with steps_per_second and optionally "
        "client, up_mbps, down_mbps and available",
    )


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """evaluate.*: when and what to score."""

    every: int = option(1, low=1, help="rounds between evaluations; the last round is always scored")
    initial: bool = option(False, help="also score before the first round")
    points: list[str] | None = option(
        None,
        choices=POINTS,
        help="models to score: global (the server's), downloaded, trained (after local training), adapted (downloaded, "
        "then trained for adapt_epochs); null: the one that the algorithm's paper scores",
    )
    splits: list[str] = option(["val", "test"], choices=("train", "val", "test"), help="splits of the clients' data")
    clients: str | int | None = option(
        None,
        help="clients to score: all participants, selected (the cohort of the round), or a number of participants, "
        "drawn by the seed, the same in all rounds and for all methods; null: all, or 1000 of more than 10000",
    )
    adapt_epochs: int = option(1, low=1, help="local epochs before the point `adapted` is scored")
    predictions: bool | None = option(
        None,
        help="record the outputs for all test examples, for tests of significance over examples; null: if they are at "
        "most 20,000 numbers per evaluated round",
    )

    def __post_init__(self) -> None:
        is_number = isinstance(self.clients, int) and not isinstance(self.clients, bool) and self.clients > 0
        if not is_number and self.clients not in (None, "all", "selected"):
            raise UsageError(f"evaluate.clients={shown(self.clients)}: expected all, selected or a number of clients")


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingOptions:
    """early_stopping.*: whether training ends when the validation score no longer improves. Test data play no part."""

    patience: int | None = option(
        None, low=1, help="stop after this many evaluations in a row without an improvement; null: run all rounds"
    )
    min_delta: float = option(0.0, low=0, help="an improvement must be larger than this")


@dataclass(frozen=True, kw_only=True)
class SelectOptions:
    """select.*: the metric that chooses rounds, hyperparameters and models, by its mean over validation data."""

    metric: str | None = option(
        None,
        help="metric that chooses the round, the hyperparameters and the best model, stops training early, guides ASHA "
        "and Optuna, and is shown by reports: accuracy, loss, a metric of predictions in metrics.*, which is then "
        "switched on, or your own module:Name; null: accuracy, or else f1 of several labels, mae of numbers, "
        "concordance of risks, or loss",
    )
    mode: str | None = option(
        None, choices=("max", "min"), help="which value is the best; null: the one that the metric declares"
    )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """placement.*: where clients run.

    Placement changes no result, except that `vmap_clients`, `threads`, `tf32` and `deterministic` change results by
    floating-point rounding.
    """

    hosts: int = option(0, low=0, help="Ray actors that train the clients; 0: train in this process, without Ray")
    vmap_clients: int | str = option(
        1,
        low=1,
        help="clients that a host trains at once with torch.vmap, which pays for small models; values above 1 change "
        "rounding; auto: a number that a short measurement finds fast before the first training, 1 where clients "
        "cannot train at once",
    )
    cpus: float = option(1.0, low=0, help="CPUs to reserve per host")
    gpus: float = option(
        0.0, low=0, help="GPUs to reserve per host: an integer, or 1/k, so that k hosts fill a GPU before the next"
    )
    server_cpus: float = option(0.0, low=0, help="CPUs to reserve for the server, which works while the hosts wait")
    server_gpus: float | None = option(
        None,
        low=0,
        help="GPUs to reserve for the server: an integer, or 1/k; null: with methods whose server trains, a quarter of "
        "what the first host reserves, which shares it, and else none",
    )
    threads: int = option(1, low=1, high=256, help="torch threads per host; values above 1 change rounding")
    data_on_device: bool | None = option(
        None,
        help="keep the clients' inputs in the memory of their host or its GPU; false: read them batch by batch; "
        "null: keep them if they take at most a quarter of that memory",
    )
    deterministic: bool = option(
        False,
        help="use deterministic kernels alone, so that two runs on one type of GPU are equal; slower, and an operation "
        "that has none is an error",
    )
    tf32: bool = option(
        False, help="let GPUs round the factors of products and convolutions to 10 bits, which is faster"
    )
    cuda_graphs: bool = option(
        True,
        help="on a GPU, replay local steps from CUDA graphs where that gives the same numbers, several times as fast",
    )
    autoscale: bool = option(False, help="wait for an autoscaling cluster to start missing nodes")

    @property
    def description(self) -> str:
        """Where the clients run, in words: "this process", "1 Ray host", "2 Ray hosts"."""
        if not self.hosts:
            return "this process"
        return counted(self.hosts, "Ray host")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """checkpoint.*: how often the complete state is saved, from which a trial goes on when a process of it dies."""

    minutes: float = option(
        5.0,
        low=0,
        help="minutes between checkpoints; more where saving would take over 1% of the time, and 0: none. They are "
        "deleted when the trial is done, unless its final state is kept",
    )
    every: int = option(0, low=0, help="rounds between checkpoints, besides those of checkpoint.minutes; 0: none")
    best: bool | None = option(
        None,
        help="keep the state of the round with the best validation score as well, which is saved whenever the score "
        "improves; null: where the final state is kept without checkpoints, as by rayfed.run",
    )


@dataclass(frozen=True, kw_only=True)
class Faults:
    """faults.*: what happens when a process dies. No result depends on it."""

    restarts: int = option(
        3,
        low=0,
        help="times that a trial on Ray starts again from its last checkpoint, when its server, a host or a node died, "
        "before it has made ten rounds or a checkpoint; nodes that the cluster announces as taken away do not count",
    )
    patience: float = option(
        5.0,
        above=0,
        help="minutes without a sign from a process after which rayfed asks its node whether it works, and starts the "
        "trial again if it does not; ten times the usual duration if that is longer",
    )


@dataclass(frozen=True, kw_only=True)
class StateMemory:
    """state.*: where the states of clients are kept."""

    memory: float | None = option(
        None,
        above=0,
        help="GiB of memory for the states of clients in a run without hosts, the rest goes to disk; null: a quarter "
        "of the memory, by the number of trials that run at once. With hosts, Ray's object store holds them and spills "
        "them to disk",
    )


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """tracking.*: what shows rounds beside the tables. No result depends on it."""

    tensorboard: bool | None = option(
        None, help="write TensorBoard files to RESULTS/EXPERIMENT/tensorboard; null: in sweeps, but not in single runs"
    )
    wandb: str | None = option(
        None, help="log each trial as a run of this project of Weights & Biases; offline where nobody is logged in"
    )
    mlflow: str | None = option(
        None, help="log each trial as a run of MLflow: the URI of a server, a database or a folder (file:///…)"
    )
    trackers: list[str] = option([], help="trackers of your own, as module:Name")
    folder: str | None = option(None, help="local folder in place of RESULTS/EXPERIMENT")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The complete configuration, checked. Components are built when they are needed."""

    chosen_algorithm: Component
    chosen_metrics: dict[str, Component]
    data: Component
    partition: Component
    model: Component
    loss: Component
    augment: Component
    sampling: Component
    lr_schedule: Component
    schedule: Component
    privacy: Component
    compression: Component
    attack: Component
    robust: Component
    local: Local
    availability: AvailabilityOptions
    clock: ClockOptions
    evaluate: Evaluate
    select: SelectOptions
    early_stopping: EarlyStoppingOptions
    placement: Placement
    checkpoint: Checkpoint
    faults: Faults
    state: StateMemory
    tracking: Tracking
    rounds: int = option(10, low=1, high=10**9, help="communication rounds")
    cohort: int | None = option(None, low=1, help="clients per round; null: the share cohort_share of them")
    cohort_share: float = option(1.0, above=0, high=1, help="share of the participants that takes part in a round")
    unseen_clients: int = option(
        0, low=0, help="clients that take no part in training and are scored after it; drawn with the seed"
    )
    unseen_share: float = option(
        0.0, low=0, below=1, help="share of all clients that takes no part in training, in place of unseen_clients"
    )
    leave_out: str | list[str] | None = option(
        None,
        help="domain or domains to withhold from all clients; the global model, or else theirs, is scored on them "
        '("ood"); null: those that the dataset itself withholds, in most of them none',
    )
    batch_norm: str = option(
        "aggregate",
        choices=BATCH_NORM_POLICIES,
        help="batch-norm layers: aggregate: averaged with their statistics; local: kept by each client; "
        "local_statistics: affine weights averaged, statistics kept; frozen: neither trained nor updated",
    )
    seed: int = option(
        0,
        low=0,
        help="seed for initialisation, client sampling, batch order and, unless partition.seed is given, the partition",
    )
    results: str = option(
        "results",
        help="folder of the Parquet tables and checkpoints: a path, or a URL such as s3://bucket/folder or gs://bucket/folder",
    )
    experiment: str = option("run", help="subfolder of results, for one sweep or for runs that belong together")
    resume: bool | str = option(
        False,
        choices=(False, True, "anyway"),
        help="continue from the checkpoint of the same configuration, also with more rounds; refused if your own code "
        "has changed, unless it is `anyway`; the data files are assumed to be the same",
    )

    @cached_property
    def algorithm(self) -> "Algorithm":
        """The algorithm, with its hyperparameters."""
        return self.chosen_algorithm.build()  # type: ignore[no-any-return]

    @cached_property
    def metrics(self) -> "dict[str, Metric]":
        """The metrics that are switched on, by name."""
        return {name: metric.build() for name, metric in self.chosen_metrics.items()}

    @property
    def algorithm_name(self) -> str:
        return str(self.chosen_algorithm.name)

    @property
    def components(self) -> list[Component]:
        """Everything that is chosen by name, the algorithms inside of others included."""
        components = self.chosen_algorithm.choices
        for key in COMPONENTS:
            components += getattr(self, key).choices
        for metric in self.chosen_metrics.values():
            components += metric.choices
        return components

    @classmethod
    def read(cls, *sources: Mapping[str, Any]) -> "Config":
        """Return the configuration that `sources` give; later sources take precedence.

        Args:
            sources: Mappings with nested keys ({"local": {"lr": 0.1}}) or dotted keys ({"local.lr": 0.1}).

        Raises:
            UsageError: The configuration cannot work; the message names the key.
        """
        tree = _with_home(merged(*sources))
        _check_keys(tree, [*GROUPS, "algorithm", *COMPONENTS, "metrics", *_scalars()])
        scalars = _read_scalars(tree)
        groups: dict[str, Any] = {name: build(kind, tree.get(name, {}), where=name) for name, kind in GROUPS.items()}
        defaults = {name: scalar.default for name, scalar in _scalars().items()}
        _check_together(SimpleNamespace(**defaults | scalars | groups))
        algorithm = choose("algorithm", tree.get("algorithm", {}), "fedavg")
        components = _read_components(tree)
        if components["schedule"].name == "buffered" and ("cohort" in scalars or "cohort_share" in scalars):
            raise UsageError("cohort: schedule.concurrency and schedule.buffer take its place; leave it out")
        metrics = _read_metrics(tree.get("metrics", {}), groups["select"].metric)
        return cls(chosen_algorithm=algorithm, chosen_metrics=metrics, **components, **groups, **scalars)

    def tree(self) -> dict[str, Any]:
        """Return every value as a nested dict, defaults included: one column each in the trials table."""
        tree: dict[str, Any] = {"algorithm": {"name": self.algorithm_name} | algorithm_values(self.algorithm)}
        for key in COMPONENTS:
            tree[key] = getattr(self, key).values
        for key in GROUPS:
            tree[key] = values_of_group(getattr(self, key))
        tree["metrics"] = {name: dataclasses.asdict(metric) for name, metric in self.metrics.items()}
        for key in _scalars():
            tree[key] = getattr(self, key)
        return tree


def values_of_group(group: Any) -> dict[str, Any]:
    """Return the values of a group; a section of it that is left out has no entry."""
    values = {}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        is_section = "section" in field.metadata
        if not is_section:
            values[field.name] = value
        elif value is not None:
            values[field.name] = dict(vars(value))
    return values


GROUPS: dict[str, type] = {
    "local": Local,
    "availability": AvailabilityOptions,
    "clock": ClockOptions,
    "evaluate": Evaluate,
    "select": SelectOptions,
    "early_stopping": EarlyStoppingOptions,
    "placement": Placement,
    "checkpoint": Checkpoint,
    "faults": Faults,
    "state": StateMemory,
    "tracking": Tracking,
}
COMPONENTS: dict[str, str | None] = {
    "data": "mini_digits",
    "partition": None,
    "model": "cnn",
    "loss": "cross_entropy",
    "augment": "none",
    "sampling": "uniform",
    "lr_schedule": "constant",
    "schedule": "synchronous",
    "privacy": "none",
    "compression": "none",
    "attack": "none",
    "robust": "mean",
}
"""The keys beside `algorithm` under which a component is chosen by name, with the default name."""


CHANNEL_PARTS = ("privacy", "compression", "attack", "robust")
"""The components that work on what travels between clients and server."""


@cache
def _scalars() -> "Mapping[str, dataclasses.Field[Any]]":
    """Return the options of `Config` that are in no group, by name."""
    return {field.name: field for field in dataclasses.fields(Config) if field.metadata}


def _read_scalars(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in no group that `tree` gives, with their types."""
    hints = type_hints(Config)
    values = {}
    for name, field in _scalars().items():
        if name in tree:
            values[name] = checked(tree[name], hints[name], field.metadata, where=name)
    return values


def _read_components(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components under the keys `COMPONENTS`. The default partition is that of the dataset."""
    components = {}
    for key in COMPONENTS:
        if key != "partition":
            given = tree.get(key, {})
            components[key] = choose(key, given, _default_name(key, given))
    components["partition"] = choose_partition(tree.get("partition", {}), components["data"])
    return components


def _read_metrics(given: Any, selected: str | None) -> dict[str, Component]:
    """Return the metrics that metrics.* switches on, and the one that chooses unless it is mentioned."""
    options = chosen_metrics(_with_selected(given, selected))
    return {name: choose("metrics", values, name, where=f"metrics.{name}") for name, values in options.items()}


def _default_name(key: str, given: Mapping[str, Any]) -> str | None:
    """Return the name of a component that is chosen without one; `privacy.epsilon=8` chooses Gaussian noise.

    Raises:
        UsageError: The options that are given belong to no name.
    """
    default = COMPONENTS[key]
    if key not in CHANNEL_PARTS or not given or "name" in given:
        return default
    if key == "privacy":
        return "gaussian"
    names = ", ".join(name for name in KINDS[key] if name != default)
    raise UsageError(f"{key}.{next(iter(given))}: needs {key}.name, one of {names}")


def _check_keys(tree: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise UsageError for a key that is none of `keys`, or a group that is no mapping."""
    for key in tree:
        if key not in keys:
            raise _unknown_key(key, keys, tree)
    for key in (*GROUPS, "algorithm", *COMPONENTS):
        if not isinstance(tree.get(key, {}), Mapping):
            hint = f"did you mean {key}.name={tree[key]}?"
            if key in GROUPS:
                hint = f"it has keys such as {key}.{dataclasses.fields(GROUPS[key])[0].name}"
            raise UsageError(f"{key}={shown(tree[key])}: expected a mapping; {hint}")


def _unknown_key(key: str, keys: Sequence[str], tree: Mapping[str, Any]) -> UsageError:
    """Return the error for a key of `tree` that is none of `keys`, with the keys that may be meant."""
    if key == "seeds":
        return UsageError("seeds: a key of search spaces, which rayfed sweep runs; a single run takes seed=N")
    if key in SPACE_KEYS:
        return UsageError(f"{key}: a key of search spaces, which rayfed sweep runs")
    places = _groups_with(key)
    if not places and not is_near(key, keys):
        places = places_of(key, tree)  # imports what it looks into
    if places:
        return UsageError(f"{key}: no such key; did you mean {' or '.join(places)}?")
    return no_such_key(key, keys)


def places_of(key: str, tree: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys that end in `key`: of groups, and else of the components that `tree` names."""
    in_groups = _groups_with(key)
    if in_groups:
        return in_groups
    word = key.replace("-", "_")
    places = []
    for kind, default in {"algorithm": "fedavg", **COMPONENTS}.items():
        name = default
        group = tree.get(kind)
        if isinstance(group, Mapping):
            name = group.get("name", default)
        if not isinstance(name, str) or name not in KINDS[kind]:
            continue
        chosen = class_of(kind, name, kind)
        symbol = None
        if kind == "algorithm":
            symbol = symbol_of(key, dataclasses.fields(chosen))
        if word in _field_names(chosen):
            places.append(f"{kind}.{word}")
        elif symbol is not None:
            letter, field = symbol
            places.append(f"{kind}.{field} ({letter})")
    return places


def _groups_with(key: str) -> list[str]:
    """Return the dotted keys of groups that end in `key`."""
    word = key.replace("-", "_")
    return [f"{group}.{word}" for group, kind in GROUPS.items() if word in _field_names(kind)]


def _field_names(kind: Any) -> set[str]:
    if not dataclasses.is_dataclass(kind):
        return set()
    return {field.name for field in dataclasses.fields(kind) if field.init}


def _check_together(settings: Any) -> None:
    """Raise UsageError for settings that do not go together; `settings` has the groups and the scalars of `Config`."""
    check_name(settings.experiment, "experiment")
    check_location(settings.results)
    if settings.local.optimizer != "sgd" and (settings.local.momentum or settings.local.nesterov):
        raise UsageError("local.momentum: Adam has no momentum option; use local.optimizer=sgd, or leave it out")
    _check_clock(settings.availability, settings.clock)
    if settings.local.nesterov and not settings.local.momentum:
        raise UsageError("local.nesterov=true: needs momentum; give local.momentum above 0, such as 0.9")
    for key, other in _EITHER:
        value = attrgetter(key)(settings)
        value_of_other = attrgetter(other)(settings)
        if value and value_of_other != getattr(Config, other, None):
            raise UsageError(f"{key}={value} and {other}={value_of_other} are both given; give one of them")
    at_once = settings.placement.vmap_clients
    if isinstance(at_once, str) and at_once != "auto":
        raise UsageError(f"placement.vmap_clients={at_once}: give a number of clients, or auto")
    _check_gpus("placement.gpus", settings.placement.gpus)
    _check_gpus("placement.server_gpus", settings.placement.server_gpus or 0.0)


_EITHER = (("local.epochs", "local.steps"), ("cohort", "cohort_share"), ("unseen_clients", "unseen_share"))
"""Pairs of keys with the same meaning."""


def _check_gpus(key: str, gpus: float) -> None:
    """Raise UsageError if a number of GPUs is neither an integer nor, within 2%, 1/k for an integer k."""
    if gpus in (0, 1):
        return
    if gpus > 1:
        is_valid = gpus == int(gpus)
        better = str(round(gpus))
    else:
        slots = round(1 / gpus)
        is_valid = abs(1 / gpus - slots) <= 0.02 * slots
        better = f"1/{slots} = {1 / slots:.4g}"
    if not is_valid:
        raise UsageError(f"{key}={gpus:g}: must be an integer or 1/k for an integer k, such as {better}")


def _with_selected(metrics: Any, selected: str | None) -> Any:
    """Return the values of metrics.*, with the metric that chooses switched on if it is not mentioned."""
    if selected is None or not isinstance(metrics, Mapping) or not (selected in METRICS or ":" in selected):
        return metrics
    return {selected: True, **metrics}


def _check_clock(availability: AvailabilityOptions, clock: ClockOptions) -> None:
    """Raise UsageError for options that have no effect without a clock, or with this clock."""
    if clock.profile is not None:
        for name in ("step_seconds", "speed_spread", "up_mbps", "down_mbps"):
            value = getattr(clock, name)
            if value:
                raise UsageError(f"clock.{name}={value:g}: clock.profile says this of every client; give one of them")
        return
    if clock.step_seconds or clock.up_mbps or clock.down_mbps:
        return
    needing = {
        "clock.speed_spread": clock.speed_spread,
        "clock.server_seconds": clock.server_seconds,
        "availability.deadline": availability.deadline,
    }
    for key, value in needing.items():
        if value:
            raise UsageError(f"{key}={value:g}: needs a clock; give clock.step_seconds, such as 1")


def _with_home(tree: dict[str, Any]) -> dict[str, Any]:
    """Return `tree` with ~ expanded in results, data.*, partition.* and clock.*; shells do not expand it after "="."""
    tree = dict(tree)
    for key in ("data", "partition", "clock"):
        if isinstance(tree.get(key), Mapping):
            tree[key] = {name: _expanded(value) for name, value in tree[key].items()}
    results = _expanded(tree.get("results", Config.results))
    if isinstance(results, str):
        results = lasting(results)
    tree["results"] = results
    return tree


def _expanded(value: Any) -> Any:
    """Return a path or a string with ~ expanded, and anything else as it is."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return os.path.expanduser(value)
    return value


def algorithm_values(algorithm: Any) -> dict[str, Any]:
    """Return the hyperparameters of an algorithm as plain values; a nested algorithm is a mapping with its name."""
    from rayfed.algorithm import Algorithm

    values: dict[str, Any] = {}
    if algorithm.personal_weights:
        values["personal"] = list(algorithm.personal_weights)
    for f in dataclasses.fields(algorithm):
        if not f.init:
            continue
        value = getattr(algorithm, f.name)
        if isinstance(value, Algorithm):
            value = {"name": value.name} | algorithm_values(value)
        values[f.name] = value
    return values
