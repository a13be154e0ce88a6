"""TensorBoard's files of trials, which the recorder writes beside the tables.

Every round of every trial passes through the recorder, so the axis has the true rounds, of single runs and of sweeps.
"""

import contextlib
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.core.records import SERVER, Record
from rayfed.records.storage import Storage, is_url
from rayfed.records.trials import flattened

_MOST_DOMAINS = 20  # with a curve of their own; with more, only the mean over all clients has a curve
_FLUSH_SECONDS = 5
_COSTS = (
    *("clients_per_second", "bytes_to_hosts", "bytes_from_hosts", "epsilon", "balance", "gpu_bytes"),
    *("simulated_seconds", "clock_seconds", "staleness_mean"),
)


class TensorBoard:
    """Writes `FOLDER/tensorboard/TRIAL/events...`, and at the end the hyperparameters with the last values.

    A trial goes on if its files cannot be written, and `close` returns a line on it.

    Args:
        home: The folder of the experiment.
        here: The folder to which a relative `tracking.folder` belongs.
        in_sweep: Whether the trials belong to a sweep, which writes the files unless they are declined.
    """

    def __init__(self, home: Storage, here: Path, *, in_sweep: bool = False):
        self._home, self._here, self._in_sweep = home, here, in_sweep
        self._writers: dict[str, Any] = {}  # of open trials
        self._shown: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}  # their configuration, and last values
        self._failures: dict[str, list[str]] = {}  # by line, the trials

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        """Open a trial, whose rounds after `continues` are repeated; None: it starts anew."""
        self.end(trial, "lost")  # an earlier attempt that did not end
        options = values.get("tracking") or {}
        place = options.get("folder") or self._home.local
        by_default = bool(options) and self._in_sweep and place is not None
        if not (by_default if options.get("tensorboard") is None else options["tensorboard"]):
            return
        folder = self._here / Path(place or "").expanduser() / "tensorboard" / trial
        with self._left_out_on_error(trial):
            from tensorboardX import SummaryWriter

            if continues is None and folder.exists():
                shutil.rmtree(folder)  # of an earlier attempt, whose rows in the tables are dropped, too
            purge = None if continues is None else continues + 1
            self._writers[trial] = SummaryWriter(str(folder), purge_step=purge, flush_secs=_FLUSH_SECONDS)
            config = ((key, value) for key, value in flattened(values) if not key.startswith("tracking."))
            self._shown[trial] = {k: v for k, v in config if isinstance(v, (bool, int, float, str))}, {}

    def record(self, trial: str, record: Record) -> None:
        """Add the values of a round."""
        if (writer := self._writers.get(trial)) is None:
            return
        with self._left_out_on_error(trial):
            values = round_values(record)
            for name, value in values.items():
                writer.add_scalar(name, value, record.round)
            self._shown[trial][1].update((name, v) for name, v in values.items() if not name.startswith("round/"))

    def end(self, trial: str, status: str) -> None:
        """Close a trial; `status` is one of `rayfed.records.trials.STATUSES`."""
        if (writer := self._writers.pop(trial, None)) is None:
            return
        with self._left_out_on_error(trial):
            from tensorboardX.summary import hparams

            config, last = self._shown.pop(trial)
            finite = {name: value for name, value in last.items() if math.isfinite(value)}
            for summary in hparams({**config, "status": status}, finite):
                writer.file_writer.add_summary(summary)
            writer.close()

    def close(self) -> list[str]:
        """Return a line on each kind of failure."""
        return [
            f"{trials[0]}{f' (and {len(trials) - 1} more)' * (len(trials) > 1)}: {line}; the trial went on without it"
            for line, trials in self._failures.items()
        ]

    @contextlib.contextmanager
    def _left_out_on_error(self, trial: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a foreign package or a disk
            self._writers.pop(trial, None)
            words = (str(error).strip().splitlines() or [""])[0][:200]
            line = f"tracking.tensorboard failed ({type(error).__name__}: {words})"
            self._failures.setdefault(line, []).append(trial)


def round_values(record: Record) -> dict[str, float]:
    """Return what TensorBoard shows of a round, by name.

    `POINT/SPLIT/METRIC` is the mean over the participants, or over the server's test sets if no client has the split.
    `POINT/SPLIT/METRIC.DOMAIN` is the mean over one of several domains. Names of unseen clients' values begin with
    `unseen/`, and those of a round's costs with `round/`.
    """
    values: dict[str, list[float]] = defaultdict(list)
    domains: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with_clients = {(s.point, s.split, s.metric, s.unseen) for s in record.scores if s.client != SERVER}
    for score in record.scores:
        if score.client == SERVER and (score.point, score.split, score.metric, score.unseen) in with_clients:
            continue
        name = f"{'unseen/' if score.unseen else ''}{score.point}/{score.split}/{score.metric}"
        values[name].append(score.value)
        domains[name][score.domain].append(score.value)
    for name, by_domain in domains.items():
        if 1 < len(by_domain) <= _MOST_DOMAINS:
            for domain, of_domain in by_domain.items():
                values[f"{name}.{domain}"] = of_domain
    return {name: sum(several) / len(several) for name, several in values.items()} | _costs(record)


def _costs(record: Record) -> dict[str, float]:
    costs = {
        "clients": float(record.cohort),
        "bytes_down": float(sum(record.bytes_down.values())),
        "bytes_up": float(sum(record.bytes_up.values())),
        **{name: getattr(record, name) for name in _COSTS},
        **{f"seconds/{part}": seconds for part, seconds in record.seconds.items()},
    }
    return {f"round/{name}": value for name, value in costs.items() if value is not None}


def check_tracking(options: Any, results: str) -> None:
    """Raise UsageError if TensorBoard's files have no local folder; `options` are those of the group `tracking.*`."""
    if options.tensorboard and options.folder is None and is_url(results):
        raise UsageError(
            f"tracking.tensorboard=true: needs a local folder, and results={results} is none; give tracking.folder"
        )
