"""Checks of the model in training."""

from collections.abc import Callable, Sequence

import numpy as np

from rayfed.algorithm import Context, Phase
from rayfed.core.errors import UsageError
from rayfed.core.ids import Moment, Stage
from rayfed.experiments.checks.trial import Trial
from rayfed.models.single_example_batchnorm import batch_size_advice, leaves_single_example, trains_on_single_examples


def check_trainable(trial: Trial) -> None:
    """Refuse a model without a parameter that is trained."""
    if trial.ctx.task.trainable:
        return
    frozen = ""
    if trial.blueprint.batch_norm == "frozen":
        frozen = ", as batch_norm=frozen leaves its batch norm untrained"
    raise UsageError(f"model: no parameter is trained{frozen}; set requires_grad of some to True")


def check_single_examples(trial: Trial) -> None:
    """Refuse batches of one example on which batch norm cannot train."""
    stages: tuple[tuple[Stage, int], ...] = (("setup", 0), ("round", 1), ("final", trial.blueprint.rounds + 1))

    def phases(ctx: Context) -> list[Phase]:
        """Return all local training of the client of `ctx` in the setup, a round and the final stage."""
        found: list[Phase] = []
        for stage, number in stages:
            for place, exchange in enumerate(trial.blueprint.algorithm.exchanges(stage)):
                found += exchange.phases(ctx.at(Moment(stage, number, place)))
        return found

    _refuse_single_examples(trial, phases)


def check_adaptation(trial: Trial, epochs: int, *, of_participants: bool) -> None:
    """Refuse such batches where clients train for `epochs` before their models are scored at the point `adapted`.

    Unseen clients are always scored there, participants if `of_participants`.
    """
    blueprint = trial.blueprint

    def phases(ctx: Context) -> Sequence[Phase]:
        if not (of_participants or ctx.unseen):
            return ()
        local = blueprint.local._replace(epochs=epochs, steps=None)
        return blueprint.algorithm.adaptation.phases(ctx.at(Moment("final", blueprint.rounds), local=local))

    _refuse_single_examples(trial, phases, " in evaluate.adapt_epochs")


def _refuse_single_examples(trial: Trial, phases: Callable[[Context], Sequence[Phase]], where: str = "") -> None:
    """Refuse batches of one example.

    Args:
        phases: Returns the training of the client of a context.
        where: Says in the message which training it is.
    """
    blueprint = trial.blueprint
    problem = trial.problem
    ctx = trial.ctx
    size = blueprint.batch_size
    if blueprint.drop_last and size > 1 and min(problem.examples.values()) > 1:
        return
    if trains_on_single_examples(ctx.task, problem.shape, tokens=problem.tokens):
        return
    for place, examples in _different_clients(trial):
        for phase in phases(ctx.at(client=place, examples=examples)):
            leaves_one = leaves_single_example(
                examples,
                phase.batch_size or size,
                epochs=phase.epochs,
                steps=phase.steps,
                drop_last=blueprint.drop_last,
            )
            if leaves_one:
                client = trial.population.clients.id(place)
                advice = batch_size_advice(size, enough=examples > 1)
                raise UsageError(
                    f"local.batch_size={size}: client {client} has {examples} training examples, which leave a batch "
                    f"of one example{where}, on which the model's batch norm cannot train; {advice}"
                )


def _different_clients(trial: Trial) -> list[tuple[int, int]]:
    """Return the place and the examples of the first client of each size: clients of one size train alike."""
    sizes = trial.sizes.array
    is_unseen = np.arange(len(sizes)) >= trial.ctx.task.num_clients
    _, places = np.unique(np.stack([sizes, is_unseen]), axis=1, return_index=True)
    return [(place, int(sizes[place])) for place in sorted(places.tolist())]
