"""Two rounds of a method in rayfed, recorded, and the batches of it handed to somebody else's implementation.

rayfed runs first, by `rayfed.run` with `placement.hosts=0`. Meanwhile `Trace` records which rows of its training part
each client draws in each batch. `Feed` then gives the same batches in the same order to the other implementation, by
way of whatever stands for its data loader, and complains if that asks for more batches or leaves some over. Both start
from copies of one network, so what differs afterwards are the update rules.
"""

import copy
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import rayfed
from rayfed.algorithm import Context, Exchange
from rayfed.core.rng import global_state_kept
from rayfed.core.trees import Weights
from rayfed.data.population import Examples
from rayfed.data.user_clients import user_population
from rayfed.engine import host
from rayfed.engine.device_data import divide
from rayfed.engine.training import Phases, Rows, draw_phases
from rayfed.models.split_model import SplitModel

TOLERANCE = 1e-5
"""The largest absolute difference of a weight that counts as agreement: float32 rounding over some dozen steps."""

LEAST_MOVE = 1e-3
"""The change of a weight that training must exceed somewhere; agreement means little below."""

Models = dict[str, Weights]
"""Weights to compare, by what they are: "server", "client 0", "client 0 personal"."""

PARTIAL = {"cohort": 2, "rounds": 3}
"""Two of four clients in a round; after three rounds at least two clients have taken part twice."""

CLASSES, INPUTS, FEATURES = 3, 6, 8


class OutOfStep(Exception):
    """The other implementation asks for other batches than rayfed drew, or its weights have other names."""


@dataclass(frozen=True)
class Setting:
    """The problem that both sides solve.

    Attributes:
        algorithm: The options `algorithm.*` of rayfed, with the name.
        sizes: The number of training examples of each client.
        cohort: The number of clients in a round; None: all of them.
        network: "mlp", "mlp_bn" (with batch norm), "linear", or "cnn" (for images of 8x8 pixels).
        head: "linear", "mlp" (two layers), or "mlp_bn" (two layers with batch norm); for networks "mlp" and "mlp_bn".
        double: Whether both sides compute in float64.
        more: Other keys of rayfed's configuration, such as {"batch_norm": "local"}.
    """

    algorithm: Mapping[str, Any]
    sizes: tuple[int, ...] = (10, 20, 30, 40)
    rounds: int = 2
    cohort: int | None = None
    epochs: int = 2
    batch_size: int = 5
    lr: float = 0.1
    network: str = "mlp"
    head: str = "linear"
    double: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_partial(self) -> bool:
        """Whether only some clients take part in a round."""
        return self.cohort not in (None, len(self.sizes))

    def model(self) -> SplitModel:
        """Return the network with the initial weights that both sides copy.

        Features end without ReLU: where all are near 0, MOON's cosine similarity would magnify rounding.
        """
        with global_state_kept():
            torch.manual_seed(7)
            if self.network == "cnn":
                layers: dict[str, nn.Module] = {"conv": nn.Conv2d(1, 4, 3), "relu": nn.ReLU(), "flat": nn.Flatten()}
                layers |= {"fc": nn.Linear(4 * 36, FEATURES)}
                return SplitModel(nn.Sequential(OrderedDict(layers)), nn.Linear(FEATURES, CLASSES), (1, 8, 8))
            if self.network == "linear":
                return SplitModel(nn.Identity(), nn.Linear(INPUTS, CLASSES), (INPUTS,))
            norm: dict[str, nn.Module] = {"bn1": nn.BatchNorm1d(12)} if self.network == "mlp_bn" else {}
            layers = {"fc1": nn.Linear(INPUTS, 12), **norm, "relu": nn.ReLU(), "fc2": nn.Linear(12, FEATURES)}
            body = nn.Sequential(OrderedDict(layers))
            return SplitModel(body, self._head(), (INPUTS,))

    def _head(self) -> nn.Module:
        if self.head == "linear":
            return nn.Linear(FEATURES, CLASSES)
        norm: dict[str, nn.Module] = {"bn2": nn.BatchNorm1d(FEATURES)} if self.head == "mlp_bn" else {}
        layers = {"fc3": nn.Linear(FEATURES, FEATURES), **norm, "relu": nn.ReLU(), "fc4": nn.Linear(FEATURES, CLASSES)}
        return nn.Sequential(OrderedDict(layers))

    def clients(self) -> list[dict[str, Any]]:
        """Return the clients' data, for `rayfed.run`: Gaussian classes, moved by each client."""
        rng = np.random.default_rng(3)
        shape = (1, 8, 8) if self.network == "cnn" else (INPUTS,)
        centres = rng.normal(size=(CLASSES, *shape))

        def part(n: int, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            y = rng.permutation(np.arange(n) % CLASSES)
            return (centres[y] + shift + rng.normal(size=(n, *shape))).astype(np.float32), y

        shifts = [rng.normal(size=shape) / 2 for _ in self.sizes]
        return [{"train": part(n, s), "test": part(4, s)} for n, s in zip(self.sizes, shifts, strict=True)]

    def config(self, results: str) -> dict[str, Any]:
        """Return rayfed's configuration."""
        return {
            "algorithm": dict(self.algorithm),
            "local": {"epochs": self.epochs, "batch_size": self.batch_size, "lr": self.lr, "drop_last": True},
            "rounds": self.rounds,
            "cohort": self.cohort or len(self.sizes),
            "evaluate": {"every": self.rounds, "points": ["downloaded"], "splits": ["test"]},
            "placement": {"hosts": 0},
            "results": results,
            **self.more,
        }


@contextmanager
def in_float64() -> Iterator[None]:
    """Let rayfed and other code compute in float64: what magnifies rounding in float32 agrees to many digits here."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(np, "float32", np.float64),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(usual)


Draw = tuple[str, Rows]
"""The name of a phase, and the row numbers of its batches."""


@dataclass
class Trace:
    """What rayfed did.

    Attributes:
        initial: The network before training; copy it.
        draws: The batches of each client by (stage, round), in the order of training.
        parts: The training part (x, y) of each client, without examples that the algorithm holds out.
        held_out: What it holds out.
        server: The final state of the server.
        clients: The final states of the clients that took part.
        extra: What `Case.watch` noted; "initial" are the initial weights where the algorithm adds some.
    """

    setting: Setting
    initial: nn.Module
    draws: dict[tuple[str, int], dict[int, list[Draw]]]
    parts: list[tuple[Tensor, Tensor]]
    held_out: list[tuple[Tensor, Tensor]]
    server: dict[str, Any]
    clients: dict[int, dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)

    def cohort(self, round: int) -> list[int]:
        """Return the clients of a round, in ascending order."""
        return sorted(self.draws["round", round])

    def examples(self, client: int) -> int:
        return len(self.parts[client][1])


Watch = Callable[[dict[str, Any]], AbstractContextManager[Any]]
"""Makes a context in which rayfed runs, and which notes in the given dictionary what else the other side needs."""


def record(setting: Setting, watch: Watch | None = None) -> Trace:
    """Run `setting` in rayfed and return its trace."""
    extra: dict[str, Any] = {}
    draws: dict[tuple[str, int], dict[int, list[Draw]]] = defaultdict(lambda: defaultdict(list))

    def recording(exchange: Exchange, ctx: Context, **how: Any) -> Phases:
        phases = draw_phases(exchange, ctx, **how)
        draws[ctx.stage, ctx.round][ctx.client] += [(phase.name, rows) for phase, rows in phases]
        return phases

    model, clients = setting.model(), setting.clients()
    with (
        tempfile.TemporaryDirectory(prefix="rayfed-references-") as folder,
        mock.patch.object(host, "draw_phases", recording),
        watch(extra) if watch else nullcontext(),
    ):
        result = rayfed.run(setting.config(folder), clients=clients, model=copy.deepcopy(model), quiet=True)
        server, states = result.server, {i: result.clients[i] for i in result.clients}
        assert result._plan is not None
        share, seed = result._plan.blueprint.algorithm.held_out_share, result._plan.blueprint.seed
    train, held_out = zip(*(divide(client, share, seed) for client in user_population(clients).clients), strict=True)

    def tensors(parts: Sequence[Examples]) -> list[tuple[Tensor, Tensor]]:
        return [(torch.from_numpy(np.asarray(part.x)), torch.from_numpy(part.y)) for part in parts]

    return Trace(setting, model, draws, tensors(train), tensors(held_out), server, states, extra)


class Feed:
    """Gives the recorded batches to another implementation, in their order.

    Call `start` before each round. Until then, batches are the training part in its stored order, for implementations
    that look at their data before they train.
    """

    def __init__(self, trace: Trace):
        self.trace, self.when = trace, ""
        self._left: dict[int, Rows] = {}
        self._started = False

    def start(self, round: int, stage: str = "round") -> None:
        """Begin a round; the batches of the one before must have been used up.

        Raises:
            OutOfStep: Some were not.
        """
        self.finish()
        self._started, self.when = True, f"{stage} {round}"
        drawn = self.trace.draws[stage, round]
        self._left = {client: [rows for _, phase in draws for rows in phase] for client, draws in drawn.items()}

    def pause(self) -> None:
        """Serve stored order again, until the next `start`."""
        self.finish()
        self._started, self._left = False, {}

    def finish(self) -> None:
        """Check that all batches were used.

        Raises:
            OutOfStep: Some were not.
        """
        for client, left in self._left.items():
            if left:
                raise OutOfStep(f"{self.when}: the other side left {len(left)} batches of client {client} unused")

    def next(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the client's next batch (x, y), which the caller may change.

        Raises:
            OutOfStep: rayfed drew no further one.
        """
        if not self._left.get(client):
            raise OutOfStep(f"{self.when}: the other side wants more batches of client {client} than rayfed drew")
        rows = self._left[client].pop(0)
        x, y = self.trace.parts[client]
        return x[rows], y[rows]

    def loader(self, client: int, batch_size: int | None = None) -> "Loader":
        """Return what stands for the client's data loader."""
        return Loader(self, client, batch_size or self.trace.setting.batch_size)


@dataclass(frozen=True)
class Loader:
    """Stands for a `DataLoader` with `shuffle=True` and `drop_last=True`; each iteration is one epoch of the feed."""

    feed: Feed
    client: int
    batch_size: int

    @property
    def dataset(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*self.feed.trace.parts[self.client], strict=True))

    def __len__(self) -> int:
        return self.feed.trace.examples(self.client) // self.batch_size

    def ahead(self, epochs: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of the next epochs without using them up."""
        x, y = self.feed.trace.parts[self.client]
        return ((x[rows], y[rows]) for rows in self.feed._left[self.client][: epochs * len(self)])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.feed.trace.parts[self.client]
        for number in range(len(self)):
            if self.feed._started:
                yield self.feed.next(self.client)
            else:
                rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
                yield x[rows].clone(), y[rows].clone()


# Comparison


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        method: The name of the method in rayfed.
        source: The key of the other project.
        theirs: Runs the other code: (checkout, trace) -> models.
        ours: Takes the same models from the trace.
        watch: Notes what else the other side needs, such as random numbers.
        variant: What is special about this case, such as a change to the other code; empty if nothing is.
        differs: Why the two differ, where they are known to: who is right, and which line or equation decides. Empty
            if they must agree.
    """

    method: str
    source: str
    setting: Setting
    theirs: Callable[[Any, Trace], Models]
    ours: Callable[[Trace], Models]
    watch: Watch | None = None
    variant: str = ""
    differs: str = ""


def pair(
    method: str,
    source: str,
    algorithm: Mapping[str, Any],
    theirs: Callable[[Any, Trace], Models],
    ours: Callable[[Trace], Models],
    *,
    watch: Watch | None = None,
    variant: str = "",
    differs: str = "",
    **setting: Any,
) -> list[Case]:
    """Return a case with all clients in every round, and one with two of four.

    Args:
        algorithm: The options of the method in rayfed.
        setting: Other fields of `Setting`.
    """
    settings = [Setting({"name": method, **algorithm}, **(setting | cohort)) for cohort in ({}, PARTIAL)]
    return [Case(method, source, each, theirs, ours, watch, variant, differs) for each in settings]


@dataclass(frozen=True)
class Comparison:
    """The outcome of a case.

    Attributes:
        difference: The largest absolute difference of a weight.
        where: The model and weight that has it.
        moved: The largest absolute change of a weight of the initial network in rayfed, to compare with.
        models: How many models were compared.
    """

    case: Case
    difference: float
    where: str
    moved: float
    models: int

    @property
    def agrees(self) -> bool:
        return self.difference <= TOLERANCE

    @property
    def as_expected(self) -> bool:
        """Whether the two agree, or differ where they are known to."""
        return self.agrees != bool(self.case.differs)


def compare(case: Case, checkout: Any) -> Comparison:
    """Run both sides of `case` and compare their models.

    Raises:
        OutOfStep: They did not take the same steps, or do not hold the same weights.
        Unavailable: Code of the other side is missing.
    """
    with in_float64() if case.setting.double else nullcontext():
        trace = record(case.setting, case.watch)
        ours, theirs = case.ours(trace), case.theirs(checkout, trace)
    difference, where = largest_difference(ours, theirs)
    initial = trace.extra.get("initial") or trace.initial.state_dict()
    moved = [
        float((value - initial[name]).abs().max())
        for weights in ours.values()
        for name, value in weights.items()
        if name in initial and value.is_floating_point()
    ]
    if moved and max(moved) < LEAST_MOVE:
        raise OutOfStep(f"rayfed moved no weight by more than {max(moved):.1g}, so that agreement would mean nothing")
    return Comparison(case, difference, where, max(moved, default=0.0), len(ours))


def largest_difference(ours: Models, theirs: Models) -> tuple[float, str]:
    """Return the largest absolute difference of a weight, and where it is. NaN counts as infinite.

    Raises:
        OutOfStep: There are other models, names or shapes on one side.
    """
    if ours.keys() != theirs.keys() or not ours:
        raise OutOfStep(f"rayfed has the models {sorted(ours)}, the other side {sorted(theirs)}")
    largest, where = -1.0, ""
    for model, weights in ours.items():
        if weights.keys() != theirs[model].keys():
            odd = sorted(weights.keys() ^ theirs[model].keys())
            raise OutOfStep(f"{model}: only one side has the weights {odd}")
        for name, value in weights.items():
            other = theirs[model][name].detach()
            if value.shape != other.shape:
                raise OutOfStep(f"{model}: {name} has the shape {tuple(value.shape)}, there {tuple(other.shape)}")
            gap = float((value.double() - other.double()).abs().max())
            gap = gap if gap == gap else float("inf")
            if gap > largest:
                largest, where = gap, f"{model}: {name}"
    return largest, where


# What is compared


def server_weights(trace: Trace) -> Models:
    """Return the server's weights."""
    return {"server": trace.server["weights"]}


def client_weights(trace: Trace, *path: str, label: str = "") -> Models:
    """Return an entry of every client's final state, by default "weights"."""
    models = {}
    for client, state in trace.clients.items():
        value: Any = state
        for key in path or ("weights",):
            value = value[key]
        models[f"client {client}{label and ' ' + label}"] = value if isinstance(value, dict) else {path[-1]: value}
    return models


def mean(trained: Mapping[int, Weights], trace: Trace) -> Weights:
    """Return the mean of the clients' weights by their training examples, where the other side's own is not at hand."""
    total = sum(trace.examples(i) for i in trained)
    shares = {i: trace.examples(i) / total for i in trained}
    names = next(iter(trained.values()))
    return {name: torch.stack([shares[i] * trained[i][name] for i in trained]).sum(0) for name in names}


def plain(
    module: nn.Module, rename: Mapping[str, str] | None = None, keep: Callable[[str], bool] | None = None
) -> Weights:
    """Return copies of a module's weights under rayfed's names.

    Args:
        rename: Prefixes to replace, such as {"base.": "features."}.
        keep: Which weights to return, by rayfed's name; by default all.
    """
    weights = {}
    for name, value in module.state_dict().items():
        for prefix, new in (rename or {}).items():
            if name.startswith(prefix):
                name = new + name.removeprefix(prefix)
                break
        if keep is None or keep(name):
            weights[name] = value.detach().clone()
    return weights
