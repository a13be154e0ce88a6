"""DP-SGD of a configuration (`local.privacy`): put into its method, solved for its noise, checked and described."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from rayfed.algorithm import Algorithm, Phase
from rayfed.algorithms.common.channelled import Channelled, channel_of
from rayfed.algorithms.common.private_training import NEIGHBOURS, PrivateTraining, private_training_of
from rayfed.algorithms.fedavg import FedAvg
from rayfed.channel.accounting import SIMULATION_NOTE, check_budget, noise_multiplier
from rayfed.core.errors import UsageError, error_line
from rayfed.core.ids import Moment
from rayfed.core.lr_schedule import CONSTANT
from rayfed.core.optim import SGD
from rayfed.core.private_gradients import ReadsData
from rayfed.core.record_privacy import KEY, RecordPrivacy, sampling_rate
from rayfed.core.rng import global_state_kept
from rayfed.core.trees import named_tensors
from rayfed.core.words import counted
from rayfed.data.population import Client, ClientTable, Examples, Population, small_population, spread
from rayfed.data.sets import TABLES
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.engine.training import steps_of
from rayfed.experiments.config import Config
from rayfed.sampling.base import BySize, Poisson, Uniform, WithoutReplacement

_CLIENTS = 32  # of a trial of the method, at most: options may name clients
_RECORDS = 4
_LR = 0.5
_SAME = 1e-3  # of an update, by which two ways to compute it may differ
_ROUNDING = 3e-6  # the same, of all weights
_OPEN = RecordPrivacy(noise_multiplier=0, max_grad_norm=1e30)
_FEDAVG = FedAvg()
_OTHERS = "use a method such as fedavg, fedprox, scaffold, fedper or ditto"
_RARE = 1e-12  # the probability that a batch has more records than it is filled up to


def with_private_training(config: Config, population: Population) -> Algorithm:
    """Return the method of `config`, with private gradients if it asks for them."""
    method = config.algorithm
    privacy = config.local.privacy
    if privacy is None:
        return method
    rows = 1
    if config.placement.vmap_clients != 1:
        rows = _largest_batch(config.local.batch_size, population.participants.train_sizes())
    return PrivateTraining(base=method, privacy=privacy, sigma=privacy.noise_multiplier or 0.0, rows=rows)


def _largest_batch(batch_size: int, sizes: np.ndarray) -> int:
    """Return the most records that a batch has, almost surely."""
    from scipy.stats import binom  # takes half a second

    rates = [sampling_rate(batch_size, size) for size in sizes.tolist()]
    return int(binom.isf(_RARE, sizes, rates).max())


def with_solved_noise(blueprint: Blueprint, population: Population) -> Blueprint:
    """Return `blueprint` with the noise for `local.privacy.target_epsilon`; without one, as it is.

    Raises:
        UsageError: No amount of noise is enough.
    """
    method = private_training_of(blueprint.algorithm)
    if method is None:
        return blueprint
    blueprint = replace(blueprint, cuda_graphs=False)  # batches have many sizes
    privacy = method.privacy
    if privacy.target_epsilon is None:
        return blueprint
    sigma = max(_noise_for(privacy, use) for use in _uses(blueprint, population))
    private = replace(method, sigma=sigma)
    whole = blueprint.algorithm
    if isinstance(whole, Channelled):
        return replace(blueprint, algorithm=replace(whole, base=private))
    return replace(blueprint, algorithm=private)


@dataclass(frozen=True, order=True)
class _Use:
    """How often the records of a client are used: in so many steps, each with the probability `rate`."""

    records: int
    rate: float
    steps: int


def _uses(blueprint: Blueprint, population: Population) -> list[_Use]:
    """Return how the records of participants are used at most, one for each number of records."""
    ctx = blueprint.context(population, "cpu")
    sizes = blueprint.training_examples(population)[: len(population.participants)]
    moments = [Moment("setup", 0, 0)]
    for round in range(1, blueprint.rounds + 1):
        moments.append(Moment("round", round, 0))
    moments.append(Moment("final", blueprint.rounds + 1, 0))
    uses = []
    for records in np.unique(sizes).tolist():
        client = int((sizes == records).argmax())
        of_client = ctx.at(client=client, examples=records)
        steps = 0
        for moment in moments:
            for number, exchange in enumerate(blueprint.algorithm.exchanges(moment.stage)):
                now = of_client.at(moment._replace(exchange=number))
                steps += steps_of(exchange, now, drop_last=blueprint.drop_last)
        uses.append(_Use(records, sampling_rate(blueprint.batch_size, records), steps))
    return uses


def _noise_for(privacy: RecordPrivacy, use: _Use) -> float:
    """Return the least σ with which a client with this use spends at most the target."""
    if not use.steps:
        return 0.0
    target = privacy.target_epsilon
    delta = privacy.delta
    assert target is not None, "there is a target"
    assert delta is not None, "checked by the options"
    check_budget(target, delta, use.steps, rate=use.rate, where=KEY, key="target_epsilon")
    return noise_multiplier(target, delta, rate=use.rate, steps=use.steps, accountant=privacy.accountant)


# What a user should know


def record_privacy_notes(blueprint: Blueprint, population: Population) -> Iterator[str]:
    """Yield what is guaranteed for a record of each client, and what is not; nothing without private gradients."""
    method = private_training_of(blueprint.algorithm)
    if method is None:
        return
    privacy = method.privacy
    if not method.sigma:
        yield f"{KEY}: gradients of records are clipped, without noise: there is no guarantee"
        return
    ctx = blueprint.context(population, "cpu")
    spent = []
    for use in _uses(blueprint, population):
        of_use = method.privacy_of_record(ctx.at(examples=use.records), use.steps)
        assert of_use is not None, "there is noise"
        spent.append(of_use.epsilon)
    rounds = counted(blueprint.rounds, "round")
    span = f"{min(spent):.3g} to {max(spent):.3g}"
    if f"{min(spent):.3g}" == f"{max(spent):.3g}":
        span = f"{max(spent):.3g}"
    yield (
        f"{KEY}: ε of each client after {rounds}: {span} at δ={privacy.delta:g} by {privacy.accountant}, if it takes "
        f"part in all of them; σ={method.sigma:.4g}, C={privacy.max_grad_norm:g}; neighbours: {NEIGHBOURS}"
    )
    yield f"{KEY}: numbers of records are taken as public; what validation or test records decide is not counted"
    channel = channel_of(blueprint.algorithm)
    if channel is None or channel.privacy is None:
        yield SIMULATION_NOTE


# What cannot be right


def check_record_privacy(config: Config, blueprint: Blueprint, population: Population, evaluation: Evaluation) -> None:
    """Raise UsageError if something but private gradients would tell of single records."""
    method = private_training_of(blueprint.algorithm)
    if method is None:
        return
    for fault in _faults(config, blueprint, population, evaluation):
        raise UsageError(fault)
    for fault in _faults_of_method(blueprint, method, population):
        raise UsageError(fault)
    _try_out(blueprint, method, population)


def _faults(config: Config, blueprint: Blueprint, population: Population, evaluation: Evaluation) -> Iterator[str]:
    """Yield what else of the configuration would use the clients' records, in one line each."""
    kind = config.data.options.get("standardize")
    remedy = "leave it out, and scale columns by numbers that are public"
    if config.data.name == "heart_disease":
        kind = kind or "hospital"
        remedy = "use data.standardize=fixed"
    takes_records = kind in ("client", "global", "hospital", "pooled")
    if takes_records and config.data.name in (*TABLES, "heart_disease"):
        yield f"data.standardize={kind}: takes means of training records, which {KEY}.* does not protect; {remedy}"
    if "adapted" in evaluation.points:
        yield f"evaluate.points=[adapted]: trains beyond the steps that {KEY}.* counts; score another point"
    if population.unseen_clients:
        yield f"unseen_clients={population.unseen_clients}: train after the steps that {KEY}.* counts; leave it out"
    if type(blueprint.sampler) not in (Uniform, BySize, WithoutReplacement, Poisson):
        yield f"sampling.name={config.sampling.name}: uses what clients report, which {KEY}.* does not protect"
    if blueprint.buffered is not None:
        yield f"schedule.name=buffered: {KEY}.* counts the steps of rounds that wait; use synchronous rounds"
    if blueprint.bf16:
        yield f"local.precision=bf16: would round what {KEY}.* clips; use float32"
    if blueprint.augment is not None and ":" in (config.augment.name or ""):
        yield f"augment.name={config.augment.name}: may mix the records of a batch, which {KEY}.* clips one by one"
    channel = channel_of(blueprint.algorithm)
    if channel is not None and channel.attack is not None and channel.attack.poisons:
        yield f"attack.name={channel.attack.name}: trains on false data, of which {KEY}.* knows nothing; leave out one"


def _faults_of_method(blueprint: Blueprint, method: PrivateTraining, population: Population) -> Iterator[str]:
    """Yield why there are no private gradients of this method and this model, as far as one can tell without a step."""
    task = blueprint.context(population, "cpu").task
    if task.batch_norm_names and task.batch_norm != "frozen":
        yield (
            f"{KEY}: batch norm mixes the records of a batch, whose gradients could not be told apart; use "
            "batch_norm=frozen, or a model without it, such as one with group norm"
        )
    named = f"algorithm.name={method.name}"
    for exchange in _exchanges(method.base):
        if exchange.prepares_batches:
            yield f"{KEY}: {named} changes the records of a batch together, which would not be protected"
        ctx = blueprint.context(population, "cpu").at(client=0, examples=_RECORDS)
        if any(phase.batch_size is not None for phase in exchange.phases(ctx)):
            yield f"{KEY}: {named} has batches of several sizes, and ε counts one probability for all steps"


def _exchanges(method: Algorithm) -> list[Any]:
    return [*method.setup_exchanges, *method.round_exchanges, *method.final_exchanges]


def _try_out(blueprint: Blueprint, method: PrivateTraining, population: Population) -> None:
    """Compare rounds of private steps, without noise and bound, with those of the method's own steps.

    Both have all records in each batch, and so the same end, if the loss is a mean over records that each model's
    output for one of them decides. Layers that drop at random drop nothing.
    """
    named = f"algorithm.name={method.name}"
    with global_state_kept():
        run = partial(_end, blueprint, _few_records(population))
        if _agrees(run, method.base, named):
            return
        if method.base != _FEDAVG and _agrees(run, _FEDAVG, named):
            raise UsageError(f"{KEY}: {named} computes with all records of a batch together; {_OTHERS}")
    raise UsageError(
        f"{KEY}: the loss of a batch is not the mean of the losses of its records with this model, as with weights of "
        "classes, random draws or buffers that training changes; use a loss that is, such as plain cross-entropy"
    )


def _agrees(run: Callable[..., dict[str, Tensor]], method: Algorithm, named: str) -> bool:
    """Return whether private steps without noise and bound end as the method's own steps do."""
    try:
        end = run(PrivateTraining(base=method, privacy=_OPEN))
    except ReadsData as error:
        raise UsageError(f"{KEY}: {named} {error}, which ε would not count; {_OTHERS}") from error
    except UsageError:
        raise
    except Exception as error:  # torch or a user's model may raise anything
        raise UsageError(f"{KEY}: no gradient of a single record: {error_line(error)}") from error
    own = run(method)
    start = run(method, lr=1e-30)
    return _is_near(end, own, start)


def _few_records(population: Population) -> Population:
    """Return some clients with a few records each, from all over their data."""
    small = small_population(population, _CLIENTS, [2**31], 1)
    clients = []
    for client in small.clients:
        clients.append(Client(client.id, client.domain, _spread(client.train), client.val, client.test))
    return replace(small, clients=ClientTable.of(clients))


def _spread(part: Examples) -> Examples:
    return part.select(spread(len(part), _RECORDS)).read()


def _end(blueprint: Blueprint, population: Population, method: Algorithm, *, lr: float = _LR) -> dict[str, Tensor]:
    """Return all tensors of server and clients after the setup, two rounds of one step, and the final stage."""
    plan = blueprint.undisturbed(
        algorithm=method,
        model=_without_dropout(blueprint.model),
        optimizer=SGD(lr=lr),
        local=Phase("train", steps=1),
        batch_size=_RECORDS,
        rounds=2,
        cohort=len(population.participants),
        augment=None,
        schedule=CONSTANT,
    )
    fleet = LocalFleet(plan, population)
    server = Server(plan, population, fleet, Evaluation(points=(), splits=()))
    for _ in server.run():
        pass
    states = {str(client): fleet.states[client] for client in fleet.states}
    return dict(named_tensors({"server": server.state, "clients": states}))


def _without_dropout(model: nn.Module) -> nn.Module:
    """Return a copy of `model` with layers that drop nothing."""
    copied = copy.deepcopy(model)
    for layer in copied.modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
    return copied


def _is_near(end: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor]) -> bool:
    """Return whether two ends differ by rounding, in view of how far the second one is from `start`."""
    if end.keys() != other.keys():
        return False
    update = _distance(other, start)
    size = _distance(other, {})
    return _distance(end, other) <= _SAME * update + _ROUNDING * size


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    squares = torch.zeros((), dtype=torch.float64)
    for name, value in one.items():
        difference = value.double()
        if name in other:
            difference = difference - other[name].double()
        squares += difference.square().sum()
    return float(squares.sqrt())
