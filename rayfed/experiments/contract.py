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
from rayfed.core.round_record import Record
from rayfed.core.trees import as_real, is_counter, named_tensors
from rayfed.data.population import Population, inputs_in_double, small_population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.host import LocalFleet
from rayfed.engine.purity import ImpureHook, facts, intercepted, pure
from rayfed.engine.server import Server
from rayfed.experiments.checks import check_trial
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import Checkpoint, Placement, Tracking
from rayfed.experiments.contract_tasks import TASKS, task_plan
from rayfed.experiments.plan import Plan
from rayfed.experiments.plan_channel import for_fewer_clients, without_channel
from rayfed.experiments.plan_model import UsersModel
from rayfed.experiments.proof import prove_training, takes_plain_steps
from rayfed.experiments.simulation import Simulation, run_trial
from rayfed.records.recorder import Recorder

_CLIENTS = 4
_ROUNDS = 4
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
                found = error_line(error)
                if subject in TASKS:
                    found += (
                        "; a method that takes only classes has the trait requires_classes, one array "
                        "computes_with_inputs"
                    )
                yield Finding(subject, found, kept=False)


class _SmallTrial:
    """A small form of a plan: few clients, few batches, few rounds, and only the options of the configuration."""

    def __init__(self, plan: Plan):
        self.plan = plan
        number = min(_CLIENTS, len(plan.population.participants))
        self.algorithm = for_fewer_clients(plan.blueprint.algorithm, number)
        self.batch_size = min(plan.blueprint.batch_size, _BATCH)
        kept_share = 1 - self.algorithm.held_out_share
        examples = [math.ceil((batches * self.batch_size + 1) / kept_share) for batches in _BATCHES]
        self.population = small_population(plan.population, _CLIENTS, examples, _SCORED)
        self.clients = len(self.population.participants)
        self.points: tuple[str, ...] = ("downloaded", "trained", "adapted")
        global_model, _ = self.blueprint().global_model(self.population)
        if global_model is not None:
            self.points = ("global", *self.points)

    def in_double(self) -> "_SmallTrial":
        """Return this trial with its model, its loss and its inputs in float64, so that differences are no rounding."""
        given = self.plan.blueprint
        training_loss = None
        if given.training_loss is not None:
            training_loss = loss_in_double(given.training_loss)
        model = module_in_double(copied(given.model))
        changed = replace(given, model=model, loss=loss_in_double(given.loss), training_loss=training_loss)
        small = copy.copy(self)
        small.plan = replace(self.plan, blueprint=changed)
        small.population = inputs_in_double(self.population)
        return small

    def blueprint(self, **changes: Any) -> Blueprint:
        """Return the blueprint of the small form with `changes`."""
        local = self.plan.blueprint.local._replace(epochs=1, steps=None, batch_size=None)
        small = self.plan.blueprint.undisturbed(
            algorithm=self.algorithm,
            batch_size=self.batch_size,
            local=local,
            rounds=2,
            cohort=self.clients,
            threads=1,
            data_on_device=None,
        )
        return replace(small, **changes)

    def small_plan(self, folder: str, **changes: Any) -> Plan:
        """Return a plan of four rounds with `changes` of the configuration. Its results are written to `folder`."""
        config = replace(
            self.plan.config,
            rounds=_ROUNDS,
            results=folder,
            experiment="check",
            tracking=Tracking(tensorboard=False),
        )
        return replace(
            self.plan,
            config=replace(config, **changes),
            population=self.population,
            blueprint=self.blueprint(rounds=_ROUNDS),
            evaluation=Evaluation(every=_ROUNDS, points=self.points[:1]),
        )

    def server(self, points: Sequence[str] = (), population: Population | None = None, **changes: Any) -> Server:
        """Return a server in this process, which scores models at `points` after each round.

        Raises:
            UsageError: The algorithm refuses the blueprint with `changes`.
        """
        blueprint = self.blueprint(**changes)
        population = population or self.population
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

    attributes = _class_attributes(small.algorithm)
    server = small.server(small.points, algorithm=intercepted(small.algorithm, watched))
    scored: set[str] = set()
    for record in server.run():
        scored.update(score.point for score in record.scores)
    new = _class_attributes(small.algorithm) - attributes
    if new:
        first = min(name for name, _ in new)
        raise _Broken(f"the class got the attribute {first} while it ran; state belongs into what hooks return")
    for point in small.points:
        if point not in scored:
            raise _Broken(f"nothing was scored at {point}")
    known = ", ".join(small.points)
    default = small.algorithm.traits.default_eval_point
    if default not in ("global", *small.points):
        raise _Broken(f"default_eval_point is {default}; known: {known}")
    outputs = ", ".join(map(str, sorted(shapes)))
    return f"no hook modified its inputs; scored as {known}; outputs per example: {outputs}"


def _class_attributes(algorithm: Algorithm) -> set[tuple[str, type]]:
    """Return the attributes of the classes of `algorithm`: the name of each, and the class that has it."""
    attributes: set[tuple[str, type]] = set()
    for kind in type(algorithm).__mro__:
        attributes.update((name, kind) for name in vars(kind))
    return attributes


def _as_torch(small: _SmallTrial) -> str:
    blueprint = small.blueprint()
    method: LocalTraining = FedAvg()
    who = "two steps of FedAvg on this network end"
    own = without_channel(small.algorithm)
    if takes_plain_steps(own):
        method = own
        who = "two local steps end"
    users = UsersModel.of(blueprint.model)
    obstacle = prove_training(Trial(blueprint, small.population), users, method)
    return obstacle or f"{who} as in plain PyTorch"


def _seeds(small: _SmallTrial) -> str:
    first = small.finished().state_hash()
    second = small.finished().state_hash()
    if first != second:
        raise _Broken(
            "two runs with the same seed end with different bits; draw random numbers from torch's global generator, "
            "and keep no state outside of what hooks return"
        )
    other = small.finished(seed=small.plan.blueprint.seed + 1)
    if first == other.state_hash():
        raise _Broken("another seed ends with the same bits")
    return "the same seed gives the same bits, another seed gives others"


def _resume(small: _SmallTrial) -> str:
    half = _ROUNDS // 2
    whole = _interrupted_after(small, 0, save_every=half)
    resumed = _interrupted_after(small, half, save_every=half)
    if whole != resumed:
        raise _Broken(
            f"a run that is resumed after round {half} ends with other bits than one that is not; whatever a round "
            "leaves for the next belongs into the server's or the client's state"
        )
    return f"resumed from a checkpoint after round {half} of {_ROUNDS}, it ends with the same bits"


def _interrupted_after(small: _SmallTrial, rounds: int, *, save_every: int) -> str:
    """Return the hash of the final state of a run that is left after some rounds, and resumed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Recorder(folder, "check")) as recorder:
        plan = small.small_plan(folder, checkpoint=Checkpoint(every=save_every))
        fleet = partial(LocalFleet, plan.blueprint, plan.population)
        simulation = Simulation(plan, recorder, fleet, "cpu")
        with simulation.global_settings():
            records = iter(simulation)
            while simulation.round < rounds:
                next(records)
        return run_trial(plan, recorder, fleet, "cpu", saved=recorder.saved(plan.trial))


def _number_of_rounds(small: _SmallTrial) -> str:
    if small.algorithm.traits.depends_on_rounds:
        return "it says that a round depends on how many follow; its trials are not continued with more rounds"
    half = _ROUNDS // 2
    if _facts_after(small, half, of=half) != _facts_after(small, half, of=_ROUNDS):
        raise _Broken(
            f"after round {half} of {half} it has other bits than after round {half} of {_ROUNDS}; set "
            "the trait depends_on_rounds, so that its trials are not continued with more rounds"
        )
    return "a round does not depend on how many follow, so that a trial can be continued with more rounds"


def _facts_after(small: _SmallTrial, number: int, *, of: int) -> Any:
    """Return as plain data the states after the round `number` of a run with `of` rounds."""
    server = small.server(rounds=of, schedule=CONSTANT)
    next(record for record in server.run() if record.stage == "round" and record.round == number)
    return facts(_state(server))


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
        if name == "step":
            return self._step(hook, self_, ctx, *args, **kwargs)
        result = hook(self_, ctx, *args, **kwargs)
        if name == "init":
            self.before["server"] = result
        elif name == "join":
            self.before["clients"][ctx.client] = result
        return result

    def _step(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        random = _random_states()
        result = hook(*args, **kwargs)
        if _random_states() != random:
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
        a = as_real(alone).double()
        b = as_real(together).double()
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
    if parts[0] == "server":
        return ".".join(parts[:2])
    return ".".join(parts[:3])


def _part_of_the_clients(small: _SmallTrial) -> str:
    if small.clients < 2:
        return "not tried: one client"
    cohort = small.clients // 2
    server = small.server(cohort=cohort, rounds=3)
    before = facts(dict(server.fleet.states))
    for record in server.run():
        after = facts(dict(server.fleet.states))
        idle: set[Any] = set()
        if record.stage == "round":
            idle = set(before) - set(server.sample(record.round))
        for client in idle:
            if after[client] != before[client]:
                raise _Broken(f"client {client} took no part in round {record.round}, but its state changed")
        before = after
    _check_finite(server)
    return f"it runs with {cohort} of {small.clients} clients a round"


def _newcomers(small: _SmallTrial) -> str:
    if small.clients < 2:
        return "not tried: one client"
    without = replace(small.population, clients=small.population.clients[:-1])
    with_newcomer = replace(small.population, unseen_clients=1)
    end, _ = _end_and_last_record(small, without)
    same_end, last = _end_and_last_record(small, with_newcomer)
    if end != same_end:
        raise _Broken("training ends with other bits where a client joins after it (unseen_clients=1)")
    if not any(score.unseen for score in last.scores):
        raise _Broken("a client that joins after training was not scored (unseen_clients=1)")
    return "a client that joins after training changes nothing before, and its model is scored"


def _end_and_last_record(small: _SmallTrial, population: Population) -> tuple[Any, Record]:
    """Return as plain data the states of the server and of all clients but the last one, and the last record."""
    others = small.clients - 1
    server = small.server(["downloaded"], population, cohort=others)
    *_, last = server.run()
    states = {client: state for client, state in server.fleet.states.items() if client < others}
    return facts([server.state, states]), last


def _on_task(small: _SmallTrial, task: str) -> str:
    return _hooks(_SmallTrial(task_plan(small.plan.config, task)))


def _hosts(small: _SmallTrial, launch: Launch) -> str:
    placement = small.plan.config.placement
    here = replace(placement, hosts=0)
    if _end_with(small, here, launch) != _end_with(small, placement, launch):
        raise _Broken(
            f"with {placement.hosts} hosts on Ray, it ends with other bits than in this process; hooks may know "
            "nothing but what they are given, since every client may be trained in another process"
        )
    return f"with {placement.hosts} hosts on Ray, it ends with the same bits as in this process"


def _end_with(small: _SmallTrial, placement: Placement, launch: Launch) -> str:
    """Return the hash of the final state of a run with a placement."""
    with tempfile.TemporaryDirectory() as folder:
        return launch(small.small_plan(folder, placement=placement))


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
