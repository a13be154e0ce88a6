"""A map of representations in the plane by t-SNE: van der Maaten and Hinton 2008, in scikit-learn's implementation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfed.core.options import option
from rayfed.core.records import MapPoint
from rayfed.metrics.base import OfRepresentations, Representations


@dataclass(frozen=True, kw_only=True)
class Tsne(OfRepresentations):
    """A Parquet file of each example's client, domain, class and coordinates, and a plot, in the folder `maps`."""

    joint: bool = option(False, help="show all scored points of a layer, such as global and trained, in one projection")
    perplexity: float = option(30.0, above=0, help="perplexity of t-SNE; reduced if there are too few examples")

    def map(self, groups: Sequence[Representations], seed: int) -> list[MapPoint]:
        """Return the coordinates of every example; none if there are fewer than four.

        Representations that are all the same, such as those of a network whose last ReLU is always 0, lie in one point.
        """
        count = sum(len(group.z) for group in groups)
        if count < 4:
            return []
        from sklearn.manifold import TSNE  # imported late: takes a second, and every host imports this module

        z = np.concatenate([group.z.cpu().numpy() for group in groups])
        if float(np.ptp(z, axis=0).max()) ** 2 < np.finfo(np.float32).tiny:
            coordinates = np.zeros((count, 2))  # scikit-learn would divide by their spread, and then end the process
        else:
            perplexity, init = min(self.perplexity, (count - 1) / 3), "pca" if z.shape[1] > 1 else "random"
            coordinates = TSNE(perplexity=perplexity, init=init, random_state=seed).fit_transform(z)
        rows = [(g.client, g.domain, label, g.point) for g in groups for label in g.y.tolist()]
        return [
            MapPoint(client, domain, label, float(x), float(y), point)
            for (client, domain, label, point), (x, y) in zip(rows, coordinates, strict=True)
        ]
