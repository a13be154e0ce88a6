"""Experiment trackers: TensorBoard, Weights & Biases and MLflow.

The recorder feeds them. Every round of every trial passes through it, of single runs and of sweeps, with and without
Ray, so all trackers have the true rounds on their axis. A thread of its own serves them: a slow or failing tracker
neither delays nor ends a trial.
"""

import json
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rayfed.core.records import SERVER, Record
from rayfed.records.storage import Storage
from rayfed.records.trackers import About, MLflow, TensorBoard, Tracker, WeightsAndBiases
from rayfed.records.trials import flattened

CLOSE_SECONDS = 30.0
"""How long `Feed.close` waits for trackers that lag behind, such as one that uploads."""
_MOST_DOMAINS = 20  # with a curve of their own; with more, only the mean over all clients has a curve

Make = Callable[[Mapping[str, Any]], Mapping[str, Tracker]]
"""make(values): the trackers of a trial with these values in the table `trials`, by name."""


class Feed:
    """Passes trials on to their trackers, without waiting for them.

    A tracker that raises is left out from then on, and `close` returns a line on it.

    Args:
        home: The folder of the experiment. `tracking/TRIAL.json` in it says how tools call a trial.
        experiment: Its name.
        here: The folder to which relative paths in `tracking.*` belong.
        in_sweep: Whether the trials belong to a sweep.
        make: Makes the trackers of a trial; by default those of its options `tracking.*`.
    """

    def __init__(self, home: Storage, experiment: str, here: Path, *, in_sweep: bool = False, make: Make | None = None):
        self._home, self._experiment, self._here, self._in_sweep = home, experiment, here, in_sweep
        self._make = make or self._of_options
        self._trackers: dict[str, dict[str, Tracker]] = {}  # by trial and name
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._failures: dict[str, list[str]] = {}  # by line, the trials

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        """Open a trial in its trackers; `continues` is the last round that is kept of an earlier attempt."""
        trackers = dict(self._make(values))
        if trackers:
            folder = (values.get("tracking") or {}).get("folder")
            config = {key: value for key, value in flattened(values) if not key.startswith("tracking.")}
            self._put(lambda: self._begin(trial, trackers, config, folder, continues))

    def record(self, trial: str, record: Record) -> None:
        """Pass the values of a round on."""
        if self._thread is not None:
            self._put(lambda: self._each(trial, lambda tracker: tracker.log(record.round, round_values(record))))

    def end(self, trial: str, status: str, error: str | None) -> None:
        """Close a trial in its trackers."""
        if self._thread is not None:
            self._put(lambda: self._end(trial, status, error))

    def close(self, seconds: float = CLOSE_SECONDS) -> list[str]:
        """Wait until the trackers have everything, and return a line on each that failed or still lags behind."""
        if self._thread is None:
            return []
        self._queue.put(None)
        self._thread.join(seconds)
        late = self._thread.is_alive()
        self._thread = None
        lines = []
        for line, trials in self._failures.items():
            more = f" (and {len(trials) - 1} more)" if len(trials) > 1 else ""
            lines.append(f"{trials[0]}{more}: {line}; the trial went on without it")
        return lines + ([f"trackers did not finish within {seconds:g} s; what was not sent is lost"] if late else [])

    def _put(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(self._queue,), daemon=True, name="trackers")
            self._thread.start()
        self._queue.put(job)

    def _work(self, jobs: "queue.Queue[Callable[[], None] | None]") -> None:
        while (job := jobs.get()) is not None:
            job()

    def _begin(
        self, trial: str, trackers: dict[str, Tracker], config: Mapping[str, Any], folder: str | None, done: int | None
    ) -> None:
        base = self._here / (Path(folder).expanduser() if folder else self._home.local or "")
        names = {} if done is None else self._names(trial)
        if trial in self._trackers:  # its process was lost, or it went back to a checkpoint
            self._end(trial, "lost", None)
        self._trackers[trial] = trackers
        for name, tracker in list(trackers.items()):
            known = names.get(name)
            continues = None if known is None else done
            about = About(self._experiment, trial, config, folder=base, continues=continues, known_as=known)
            if (known_as := self._tried(trial, name, partial(tracker.begin, about))) is not None:
                names[name] = known_as
        content = json.dumps({"begun": time.time(), **names}).encode()
        self._tried(trial, "tracking", lambda: self._home.child("tracking").write(f"{trial}.json", content))

    def _names(self, trial: str) -> dict[str, Any]:
        try:
            return dict(json.loads(self._home.child("tracking").read(f"{trial}.json")))
        except (OSError, ValueError):
            return {}

    def _end(self, trial: str, status: str, error: str | None) -> None:
        self._each(trial, lambda tracker: tracker.end(status, error))
        self._trackers.pop(trial, None)

    def _each(self, trial: str, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.get(trial, {}).items()):
            self._tried(trial, name, partial(do, tracker))

    def _tried(self, trial: str, name: str, do: Callable[[], Any]) -> Any:
        """Do something with a tracker; leave the tracker out if it raises."""
        try:
            return do()
        except Exception as error:  # of a foreign package, a network or a disk
            self._trackers.get(trial, {}).pop(name, None)
            words = (str(error).strip().splitlines() or [""])[0][:200]
            self._failures.setdefault(f"tracking.{name} failed ({type(error).__name__}: {words})", []).append(trial)
            return None

    def _of_options(self, values: Mapping[str, Any]) -> dict[str, Tracker]:
        options = values.get("tracking") or {}
        trackers: dict[str, Tracker] = {}
        has_folder = self._home.local is not None or options.get("folder") is not None
        by_default = bool(options) and self._in_sweep and has_folder
        if by_default if options.get("tensorboard") is None else options["tensorboard"]:
            trackers["tensorboard"] = TensorBoard()
        if project := options.get("wandb"):
            trackers["wandb"] = WeightsAndBiases(project)
        if uri := options.get("mlflow"):
            trackers["mlflow"] = MLflow(uri, self._here)
        return trackers


def round_values(record: Record) -> dict[str, float]:
    """Return what trackers show of a round, by name.

    `POINT/SPLIT/METRIC` is the mean over the participants, or over the server's test sets where no client has the
    split, and `POINT/SPLIT/METRIC.DOMAIN` the mean over those of a domain, if there are several. Unseen clients have
    names that begin with `unseen/`. `round/...` is what the round cost.
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
    costs: dict[str, float | None] = {
        "clients": float(record.cohort),
        "clients_per_second": record.clients_per_second,
        "bytes_down": float(sum(record.bytes_down.values())),
        "bytes_up": float(sum(record.bytes_up.values())),
        "bytes_to_hosts": record.bytes_to_hosts,
        "bytes_from_hosts": record.bytes_from_hosts,
        "epsilon": record.epsilon,
        "balance": record.balance,
        "gpu_bytes": record.gpu_bytes,
        "simulated_seconds": record.simulated_seconds,
        **{f"seconds/{part}": seconds for part, seconds in record.seconds.items()},
    }
    return {f"round/{name}": value for name, value in costs.items() if value is not None}
