"""The contract between the engine and an algorithm, tried on a few examples of a few clients.

The engine calls hooks in any process, for the clients of a host in any order, for several clients at once, and again
after a crash. An algorithm whose hooks are pure and whose state is what they return does not notice. What breaks that
often shows only on a cluster or after a resumed night, so `rayfed check` looks for it beforehand.
"""

import contextlib
import copy
import inspect
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rayfed.algorithm import Algorithm
from rayfed.algorithms.fedavg import FedAvg, LocalTraining
from rayfed.core.double import loss_in_double, module_in_double
from rayfed.core.errors import Diverged, UsageError, error_line
from rayfed.core.lr_schedule import CONSTANT
from rayfed.core.modules import copied
from rayfed.core.rng import global_state_kept
from rayfed.core.trees import as_real, is_counter, named_tensors
from rayfed.data.population import Population, inputs_in_double, small_population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.clock import ALWAYS, NO_CLOCK
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.host import LocalFleet
from rayfed.engine.purity import ImpureHook, facts, intercepted, pure
from rayfed.engine.server import Server
from rayfed.experiments.checks import check_trial
from rayfed.experiments.config import Checkpoint, Tracking
from rayfed.experiments.contract_tasks import TASKS, task_plan
from rayfed.experiments.plan import Plan
from rayfed.experiments.plan_channel import for_fewer_clients, without_channel
from rayfed.experiments.plan_model import UsersModel
from rayfed.experiments.proof import prove_training, takes_plain_steps
from rayfed.experiments.trial import Simulation, run_trial
from rayfed.records.recorder import Recorder
from rayfed.sampling.base import UNIFORM

_CLIENTS, _ROUNDS = 4, 4
_BATCHES = (2, 3, 4)  # numbers of batches of the clients in turn, so that some clients of a block end early
_BATCH = 8  # examples at most
_SCORED = 16  # examples of each part that are scored
_SHARE_OF_UPDATE = 1e-3  # of the norm of an update, by which clients trained at once and alone may differ
_ROUNDING = 1e-6  # of the norm of a field, which rounding may change in a few steps

Launch = Callable[[Plan], str]


@dataclass(frozen=True)
class Finding:
    """What the check of `subject` found, in a sentence, and whether the algorithm keeps this part of the contract."""

    subject: str
    found: str
    kept: bool = True


class _Broken(Exception):
    """The contract is broken; the message says how."""


def findings(plan: Plan, launch: Launch) -> Iterator[Finding]:
    """Check the algorithm of `plan` and yield one finding for each part of the contract.

    Simulations of a few rounds with at most four clients run in this process, and on the hosts of the plan, if it has
    any, by `launch`, which returns the hash of the final state. Nothing of them is kept.

    Raises:
        UsageError: The configuration is refused even without a variation.
    """
    small = _SmallTrial(plan)
    check_trial(small.blueprint(), small.population)
    checks = dict(CHECKS)
    if plan.config.placement.hosts:
        checks["hosts"] = partial(_hosts, launch=launch)
    for subject, check in checks.items():
        with global_state_kept():
            try:
                yield Finding(subject, check(small))
            except UsageError as refused:
                yield Finding(subject, f"refused: {refused}")
            except (_Broken, ImpureHook, Diverged) as broken:
                yield Finding(subject, str(broken), kept=False)
            except Exception as error:  # the user's code may raise anything
                advice = (
                    "a method that takes only classes has the trait requires_classes, one array computes_with_inputs"
                )
                found = f"{error_line(error)}; {advice}" if subject in TASKS else error_line(error)
                yield Finding(subject, found, kept=False)


class _SmallTrial:
    """A small form of a plan: few clients, few batches, few rounds, and only the options of the configuration."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.algorithm = for_fewer_clients(plan.blueprint.algorithm, min(_CLIENTS, len(plan.population.participants)))
        self.batch_size = min(plan.blueprint.batch_size, _BATCH)
        share = self.algorithm.held_out_share
        examples = [math.ceil((number * self.batch_size + 1) / (1 - share)) for number in _BATCHES]
        self.population = small_population(plan.population, _CLIENTS, examples, _SCORED)
        self.clients = len(self.population.participants)
        everywhere = ("downloaded", "trained", "adapted")
        has_global = self.blueprint().global_model(self.population)[0] is not None
        self.points = ("global", *everywhere) if has_global else everywhere

    def in_double(self) -> "_SmallTrial":
        """Return this trial with its model, its loss and its inputs in float64, so that differences are no rounding."""
        given = self.plan.blueprint
        training_loss = None if given.training_loss is None else loss_in_double(given.training_loss)
        model = module_in_double(copied(given.model))
        changed = replace(given, model=model, loss=loss_in_double(given.loss), training_loss=training_loss)
        small = copy.copy(self)
        small.plan = replace(self.plan, blueprint=changed)
        small.population = inputs_in_double(self.population)
        return small

    def blueprint(self, **changes: Any) -> Blueprint:
        """Return the blueprint of the small form with `changes`."""
        local = self.plan.blueprint.local._replace(epochs=1, steps=None, batch_size=None)
        small: dict[str, Any] = {"batch_size": self.batch_size, "local": local, "rounds": 2, "cohort": self.clients}
        small |= {"vmap_clients": 1, "threads": 1, "availability": ALWAYS, "sampler": UNIFORM, "data_on_device": None}
        small |= {"clock": NO_CLOCK, "buffered": None, "algorithm": self.algorithm}
        return replace(self.plan.blueprint, **(small | changes))

    def small_plan(self, folder: str, **changes: Any) -> Plan:
        """Return a plan of four rounds with `changes` of the configuration, whose results are written to `folder`."""
        off: dict[str, Any] = {"results": folder, "experiment": "check", "tracking": Tracking(tensorboard=False)}
        return replace(
            self.plan,
            config=replace(self.plan.config, rounds=_ROUNDS, **(off | changes)),
            population=self.population,
            blueprint=self.blueprint(rounds=_ROUNDS),
            evaluation=Evaluation(every=_ROUNDS, points=self.points[:1]),
        )

    def server(self, points: Sequence[str] = (), population: Population | None = None, **changes: Any) -> Server:
        """Return a server in this process, which scores models at `points` after each round.

        Raises:
            UsageError: The algorithm refuses the blueprint with `changes`.
        """
        blueprint, population = self.blueprint(**changes), population or self.population
        check_trial(blueprint, population)
        fleet = LocalFleet(blueprint, population)
        return Server(blueprint, population, fleet, Evaluation(every=1, points=tuple(points)))

    def finished(self, **changes: Any) -> Server:
        """Return a server that has run all rounds."""
        server = self.server(**changes)
        for _ in server.run():
            pass
        return server


def _state(server: Server) -> dict[str, Any]:
    return {"server": server.state, "clients": dict(server.fleet.states)}


def _check_finite(server: Server) -> None:
    """Raise `_Broken` if a state is not finite, also that of a client, which the engine does not look at."""
    for path, tensor in named_tensors(_state(server)):
        if not server.ctx.task.is_finite(path, tensor):
            raise _Broken(f"{path} is not finite after {server.round} rounds")


def _hooks(small: _SmallTrial) -> str:
    shapes: set[tuple[int, ...]] = set()

    def watched(name: str, hook: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        result = pure(name, hook, self, *args, **kwargs)
        if name == "predict":
            x = inspect.signature(Algorithm.predict).bind(self, *args, **kwargs).arguments["x"]
            if len(result) != len(x):
                raise _Broken(f"predict returned {len(result)} rows for {len(x)} inputs")
            shapes.add(tuple(result.shape[1:]))
        return result

    kinds = {kind: set(vars(kind)) for kind in type(small.algorithm).__mro__}
    server = small.server(small.points, algorithm=intercepted(small.algorithm, watched))
    scored = {score.point for record in server.run() for score in record.scores}
    if cached := {name for kind, before in kinds.items() for name in set(vars(kind)) - before}:
        raise _Broken(f"the class got the attribute {min(cached)} while it ran; state belongs into what hooks return")
    if missing := [point for point in small.points if point not in scored]:
        raise _Broken(f"nothing was scored at {missing[0]}")
    if (point := small.algorithm.traits.default_eval_point) not in ("global", *small.points):
        raise _Broken(f"default_eval_point is {point}; known: {', '.join(small.points)}")
    outputs = ", ".join(map(str, sorted(shapes)))
    return f"no hook modified its inputs; scored as {', '.join(small.points)}; outputs per example: {outputs}"


def _as_torch(small: _SmallTrial) -> str:
    blueprint = small.blueprint()
    method: LocalTraining = FedAvg()
    who = "two steps of FedAvg on this network end"
    own = without_channel(small.algorithm)
    if takes_plain_steps(own):
        method = own
        who = "two local steps end"
    obstacle = prove_training(blueprint, small.population, UsersModel.of(blueprint.model), "model", method)
    return obstacle or f"{who} as in plain PyTorch"


def _seeds(small: _SmallTrial) -> str:
    ends = [small.finished().state_hash() for _ in range(2)]
    if ends[0] != ends[1]:
        raise _Broken(
            "two runs with the same seed end with different bits; draw random numbers from torch's global generator, "
            "and keep no state outside of what hooks return"
        )
    if ends[0] == small.finished(seed=small.plan.blueprint.seed + 1).state_hash():
        raise _Broken("another seed ends with the same bits")
    return "the same seed gives the same bits, another seed gives others"


def _resume(small: _SmallTrial) -> str:
    half, ends = _ROUNDS // 2, []
    for first_rounds in (0, half):
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(Recorder(folder, "check")) as recorder:
            plan = small.small_plan(folder, checkpoint=Checkpoint(every=half))
            fleet = partial(LocalFleet, plan.blueprint, plan.population)
            simulation = Simulation(plan, recorder, fleet, "cpu")
            with simulation.global_settings():
                rounds = iter(simulation)
                while simulation.round < first_rounds:
                    next(rounds)
            ends.append(run_trial(plan, recorder, fleet, "cpu", saved=recorder.saved(plan.trial)))
    if ends[0] != ends[1]:
        raise _Broken(
            f"a run that is resumed after round {half} ends with other bits than one that is not; whatever a round "
            "leaves for the next belongs into the server's or the client's state"
        )
    return f"resumed from a checkpoint after round {half} of {_ROUNDS}, it ends with the same bits"


def _number_of_rounds(small: _SmallTrial) -> str:
    if small.algorithm.traits.depends_on_rounds:
        return "it says that a round depends on how many follow; its trials are not continued with more rounds"
    half, states = _ROUNDS // 2, []
    for rounds in (half, _ROUNDS):
        server = small.server(rounds=rounds, schedule=CONSTANT)
        next(record for record in server.run() if record.stage == "round" and record.round == half)
        states.append(facts(_state(server)))
    if states[0] != states[1]:
        raise _Broken(
            f"after round {half} of {half} it has other bits than after round {half} of {_ROUNDS}; set "
            "the trait depends_on_rounds, so that its trials are not continued with more rounds"
        )
    return "a round does not depend on how many follow, so that a trial can be continued with more rounds"


def _clients_at_once(small: _SmallTrial) -> str:
    width = small.clients - 1
    if width < 2:
        return "not tried: fewer than three clients"
    try:
        return _alone_and_at_once(small.in_double(), width)
    except (_Broken, UsageError):
        raise
    except Exception:  # of code that computes in float32 alone, where rounding may grow
        return _alone_and_at_once(small, width)


def _alone_and_at_once(small: _SmallTrial, width: int) -> str:
    watch = _LocalTraining()
    method = without_channel(small.algorithm)  # a compressed update may jump where rounding differs
    together = small.finished(vmap_clients=width, drop_last=True, algorithm=method)
    alone = small.finished(vmap_clients=1, drop_last=True, algorithm=intercepted(method, watch))
    _check_finite(together)
    if watch.step_draws:
        return f"{width} clients train at once; `step` draws random numbers, so they may end elsewhere than alone"
    for field, norms in _compare(watch.before, _state(alone), _state(together)).items():
        if not norms.agree:
            raise _Broken(
                f"{width} clients trained at once (placement.vmap_clients) end with another {field} than when trained "
                f"alone: it differs by {norms.difference:.2g}, where training changes it by {norms.update:.2g}; `step` "
                "may know a client only by `work` and `down`"
            )
    return f"{width} clients trained at once (placement.vmap_clients) end as when trained alone"


class _LocalTraining:
    """Stands around hooks, and sees the states before the first exchange, and whether `step` draws random numbers."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {"server": {}, "clients": {}}
        self.step_draws = False

    def __call__(self, name: str, hook: Callable[..., Any], self_: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        random = _random_states() if name == "step" else None
        result = hook(self_, ctx, *args, **kwargs)
        if name == "init":
            self.before["server"] = result
        elif name == "join":
            self.before["clients"][ctx.client] = result
        elif name == "step" and _random_states() != random:
            self.step_draws = True
        return result


def _random_states() -> list[bytes]:
    """Return the states of torch's global generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return [state.numpy().tobytes() for state in states]


class _Norms:
    """Norms of a field: of the difference between two ends, of the update to the first, and of the first itself."""

    def __init__(self) -> None:
        self._squares = [0.0, 0.0, 0.0]

    def add(self, start: torch.Tensor | None, alone: torch.Tensor, together: torch.Tensor) -> None:
        """Add the numbers of a tensor of the field; a `start` that is missing counts as zeros."""
        a, b = as_real(alone).double(), as_real(together).double()
        update = a
        if start is not None and start.shape == alone.shape:
            update = a - as_real(start).double()
        for position, values in enumerate((b - a, update, a)):
            self._squares[position] += float(values.square().sum())

    @property
    def difference(self) -> float:
        return math.sqrt(self._squares[0])

    @property
    def update(self) -> float:
        return math.sqrt(self._squares[1])

    @property
    def agree(self) -> bool:
        """Whether the difference is small beside the update, or a matter of rounding."""
        size = math.sqrt(self._squares[2])
        return self.difference <= _SHARE_OF_UPDATE * self.update + _ROUNDING * size


def _compare(before: dict[str, Any], alone: dict[str, Any], together: dict[str, Any]) -> dict[str, _Norms]:
    """Return the norms of each field of the server's and the clients' states.

    Raises:
        _Broken: The states have different fields, tensors of different forms, or other counters.
    """
    first = dict(named_tensors(before))
    norms: dict[str, _Norms] = {}
    for (path, a), (other, b) in zip(named_tensors(alone), named_tensors(together), strict=True):
        if (path, a.shape, a.dtype) != (other, b.shape, b.dtype):
            raise _Broken(f"trained alone, clients have {path} {tuple(a.shape)}, and together {other} {tuple(b.shape)}")
        if not is_counter(a):
            norms.setdefault(_field(path), _Norms()).add(first.get(path), a, b)
        elif not torch.equal(a, b):
            raise _Broken(f"trained alone, clients have another {path} than when trained together")
    return norms


def _field(path: str) -> str:
    """Return the part of a path in `_state` that names the owner and the field, such as "server.weights"."""
    parts = path.split(".")
    return ".".join(parts[:2] if parts[0] == "server" else parts[:3])


def _part_of_the_clients(small: _SmallTrial) -> str:
    if small.clients < 2:
        return "not tried: one client"
    cohort = small.clients // 2
    server = small.server(cohort=cohort, rounds=3)
    before = facts(dict(server.fleet.states))
    for record in server.run():
        after = facts(dict(server.fleet.states))
        idle = set(before) - set(server.sample(record.round)) if record.stage == "round" else set()
        if changed := [client for client in idle if after[client] != before[client]]:
            raise _Broken(f"client {changed[0]} took no part in round {record.round}, but its state changed")
        before = after
    _check_finite(server)
    return f"it runs with {cohort} of {small.clients} clients a round"


def _newcomers(small: _SmallTrial) -> str:
    if small.clients < 2:
        return "not tried: one client"
    without = replace(small.population, clients=small.population.clients[:-1])
    with_newcomer = replace(small.population, unseen_clients=1)
    ends, scores = [], []
    for population in (without, with_newcomer):
        server = small.server(["downloaded"], population, cohort=small.clients - 1)
        scores.append(list(server.run())[-1].scores)
        states = {client: state for client, state in server.fleet.states.items() if client < small.clients - 1}
        ends.append(facts([server.state, states]))
    if ends[0] != ends[1]:
        raise _Broken("training ends with other bits where a client joins after it (unseen_clients=1)")
    if not any(score.unseen for score in scores[1]):
        raise _Broken("a client that joins after training was not scored (unseen_clients=1)")
    return "a client that joins after training changes nothing before, and its model is scored"


def _on_task(small: _SmallTrial, task: str) -> str:
    return _hooks(_SmallTrial(task_plan(small.plan.config, task)))


def _hosts(small: _SmallTrial, launch: Launch) -> str:
    hosts, ends = small.plan.config.placement.hosts, []
    for placement in (replace(small.plan.config.placement, hosts=0), small.plan.config.placement):
        with tempfile.TemporaryDirectory() as folder:
            ends.append(launch(small.small_plan(folder, placement=placement)))
    if ends[0] != ends[1]:
        raise _Broken(
            f"with {hosts} hosts on Ray, it ends with other bits than in this process; hooks may know nothing but what "
            "they are given, since every client may be trained in another process"
        )
    return f"with {hosts} hosts on Ray, it ends with the same bits as in this process"


CHECKS: dict[str, Callable[[_SmallTrial], str]] = {
    "hooks": _hooks,
    "torch": _as_torch,
    "seeds": _seeds,
    "resume": _resume,
    "rounds": _number_of_rounds,
    "at once": _clients_at_once,
    "cohorts": _part_of_the_clients,
    "newcomers": _newcomers,
    **{task: partial(_on_task, task=task) for task in TASKS},
}
"""The parts of the contract by name, in the order in which they are checked. Each returns what it saw."""
