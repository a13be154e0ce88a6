"""Users of few examples, drawn anew from their number whenever they are needed. This needs only NumPy."""

import numpy as np

EXAMPLES = 10  # of a user, 8 of them for training
FEATURES = 64


def make_user(number: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the examples of a user, 8 for training and 2 for tests: inputs, float32 [n, 64], and labels [n]."""
    rng = np.random.default_rng(number)
    y = rng.integers(0, 10, EXAMPLES)
    x = (rng.normal(size=(EXAMPLES, FEATURES)) + y[:, None]).astype(np.float32)
    return {"train": (x[:-2], y[:-2]), "test": (x[-2:], y[-2:])}
