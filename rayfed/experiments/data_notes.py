"""Notes on data with which a study may go wrong: what clients lack, columns of other scales, and shared test sets."""

from collections.abc import Iterator, Sequence

import numpy as np

from rayfed.core.words import first_few
from rayfed.data.population import LOOKED_AT, SPLITS, MadeClients, Population, spread
from rayfed.engine.evaluation import Evaluation

SCALE_RATIO = 100
"""The ratio of the largest to the smallest column from which a note says so."""
_MOST_CLIENTS = 1000  # whose labels are looked at
_MOST_ROWS = 10_000  # whose columns are looked at
_SHOWN = 5  # clients by name
_OF_SEVERAL_CLASSES = ("auroc", "average_precision", "f1", "balanced_accuracy")
"""Metrics that a part with one class leaves undefined, or says little about."""


def data_notes(population: Population, evaluation: Evaluation, columns: Sequence[str] = ()) -> Iterator[str]:
    """Yield notes on the data of a plan; `columns` are the names of the inputs' columns, if they have names."""
    yield from _one_class_notes(population)
    yield from _undefined_notes(population, evaluation)
    yield from _scale_notes(population, columns)


def _has_classes(population: Population) -> bool:
    y = population.clients[0].train.y
    return y.ndim == 1 and y.dtype.kind in "iu"


def _one_class_notes(population: Population) -> Iterator[str]:
    """Yield a note if each client has one class, as if the labels were the clients."""
    participants = population.participants
    if not _has_classes(population) or population.num_classes < 2 or not 1 < len(participants) <= _MOST_CLIENTS:
        return
    classes = set()
    for client in participants:
        present = np.unique(client.train.y)
        if len(present) > 1:
            return
        classes.update(present.tolist())
    if len(classes) == len(participants):
        yield "each client has a class of its own and no other; is the label the name of the client?"
    else:
        yield "each client has one class; a model that knows nothing but the client is always right"


def _undefined_notes(population: Population, evaluation: Evaluation) -> Iterator[str]:
    """Yield a note on each metric and split where some clients have one class only."""
    metrics = [name for name in _OF_SEVERAL_CLASSES if name in evaluation.metrics]
    participants = population.participants
    if not metrics or not _has_classes(population) or len(participants) > _MOST_CLIENTS:
        return
    for split in ("val", "test"):
        if split not in evaluation.splits:
            continue
        without = []
        for client in participants:
            labels = client.parts[SPLITS.index(split)].y
            if len(labels) and len(np.unique(labels)) == 1:
                without.append(f"{client.domain} ({len(labels)})")
        if without:
            effect = "no part in the mean"
            if split == "val":
                effect = "no say in the choice of rounds and hyperparameters"
            named = first_few(without, _SHOWN)
            yield (
                f"{', '.join(metrics)}: the {split} examples of {named} are of one class; where a value is not "
                f"defined, the client has {effect}"
            )


def _scale_notes(population: Population, columns: Sequence[str]) -> Iterator[str]:
    """Yield a note if columns of numbers differ in scale, and are not standardised."""
    train = population.clients[0].train
    is_table = train.dtype == np.float32 and len(train.shape) == 1 and population.layout is None
    if not is_table or population.standardisation is not None or isinstance(population.clients.source, MadeClients):
        return
    places = spread(len(population.participants), LOOKED_AT)
    rows = np.concatenate([population.clients[place].train.x[:_MOST_ROWS] for place in places])
    is_switch = ((rows == 0) | (rows == 1)).all(0)
    sizes = np.sqrt(np.mean(rows.astype(np.float64) ** 2, axis=0))
    numbers = np.flatnonzero(~is_switch & (sizes > 0))
    if len(numbers) < 2:
        return
    largest = int(numbers[sizes[numbers].argmax()])
    smallest = int(numbers[sizes[numbers].argmin()])
    ratio = sizes[largest] / sizes[smallest]
    if ratio >= SCALE_RATIO:
        large = _column_name(columns, largest)
        small = _column_name(columns, smallest)
        remedy = "standardise columns by training examples before they are given"
        if columns:
            remedy = "standardise columns, as with data.standardize=global"
        yield f"{large} is about {ratio:,.0f} times as large as {small}; {remedy}"


def _column_name(columns: Sequence[str], place: int) -> str:
    if place < len(columns):
        return columns[place]
    return f"column {place}"


def split_notes(populations: Sequence[Population], seeds: int, *, kept: bool) -> Iterator[str]:
    """Yield which examples the seeds of a sweep share.

    Args:
        populations: The data of the first seed, one for each kind of data.
        seeds: The number of seeds.
        kept: Whether all seeds have the same split.
    """
    if seeds < 2:
        return
    for population in populations:
        sizes = population.participants.sizes[:, SPLITS.index("test")]
        tested = f"one test set of {int(sizes.sum()):,} examples"
        if kept:
            note = f"{population.name}: {seeds} seeds share {tested}"
            if population.test_drawn:
                note += "; partition.redraw=true draws a split for each seed"
            yield note
        elif population.test_drawn:
            yield f"{population.name}: each of {seeds} seeds draws a split of its own, and each chooses for itself"
        else:
            yield f"{population.name}: each of {seeds} seeds divides the examples anew among the clients"
