"""Synthetic(α, β): clients whose labelling rules and whose inputs differ by degrees that are set."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.core.rng import numpy_generator
from rayfed.data.dataset import Dataset

SHARED = 2**31  # the number of the stream of what all clients share; clients have numbers below it
MOST_POOLED = 10_000  # clients whose examples are all drawn at the start


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Synthetic(α, β) of FedProx (Li et al. 2020, section 5.1 and appendix C.1), drawn anew from a seed.

    Client k labels an input x by y = argmax(Wx + b). The entries of W and b are drawn from N(u_k, 1), u_k ~ N(0, α²):
    α is how much rules differ. The inputs are drawn from N(v_k, Σ), with the entries of v_k from N(B_k, 1), B_k ~
    N(0, β²), and Σ diagonal, Σ_jj = j^−1.2: β is how much inputs differ. The paper writes N(0, α) and N(0, β); as in
    its code, α and β are standard deviations. The number of examples of a client is 50 + ⌊exp(N(4, 2²))⌋, so a few
    clients have most of the data.

    With `iid`, all clients share one W and b, with u = 0, and v = 0. A client's own draws do not depend on how many
    clients there are. Nothing is read or downloaded. More than 10,000 clients are made on demand where each holds its
    own examples, so that millions take no memory. The usual model is linear: `model={name: mlp, hidden: []}`. A fifth
    of each client's examples is for testing, as in the paper.
    """

    alpha: float | None = option(None, low=0, help="α, how much the labelling rules of clients differ; null: 1")
    beta: float | None = option(None, low=0, help="β, how much the inputs of clients differ; null: 1")
    clients: int = option(30, low=1, high=10_000_000, help="number of clients")
    iid: bool = option(False, help="give all clients the same rule and the same distribution of inputs")
    dimensions: int = option(60, low=1, high=65536, help="values per input")
    classes: int = option(10, low=2, high=65536, help="number of classes")
    most_examples: int | None = option(
        None, low=50, help="cut clients with more examples to this number; null: cut none, as in the paper"
    )
    seed: int = option(0, low=0, help="seed of all draws")

    name: ClassVar[str] = "synthetic"
    embedded: ClassVar[bool] = True  # there are no files
    default_partition: ClassVar[str] = "natural"
    partition_defaults: ClassVar[dict[str, float]] = {"test": 0.2}

    def load(self) -> Dataset:
        """Return the examples of all clients, float32 [N, dimensions], one client after the other."""
        made = []
        for number in range(self.clients):
            made.append(self.examples(number))
        inputs, labels = zip(*made, strict=True)
        sizes = [len(y) for y in labels]
        client = np.repeat(np.arange(self.clients), sizes)
        x = np.concatenate(inputs)
        y = np.concatenate(labels)
        return Dataset.of(self.name, x, y, num_classes=self.classes, client=client)

    def examples(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs of a client, float32 [n, dimensions], and their classes, int64 [n]."""
        draw = numpy_generator(self.seed, client)
        count = self._size(draw)
        spread_of_means = self.beta
        if spread_of_means is None:
            spread_of_means = 1.0
        mean = draw.normal(0.0, spread_of_means)
        centre = draw.normal(mean, 1.0, self.dimensions)
        spread = np.arange(1, self.dimensions + 1) ** -0.6
        if self.iid:
            centre = np.zeros(self.dimensions)
        x = centre + spread * draw.normal(size=(count, self.dimensions))
        weights, bias = self.rule(client)
        logits = x @ weights + bias
        return x.astype(np.float32), logits.argmax(1)

    @property
    def makes_clients(self) -> bool:
        """Whether there are so many clients that they are made on demand where each holds its own examples."""
        return self.clients > MOST_POOLED

    def sizes(self) -> np.ndarray:
        """Return the numbers of examples of all clients, int64 [clients]."""
        sizes = []
        for number in range(self.clients):
            draw = numpy_generator(self.seed, number)
            sizes.append(self._size(draw))
        return np.array(sizes)

    def _size(self, draw: np.random.Generator) -> int:
        count = 50 + int(draw.lognormal(4.0, 2.0))
        if self.most_examples is None:
            return count
        return min(count, self.most_examples)

    def rule(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the Wᵀ [dimensions, classes] and b [classes] by which a client labels its inputs."""
        drawn_for = client
        if self.iid:
            drawn_for = SHARED
        draw = numpy_generator(self.seed, drawn_for, 1)
        mean = 0.0
        if not self.iid:
            spread = self.alpha
            if spread is None:
                spread = 1.0
            mean = draw.normal(0.0, spread)
        weights = draw.normal(mean, 1.0, (self.dimensions, self.classes))
        return weights, draw.normal(mean, 1.0, self.classes)
