"""How well a client's features fall into clusters: what FADA's attention goes by."""

import warnings

import numpy as np
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits
from torch import Tensor


def spread(features: Tensor, clusters: int, seed: int) -> float:
    """Σ_r 1/(2 n_r) Σ_{i,j in cluster r} ‖f_i − f_j‖² per example of `features` [n, width], with k-means clusters.

    This sum is k-means' own objective, the squared distances to the clusters' means. One thread finds it: several add
    up their parts in the order in which they happen to be done, and the last bits follow.
    """
    points = features.cpu().numpy().astype(np.float64)
    means = KMeans(min(clusters, len(points)), n_init=1, random_state=seed)
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters are no harm
        return float(means.fit(points).inertia_) / len(points)
