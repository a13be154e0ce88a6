"""Refusals of a channel that follow from what the method sends, from how clients are sampled, and from the clock."""

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from rayfed.algorithm import Algorithm
from rayfed.algorithms.common.channelled import Channelled, channel_of
from rayfed.algorithms.common.wrapper import Wrapper, wrapped_algorithms
from rayfed.channel.channel import Channel
from rayfed.channel.robust import Mean
from rayfed.core.errors import UsageError
from rayfed.core.ids import Stage
from rayfed.core.trees import is_counter
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.channel_probe import Sent, what_is_sent
from rayfed.experiments.checks.method import key_of_lost_clients
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import CHANNEL_PARTS
from rayfed.sampling.base import Poisson, Uniform, WithoutReplacement

_NOTHING = "sends nothing"


def check_rounds_of_channel(trial: Trial) -> None:
    """Refuse a sampler or a clock that does not go with the channel."""
    channel = channel_of(trial.blueprint.algorithm)
    if channel is not None:
        for fault in _faults_of_rounds(trial.blueprint, channel):
            raise UsageError(fault)


def check_channel(trial: Trial) -> None:
    """Refuse a method that does not go with the channel around it."""
    method = trial.blueprint.algorithm
    channel = channel_of(method)
    if channel is None or not isinstance(method, Channelled):
        return
    obstacles = channel_obstacles(trial, method.base, privacy=channel.privacy is not None)
    attack = channel.attack
    if attack is not None and not (attack.knows_others or attack.sends_other) and obstacles["attack"] != _NOTHING:
        obstacles["attack"] = ""  # false data do harm wherever anything is sent
    for part in _parts_in_use(channel):
        if obstacles[part]:
            raise UsageError(f"{part}: algorithm.name={method.name} {obstacles[part]}")


def _parts_in_use(channel: Channel) -> list[str]:
    in_use = {
        "privacy": channel.privacy is not None,
        "compression": channel.compression is not None,
        "attack": channel.attack is not None,
        "robust": type(channel.rule) is not Mean,
    }
    return [part for part in CHANNEL_PARTS if in_use[part]]


def channel_obstacles(trial: Trial, method: Algorithm, *, privacy: bool = True) -> dict[str, str]:
    """Return why `method` does not take each of `CHANNEL_PARTS`, "" where it does.

    Without `privacy`, its obstacles are not looked for, which would take longer.
    """
    sent = what_is_sent(trial, method, whole=False)
    rounds = [one for one in sent if one.stage == "round"]
    updates = _obstacle_of_updates(rounds)
    obstacles = dict.fromkeys(CHANNEL_PARTS, updates)
    if updates:
        return obstacles
    if any(one.server_side_weighting for one in method.round_exchanges):
        obstacles["robust"] = "lets clients' own reports decide their weights, which a rule would replace"
    if privacy:
        obstacles["privacy"] = _obstacle_of_privacy(trial, method, sent)
    return obstacles


def _obstacle_of_updates(rounds: Sequence[Sent]) -> str:
    """Return why there are no updates to compress, to attack or to protect; "" if there are some."""
    tensors: list[Tensor] = []
    others: list[str] = []
    for one in rounds:
        tensors += one.updates
        others += one.others
    if not tensors and not others:
        return _NOTHING
    if not tensors:
        return f"averages nothing, and sends {_listed(others)}"
    if all(map(is_counter, tensors)):
        return "averages integers alone, which have no update"
    return ""


def _obstacle_of_privacy(trial: Trial, method: Algorithm, sent: Sequence[Sent]) -> str:
    """Return what the server would learn of single clients beside the mean of their updates; "" for nothing."""
    if any(_has_privacy(one) for one in (method, *wrapped_algorithms(method))):
        return "has privacy of its own; leave out privacy.*"
    leaking = "which would not be protected"
    for one in sent:
        names = one.sent
        if one.stage == "round":
            names = one.others
        if names:
            return f"sends {_listed(names)} {_WHEN[one.stage]}, {leaking}"
    weighs = _obstacle_of_weights(trial, method)
    if weighs:
        return weighs
    whole = what_is_sent(trial, method, whole=True)
    if any(one.reads_examples for one in whole):
        return f"uses the clients' numbers of examples, {leaking}"
    if any(one.stage == "final" and one.sent for one in whole):
        return f"sends {_listed(whole[-1].sent)} {_WHEN['final']}, {leaking}"
    return ""


_WHEN: dict[Stage, str] = {"setup": "before round 1", "round": "of every client", "final": "after the last round"}


def _has_privacy(method: Algorithm) -> bool:
    """Return whether a method spends privacy; wrappers only say what their base spends."""
    if isinstance(method, Channelled):
        return method.channel.privacy is not None
    return not isinstance(method, Wrapper) and type(method).privacy_spent is not Algorithm.privacy_spent


def _obstacle_of_weights(trial: Trial, method: Algorithm) -> str:
    """Return that clients weigh by something of theirs; "" if all weigh the same."""
    weights = set()
    for number, exchange in enumerate(method.round_exchanges):
        for client, examples in itertools.product(trial.cohort_ctx.cohort[:2], (1, 2)):
            weight = exchange.weight(trial.cohort_ctx.at(client=client), examples)
            weights.add((number, weight))
    if len(weights) == len(method.round_exchanges):
        return ""
    remedy = ""
    key = "algorithm"
    for one in (method, *wrapped_algorithms(method)):
        if hasattr(one, "weighting"):
            remedy = f"; give {key}.weighting=equal"
        key += ".base"
    return f"weighs clients by their numbers of examples, which would not be protected{remedy}"


def _faults_of_rounds(blueprint: Blueprint, channel: Channel) -> Iterator[str]:
    """Yield what does not go with the sampler, with clients that drop out, or with the clock."""
    sampler = blueprint.sampler
    privacy = channel.privacy
    rule = channel.rule
    named = f"sampling.name: {type(sampler).__name__}"
    if privacy is not None and type(sampler) not in (Uniform, Poisson, WithoutReplacement):
        yield f"{named} uses what clients report, which privacy.* would not protect; use poisson or uniform"
    if channel.gathers and sampler.reweights:
        yield f"{named} weighs clients in the mean, whose place {_gatherer(channel)} takes; use uniform"
    if rule.least(channel.byzantine) > 1 and type(sampler) is Poisson:
        yield f"sampling.name=poisson: robust.name={rule.name} needs cohorts of one size; use uniform"
    if blueprint.availability.loses_clients:
        key = key_of_lost_clients(blueprint.availability)
        if privacy is not None:
            yield f"{key}: privacy.* needs cohorts that do not depend on clients; leave it out"
        if rule.least(channel.byzantine) > 1:
            yield f"{key}: robust.name={rule.name} needs cohorts of one size; leave it out"
    if blueprint.buffered is not None and privacy is not None and privacy.adapts:
        yield "privacy.quantile: clients that started earlier would be clipped by another bound; use synchronous rounds"
    if channel.compression is not None and channel.compression.down is not None:
        if blueprint.buffered is not None:
            yield "compression.down: clients that start at different times have no common copy; use synchronous rounds"
        if blueprint.clock.sends:
            yield "compression.down: the clock counts whole downloads; leave out the bandwidths, or compression.down"


def _gatherer(channel: Channel) -> str:
    if channel.rule.gathers or channel.attack is None:
        return f"robust.name={channel.rule.name}"
    return f"attack.name={channel.attack.name}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(names))
