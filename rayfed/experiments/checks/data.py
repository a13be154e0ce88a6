"""Checks of the clients' examples."""

from rayfed.core.errors import UsageError
from rayfed.core.outputs import CLASSES
from rayfed.experiments.checks.trial import Trial


def check_augmentation(trial: Trial) -> None:
    """Refuse an augmentation that cannot take the inputs."""
    augment = trial.blueprint.augment
    if augment is not None:
        augment.check(trial.population.shape, trial.population.clients[0].train.dtype)


def check_unseen_clients(trial: Trial) -> None:
    """Refuse clients that join after training, where the method has nothing for them."""
    count = trial.population.unseen_clients
    why = trial.blueprint.algorithm.traits.refuses_unseen_clients
    if count and why:
        raise UsageError(f"unseen_clients={count}: {trial.named} {why}; use unseen_clients=0")


def check_examples(trial: Trial) -> None:
    """Refuse a client without examples to train on."""
    sizes = trial.sizes.array
    if sizes.min() >= 1:
        return
    smallest = trial.population.clients.id(int(sizes.argmin()))
    lack = "no training examples"
    if trial.blueprint.algorithm.held_out_share:
        lack = f"fewer than two training examples, and {trial.named} holds one out"
    raise UsageError(f"client {smallest} has {lack}; partition.* must give it some")


def check_labels(trial: Trial) -> None:
    """Refuse labels or outputs that are no classes, where the method needs classes."""
    traits = trial.blueprint.algorithm.traits
    labels = trial.population.clients[0].train.y
    are_classes = labels.ndim == 1 and labels.dtype.kind in "iu"
    if not are_classes and (traits.requires_classes or traits.requires_hard_labels):
        sides = "".join(f", {side}" for side in labels.shape[1:])
        raise UsageError(f"{trial.named}: needs data with classes; these labels are {labels.dtype} [n{sides}]")
    if traits.requires_classes and trial.blueprint.outputs != CLASSES:
        raise UsageError(
            f"{trial.named}: needs a model with one output per class, trained by cross-entropy or a loss like it"
        )
