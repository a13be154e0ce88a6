"""Experiment trackers: TensorBoard and Weights & Biases.

The recorder feeds them. Every round of every trial passes through it, of single runs and of sweeps, with and without
Ray, so all trackers have the true rounds on their axis. A thread of its own serves them: a slow or failing tracker
neither delays nor ends a trial.
"""

import importlib.util
import math
import os
import queue
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rayfed.core.errors import UsageError
from rayfed.core.records import SERVER, Record
from rayfed.records.storage import Storage, is_url
from rayfed.records.trials import flattened

CLOSE_SECONDS = 30.0
"""How long `Feed.close` waits for trackers that lag behind, such as one that uploads."""
_MOST_DOMAINS = 20  # with a curve of their own; with more, only the mean over all clients has a curve
_FLUSH_SECONDS = 5  # of TensorBoard's files


@dataclass(frozen=True)
class About:
    """A trial that begins, or goes on.

    Attributes:
        config: The configuration, with dotted keys.
        folder: The local folder for a tracker's files.
        continues: The last round that is kept of an earlier attempt; None if the trial starts anew.
    """

    experiment: str
    trial: str
    config: Mapping[str, Any]
    folder: Path
    continues: int | None = None


class Tracker(Protocol):
    """One trial in one tracking tool. Every method may raise; the trial then goes on without the tracker."""

    def begin(self, about: About) -> None:
        """Open the trial."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Add the values of a round; see `round_values`."""

    def end(self, status: str, error: str | None) -> None:
        """Close the trial; `status` is one of `rayfed.records.trials.STATUSES`."""


class TensorBoard:
    """Writes `FOLDER/tensorboard/TRIAL/events...`, and the hyperparameters with the last values at the end."""

    def begin(self, about: About) -> None:
        from tensorboardX import SummaryWriter

        folder = about.folder / "tensorboard" / about.trial
        if about.continues is None and folder.exists():
            shutil.rmtree(folder)  # an earlier attempt, whose rows in the tables are replaced, too
        purge = None if about.continues is None else about.continues + 1  # rounds that the trial repeats
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=_FLUSH_SECONDS)
        self._config = about.config
        self._last: dict[str, float] = {}

    def log(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._last |= {name: value for name, value in values.items() if not name.startswith("round/")}

    def end(self, status: str, error: str | None) -> None:
        from tensorboardX.summary import hparams

        shown = {key: value for key, value in self._config.items() if isinstance(value, (bool, int, float, str))}
        finite = {name: value for name, value in self._last.items() if math.isfinite(value)}
        for summary in hparams({**shown, "status": status}, finite):
            self._writer.file_writer.add_summary(summary)
        self._writer.close()


class WeightsAndBiases:
    """Logs to a project of Weights & Biases, or, with WANDB_MODE=offline, to `FOLDER/wandb`.

    `FOLDER/wandb/TRIAL.id` keeps the id of the run, so that a trial that continues goes on in the same run.
    """

    def __init__(self, project: str):
        self._project = project

    def begin(self, about: About) -> None:
        import wandb

        known = about.folder / "wandb" / f"{about.trial}.id"
        known.parent.mkdir(parents=True, exist_ok=True)
        before = known.read_text() if about.continues is not None and known.exists() else None
        self._run: Any = wandb.init(
            project=self._project,
            group=about.experiment,
            name=about.trial,
            config=dict(about.config),
            dir=str(about.folder),
            id=before,
            resume="allow" if before else None,
            reinit="create_new",  # trials of a sweep run at the same time, and the user may have a run of their own
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
        )
        # W&B's own steps only grow, and a trial that goes back to a checkpoint repeats rounds.
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")
        known.write_text(self._run.id)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log({"round": round, **values})

    def end(self, status: str, error: str | None) -> None:
        self._run.summary.update({"status": status, **({"error": error} if error else {})})
        self._run.finish(exit_code=0 if status in ("done", "stopped") else 1)


class Feed:
    """Passes trials on to their trackers, without waiting for them.

    A tracker that raises is left out from then on, and `close` returns a line on it.

    Args:
        home: The folder of the experiment.
        experiment: Its name.
        here: The folder to which relative paths in `tracking.*` belong.
        in_sweep: Whether the trials belong to a sweep.
    """

    def __init__(self, home: Storage, experiment: str, here: Path, *, in_sweep: bool = False):
        self._home, self._experiment, self._here, self._in_sweep = home, experiment, here, in_sweep
        self._trackers: dict[str, dict[str, Tracker]] = {}  # by trial and name
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._failures: dict[str, list[str]] = {}  # by line, the trials

    def begin(self, trial: str, values: Mapping[str, Any], continues: int | None) -> None:
        """Open a trial in its trackers; `continues` is the last round that is kept of an earlier attempt."""
        trackers = self._of_options(values)
        if trackers:
            given = (values.get("tracking") or {}).get("folder")
            folder = self._here / (Path(given).expanduser() if given else self._home.local or "")
            config = {key: value for key, value in flattened(values) if not key.startswith("tracking.")}
            about = About(self._experiment, trial, config, folder, continues)
            self._put(lambda: self._begin(trial, trackers, about))

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

    def _begin(self, trial: str, trackers: dict[str, Tracker], about: About) -> None:
        if trial in self._trackers:  # its process was lost, or it went back to a checkpoint
            self._end(trial, "lost", None)
        self._trackers[trial] = trackers
        self._each(trial, lambda tracker: tracker.begin(about))

    def _end(self, trial: str, status: str, error: str | None) -> None:
        self._each(trial, lambda tracker: tracker.end(status, error))
        self._trackers.pop(trial, None)

    def _each(self, trial: str, do: Callable[[Tracker], None]) -> None:
        """Do something with each tracker of a trial; leave a tracker out that raises."""
        for name, tracker in list(self._trackers.get(trial, {}).items()):
            try:
                do(tracker)
            except Exception as error:  # of a foreign package, a network or a disk
                del self._trackers[trial][name]
                words = (str(error).strip().splitlines() or [""])[0][:200]
                self._failures.setdefault(f"tracking.{name} failed ({type(error).__name__}: {words})", []).append(trial)

    def _of_options(self, values: Mapping[str, Any]) -> dict[str, Tracker]:
        options = values.get("tracking") or {}
        trackers: dict[str, Tracker] = {}
        has_folder = self._home.local is not None or options.get("folder") is not None
        by_default = bool(options) and self._in_sweep and has_folder
        if by_default if options.get("tensorboard") is None else options["tensorboard"]:
            trackers["tensorboard"] = TensorBoard()
        if project := options.get("wandb"):
            trackers["wandb"] = WeightsAndBiases(project)
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
        "clock_seconds": record.clock_seconds,
        "staleness_mean": record.staleness_mean,
        **{f"seconds/{part}": seconds for part, seconds in record.seconds.items()},
    }
    return {f"round/{name}": value for name, value in costs.items() if value is not None}


def check_trackers(options: Mapping[str, Any], results: str) -> None:
    """Raise UsageError if a tracker of the group `tracking.*` lacks its package, its login or a folder."""
    if options["wandb"] and importlib.util.find_spec("wandb") is None:
        raise UsageError(
            f"tracking.wandb={options['wandb']}: the package wandb is not installed; pip install 'rayfed-sim[tracking]'"
        )
    for key in ("tensorboard", "wandb"):
        if options[key] and options["folder"] is None and is_url(results):
            raise UsageError(
                f"tracking.{key}={str(options[key]).lower() if options[key] is True else options[key]}: needs a local "
                f"folder, and results={results} is none; give tracking.folder"
            )
    if options["wandb"]:
        _check_login(options["wandb"])


def _check_login(project: str) -> None:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return
    import wandb

    if not wandb.setup().settings.api_key and not wandb.api.api_key:
        raise UsageError(
            f"tracking.wandb={project}: not logged in to Weights & Biases; run wandb login, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline and upload later with wandb sync"
        )
