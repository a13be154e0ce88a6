"""What a user should know about the channel of a plan, printed before a run."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from rayfed.algorithms.common.channelled import Channelled, channel_of
from rayfed.channel.accounting import SIMULATION_NOTE
from rayfed.channel.channel import Channel
from rayfed.core.trees import is_counter
from rayfed.core.words import counted, first_few, size_text
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.channel_probe import Sent, what_is_sent
from rayfed.experiments.checks.trial import Trial


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
    place = "what the server sends; uploads are not protected"
    if privacy.local:
        place = "what each client sends"
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
    before = 0
    after = 0
    for one in sent:
        counters = list(filter(is_counter, one.updates))
        sizes = [tensor.numel() for tensor in one.updates if not is_counter(tensor)]
        before += _bytes_of(one.updates)
        after += compression.nbytes(sizes) + _bytes_of(counters)
    name = compression.name
    if compression.feedback:
        name += " with feedback"
    rest = _on_other_fields(sent, "are sent as they are")
    return f"compression: {name}: a client sends {size_text(after)} in place of {size_text(before)}{rest}"


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _on_other_fields(sent: Sequence[Sent], what: str) -> str:
    """Return what happens to the fields that are not averaged, "" if there are none."""
    names: list[str] = []
    for one in sent:
        names += one.others
    if not names:
        return ""
    return f"; {' and '.join(names)} {what}"


def _on_attack(channel: Channel, population: Population) -> str:
    attack = channel.attack
    assert attack is not None, "there is an attack"
    ids = sorted(population.clients.id(place) for place in channel.attackers)
    scored = "are not scored"
    if attack.scored:
        scored = "are scored, too"
    clients = counted(len(population.participants), "client")
    return f"attack: {attack.name} by {len(ids)} of {clients} ({first_few(ids) or 'nobody'}), who {scored}"


def _on_memory(channel: Channel, blueprint: Blueprint, sent: list[Sent]) -> str:
    of_client = sum(_bytes_of(one.updates) for one in sent)
    rule = channel.rule.name
    if channel.rule.least(channel.byzantine) > 1:
        rule += f" with f={channel.byzantine}"
    clients = counted(blueprint.cohort, "client")
    size = size_text(of_client * blueprint.cohort)
    rest = _on_other_fields(sent, "are neither attacked nor compared")
    return f"robust: {rule}: the server holds the updates of {clients}, {size}{rest}"
