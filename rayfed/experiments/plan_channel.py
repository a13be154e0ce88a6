"""The channel of a configuration, put around its method."""

import math
from dataclasses import replace
from typing import Any

from rayfed.algorithm import Algorithm
from rayfed.algorithms.common.channelled import Channelled, channel_of
from rayfed.channel.attacks import Attack, Backdoor, drawn_attackers
from rayfed.channel.channel import Channel
from rayfed.channel.robust import Rule
from rayfed.core.errors import UsageError
from rayfed.core.words import first_few
from rayfed.data.population import Population
from rayfed.experiments.components import Component
from rayfed.experiments.config import CHANNEL_PARTS, COMPONENTS, Config
from rayfed.experiments.plan_record_privacy import with_private_training
from rayfed.metrics.attacks import AttackSuccess
from rayfed.metrics.base import Metric
from rayfed.records.files import ClientRow

_SAMPLINGS = ("poisson", "without_replacement")  # which accountants of privacy tell from uniform cohorts


def with_channel(config: Config, population: Population, cohort: int) -> Algorithm:
    """Return the method of `config` with the channel of `config`; without one, the method as it is.

    Args:
        population: The clients, of whom some may attack.
        cohort: The clients in a round.
    """
    method = with_private_training(config, population)
    if all(getattr(config, part).values == {"name": COMPONENTS[part]} for part in CHANNEL_PARTS):
        return method
    attack: Attack | None = _built(config.attack)
    rule: Rule = config.robust.build()
    attackers = _attackers(attack, population, config.seed)
    schedule = config.schedule.build()
    sampling = "uniform"
    if config.sampling.name in _SAMPLINGS:
        sampling = config.sampling.name
    channel = Channel(
        privacy=_built(config.privacy),
        compression=_built(config.compression),
        attack=attack,
        rule=rule,
        attackers=attackers,
        byzantine=_byzantine(rule, len(attackers), cohort, len(population.participants)),
        sampling=sampling,
        cohort=cohort,
        changes_of_start=config.schedule.name == "buffered" and not schedule.adds_models,
        exchanges=len(method.round_exchanges),
    )
    return Channelled(base=method, channel=channel)


def without_channel(method: Algorithm) -> Algorithm:
    """Return the method that the configuration has put a channel around; without one, the method itself."""
    if type(method) is Channelled:
        return method.base
    return method


def for_fewer_clients(method: Algorithm, clients: int) -> Algorithm:
    """Return a method for rounds of `clients` clients, drawn uniformly: its channel has the attackers that they allow.

    At least one client is honest. The robust rule tolerates as many attackers as it can with so few clients.
    """
    channel = channel_of(method)
    if channel is None or not isinstance(method, Channelled):
        return method
    byzantine = channel.byzantine
    while byzantine and channel.rule.least(byzantine) > clients:
        byzantine -= 1
    attackers = {place for place in channel.attackers if place < clients - 1}
    if not attackers and channel.attackers and clients > 1:
        attackers = {0}
    fewer = replace(
        channel,
        byzantine=byzantine,
        attackers=frozenset(attackers),
        sampling="uniform",
        cohort=clients,
        changes_of_start=False,
    )
    return replace(method, channel=fewer)


def metrics_of(method: Algorithm) -> dict[str, Metric]:
    """Return the metrics that the attack on a method brings with it."""
    channel = channel_of(method)
    if channel is None or not isinstance(channel.attack, Backdoor):
        return {}
    return {"attack_success": AttackSuccess(target=channel.attack.target, size=channel.attack.size)}


def client_rows(method: Algorithm, population: Population) -> list[ClientRow]:
    """Return a row for each client, with its role; none without an attack."""
    channel = channel_of(method)
    if channel is None or channel.attack is None:
        return []
    clients = population.clients
    participants = len(population.participants)
    rows = []
    for place in range(len(clients)):
        role = "honest"
        if place >= participants:
            role = "unseen"
        elif place in channel.attackers:
            role = "attacker"
        rows.append(ClientRow(clients.id(place), clients.domain(place), int(clients.sizes[place, 0]), role))
    return rows


def unscored(method: Algorithm) -> frozenset[int]:
    """Return the places of the attackers, unless they are scored, too."""
    channel = channel_of(method)
    if channel is None or channel.attack is None or channel.attack.scored:
        return frozenset()
    return channel.attackers


def _built(part: Component) -> Any:
    """Return a part of the channel; None for "none"."""
    if part.name == "none":
        return None
    return part.build()


def _attackers(attack: Attack | None, population: Population, seed: int) -> frozenset[int]:
    """Return the places of the attackers among the participants.

    Raises:
        UsageError: attack.clients names a client that does not take part.
    """
    if attack is None:
        return frozenset()
    ids = [population.clients.id(place) for place in range(len(population.participants))]
    unknown = set(attack.clients or ()) - set(ids)
    if unknown:
        raise UsageError(f"attack.clients: there is no client {min(unknown)} that takes part; known: {first_few(ids)}")
    return drawn_attackers(attack, ids, seed)


def _byzantine(rule: Rule, attackers: int, cohort: int, clients: int) -> int:
    """Return f: robust.byzantine, or the number of attackers in a cohort on average, rounded up."""
    given: int | None = getattr(rule, "byzantine", None)
    if given is not None:
        return given
    return math.ceil(attackers * cohort / clients - 1e-9)
