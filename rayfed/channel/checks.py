"""Refusals of a channel that follow from the task, the cohort and the rounds. One line each, before anything starts."""

from collections.abc import Iterator

from rayfed.algorithm import ProblemSpec
from rayfed.channel.attacks import Backdoor
from rayfed.channel.channel import Channel
from rayfed.channel.compression import check_down
from rayfed.channel.privacy import ADDED, Gaussian, Laplace
from rayfed.channel.robust import Mean
from rayfed.core.errors import UsageError
from rayfed.core.trees import Weights


def refuse_unusual(weights: Weights, what: str) -> None:
    """Raise UsageError if a weight is complex or not finite; `what` says who works with real ones alone."""
    for name, value in weights.items():
        if value.is_complex() or not value.isfinite().all():
            raise UsageError(
                f"model.name: {what} real, finite weights only, and {name!r} is complex or not finite; keep real "
                "weights, or register it with persistent=False"
            )


def check_channel_on(channel: Channel, problem: ProblemSpec) -> None:
    """Raise UsageError if the channel cannot work on this problem."""
    for fault in _faults(channel, problem):
        raise UsageError(fault)
    if channel.privacy is not None:
        _check_privacy(channel, problem)
    if channel.compression is not None and channel.compression.down is not None:
        check_down(channel.compression.down)


def _faults(channel: Channel, problem: ProblemSpec) -> Iterator[str]:
    """Yield what is wrong with a rule or an attack, in one line each."""
    rule = channel.rule
    attack = channel.attack
    cohort = problem.cohort
    least = rule.least(channel.byzantine)
    if cohort < least:
        yield (
            f"robust.name={rule.name}: needs {least} clients for {channel.byzantine} that attack, and a cohort has "
            f"{cohort}; give a larger cohort, or a smaller robust.byzantine"
        )
    if cohort == 1 and rule.gathers:
        yield f"robust.name={rule.name}: a cohort of one client has no others to compare with; give a larger cohort"
    if attack is None:
        return
    if len(channel.attackers) == problem.task.num_clients:
        yield f"attack.share={attack.share:g}: leaves no honest client of {problem.task.num_clients}; give less"
    if attack.poisons and problem.task.outputs.kind != "classes":
        yield f"attack.name={attack.name}: needs labels that are classes of whole examples"
    inputs = problem.task.inputs
    if isinstance(attack, Backdoor):
        fault = attack.trigger.fault(inputs.shape, inputs.continuous, problem.task.num_classes)
        if fault:
            yield f"attack.{fault}"


def _check_privacy(channel: Channel, problem: ProblemSpec) -> None:
    privacy = channel.privacy
    rule = channel.rule
    cohort = problem.cohort
    assert privacy is not None, "there is privacy"
    clients = problem.task.num_clients
    if cohort == 1 and not privacy.local:
        raise UsageError(
            "privacy: a cohort of one client has no others to hide among; give a larger cohort, or privacy.local=true"
        )
    refuse_unusual(problem.task.initial_weights(), f"privacy.name={privacy.name} clips and adds noise to")
    if not privacy.local and not isinstance(rule, Mean):
        most = rule.sensitivity(1.0, cohort, channel.byzantine)
        if most is None:
            raise UsageError(
                f"robust.name={rule.name}: does not say how much one client can change it, by which noise is scaled; "
                "define `sensitivity`, or leave out privacy.*"
            )
        if isinstance(privacy, Laplace):
            raise UsageError(
                f"privacy.name=laplace: robust.name={rule.name} bounds what a client can change in L2 alone"
            )
        if channel.neighbours == ADDED:
            raise UsageError(
                f"sampling.name=poisson: robust.name={rule.name} with privacy.* needs cohorts of one size; use "
                "sampling.name=uniform"
            )
    how = channel.composition(problem.rounds, clients, cohort)
    privacy.check(how, clients)
    if isinstance(privacy, Gaussian) and privacy.adapts:
        bits = privacy.noise_on_bits(privacy.noise_cohort or cohort)
        privacy.of_updates(privacy.multiplier(how), bits, privacy.bits_sensitivity(channel.neighbours == ADDED))
