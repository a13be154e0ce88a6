"""A map of representations in the plane: van der Maaten and Hinton 2008, by scikit-learn's TSNE."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from sklearn.manifold import TSNE

from rayfed.core.options import option
from rayfed.metrics.base import OfRepresentations, Representations


class Mapped(NamedTuple):
    """The example's client, domain and class, and its place in the plane."""

    client: int
    domain: str
    label: int
    x: float
    y: float


class Map(NamedTuple):
    """The places of all examples that were taken of a split, at a point's model and a layer; `name` is the metric's."""

    name: str
    point: str
    split: str
    layer: str
    places: list[Mapped]


@dataclass(frozen=True, kw_only=True)
class Tsne(OfRepresentations):
    """A Parquet file of places with client, domain and class, and a picture, in the folder `maps` of the experiment."""

    perplexity: float = option(30.0, above=0, help="t-SNE's perplexity; less where there are too few examples")

    def map(self, groups: Sequence[Representations], seed: int) -> list[Mapped]:
        """The place of every example; none where there are fewer than four."""
        count = sum(len(group.z) for group in groups)
        if count < 4:
            return []
        z = np.concatenate([group.z.cpu().numpy() for group in groups])
        perplexity = min(self.perplexity, (count - 1) / 3)
        places = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(z)
        rows = [(g.client, g.domain, label) for g in groups for label in g.y.tolist()]
        return [Mapped(*row, float(x), float(y)) for row, (x, y) in zip(rows, places, strict=True)]
