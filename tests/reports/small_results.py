"""Small experiments, written by hand: two clients in the domains a and b, two rounds, several splits and metrics."""

from pathlib import Path
from typing import Any

from helpers.score_rows import row, trial_writer, write
from rayfed.core.round_record import SERVER
from rayfed.records.trials import record_trial


def add(
    folder: Path, name: str, algorithm: str, seed: int, mean: float, *, epsilon: float | None = None, **values: Any
):
    """Add a trial, scored on validation, test and out-of-domain data.

    In round n, the test accuracy is `mean` + n/100 - 0.1 in domain a, and 0.2 more in domain b. The accuracy of the
    domain c, which no client holds, is `mean` - 0.2, and the loss is 2 - `mean`.
    """
    record_trial(folder, "e", name, {"algorithm": algorithm, "seed": seed, "status": "done", "rounds": 2, **values})
    with trial_writer(folder, name, algorithm=algorithm, seed=seed) as writer:
        for number in (1, 2):
            scores = [
                row(number, client, "ab"[client], split, "global", metric, value, 10)
                for split in ("val", "test")
                for client, sign in ((0, -1), (1, 1))
                for metric, value in (("accuracy", mean + sign * 0.1 + number / 100), ("loss", 2 - mean))
            ]
            scores.append(row(number, SERVER, "c", "ood", "global", "accuracy", mean - 0.2, 30))
            spent = None if epsilon is None else epsilon * number
            clock = 40.0 * number if algorithm == "fedprox" else None
            seconds = {"broadcast": 0.0, "train": 3.0, "upload": 0.0, "aggregate": 1.0, "evaluate": 2.0, "total": 6.5}
            write(writer, scores, bytes_down={"weights": 10**7}, epsilon=spent, seconds=seconds, clock_seconds=clock)
