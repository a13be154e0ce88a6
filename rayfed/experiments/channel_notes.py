"""What a user should know about the channel of a plan, printed before a run."""

from collections.abc import Iterator

from torch import Tensor

from rayfed.algorithms.common.channelled import Channelled, channel_of
from rayfed.channel.accounting import SIMULATION_NOTE
from rayfed.channel.channel import Channel
from rayfed.core.trees import is_counter
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.channel_probe import Sent, what_is_sent
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.units import counted, size_text

_SHOWN = 6  # clients by number


def channel_notes(trial: Trial) -> Iterator[str]:
    """Yield a line on each part of the channel; none without a channel."""
    blueprint = trial.blueprint
    population = trial.population
    method = blueprint.algorithm
    channel = channel_of(method)
    if channel is None or not isinstance(method, Channelled):
        return
    sent = [one for one in what_is_sent(trial, method.base, whole=False) if one.stage == "round"]
    if channel.privacy is not None:
        yield from _on_privacy(channel, blueprint, len(population.participants))
    if channel.compression is not None:
        yield _on_compression(channel, sent)
    if channel.attack is not None:
        yield _on_attack(channel, population)
    if channel.gathers:
        yield _on_memory(channel, blueprint, sent)


def _on_privacy(channel: Channel, blueprint: Blueprint, clients: int) -> Iterator[str]:
    privacy = channel.privacy
    assert privacy is not None, "there is privacy"
    how = channel.composition(blueprint.rounds, clients, blueprint.cohort)
    place = "what each client sends" if privacy.local else "what the server sends; uploads are not protected"
    yield f"privacy: {privacy.note(how)}; neighbours: {channel.neighbours}; it protects {place}"
    if privacy.noise_cohort is not None:
        yield (
            f"privacy.noise_cohort={privacy.noise_cohort}: noise and ε are those of a deployment with cohorts of this "
            "size; for the cohorts of this simulation there would be more noise"
        )
    yield SIMULATION_NOTE


def _on_compression(channel: Channel, sent: list[Sent]) -> str:
    compression = channel.compression
    assert compression is not None, "there is compression"
    tensors = [one.updates for one in sent]
    whole = sum(tensor.nbytes for each in tensors for tensor in each)
    encoded = sum(compression.nbytes(_sizes(each)) for each in tensors)
    counters = sum(tensor.nbytes for each in tensors for tensor in each if is_counter(tensor))
    feedback = " with feedback" if compression.feedback else ""
    others = [name for one in sent for name in one.others]
    rest = f"; {' and '.join(others)} are sent as they are" if others else ""
    return (
        f"compression: {compression.name}{feedback}: a client sends {size_text(encoded + counters)} in place of "
        f"{size_text(whole)}{rest}"
    )


def _sizes(tensors: list[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors if not is_counter(tensor)]


def _on_attack(channel: Channel, population: Population) -> str:
    attack = channel.attack
    assert attack is not None, "there is an attack"
    ids = sorted(population.clients.id(place) for place in channel.attackers)
    named = ", ".join(map(str, ids[:_SHOWN])) + (", …" if len(ids) > _SHOWN else "")
    scored = "are scored, too" if attack.scored else "are not scored"
    clients = counted(len(population.participants), "client")
    return f"attack: {attack.name} by {len(ids)} of {clients} ({named or 'nobody'}), who {scored}"


def _on_memory(channel: Channel, blueprint: Blueprint, sent: list[Sent]) -> str:
    size = sum(tensor.nbytes for one in sent for tensor in one.updates)
    tolerated = f" with f={channel.byzantine}" if channel.rule.least(channel.byzantine) > 1 else ""
    held = (
        f"the server holds the updates of {counted(blueprint.cohort, 'client')}, {size_text(size * blueprint.cohort)}"
    )
    others = [name for one in sent for name in one.others]
    rest = f"; {' and '.join(others)} are neither attacked nor compared" if others else ""
    return f"robust: {channel.rule.name}{tolerated}: {held}{rest}"
