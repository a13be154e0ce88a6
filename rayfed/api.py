"""The Python API: `rayfed.run(config) -> Result`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.status_line import StatusLine
from rayfed.data.population import Client
from rayfed.distributed.capacity import check_fits, known_nodes
from rayfed.engine.device import device_for
from rayfed.engine.fleet import LocalFleet
from rayfed.experiments.config import Config, Placement
from rayfed.experiments.plan import Loss, MakeModel, Plan, make_plan
from rayfed.experiments.progress import one_trial, watch_trials
from rayfed.experiments.run_summary import introduce
from rayfed.experiments.sources import from_file, merged
from rayfed.experiments.trial import resumed, run_trial
from rayfed.results.folder import make_experiment_folder
from rayfed.results.read import read
from rayfed.results.recorder import Recorder


@dataclass(frozen=True)
class Result:
    """What a simulation leaves.

    `metrics`, `rounds` and `trials` are its rows of the three tables; `server` is the final server state and `clients`
    the final state of every client by number, both nested dicts of CPU tensors; `weights_hash` is a hash of all of it;
    `folder` holds the Parquet tables.
    """

    trial: str
    folder: Path
    weights_hash: str
    metrics: pd.DataFrame
    rounds: pd.DataFrame
    trials: pd.DataFrame
    server: dict[str, Any]
    clients: dict[int, dict[str, Any]]

    def __repr__(self) -> str:  # without it a notebook prints every tensor
        shapes = ", ".join(f"{name} {getattr(self, name).shape}" for name in ("metrics", "rounds", "trials"))
        return f"Result({self.trial}, {self.folder}, weights {self.weights_hash}{self._accuracy()}; {shapes})"

    def _accuracy(self) -> str:
        """The mean test accuracy over clients at its last round, where there is one."""
        scored = set(self.trials["default_eval_point"])
        found = self.metrics.query("metric == 'accuracy' and split == 'test' and client >= 0 and not unseen")
        found = found[found["point"].isin(scored) & (found["round"] == found["round"].max())]
        return "" if found.empty else f"; test accuracy {found['value'].mean():.4f} after round {found['round'].max()}"


def run(
    config: Mapping[str, Any] | Config | str | Path | None = None,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | None = None,
    model: MakeModel | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
    quiet: bool = True,
    **overrides: Any,
) -> Result:
    """Runs one simulation to its end and returns its tables and final state.

    Args:
        config: a mapping (nested or dotted keys), a `Config`, or the path of a YAML file.
        clients, num_classes: your own clients in place of data.* and partition.*; see `rayfed.data.user_clients`.
        model: your own factory of a `torch.nn.Module` (or a module) in place of model.*.
        loss: (logits, y) -> scalar mean over the batch, in place of cross-entropy.
        quiet: no introduction and no progress line.
        overrides: top-level keys, such as rounds=5.

    Raises:
        UsageError: the configuration cannot work; nothing was started.
        Diverged: a value became infinite or NaN; what was measured until then is in the tables.
        HostLost: a Ray actor died.
    """
    if not isinstance(config, Config):
        source = from_file(config) if isinstance(config, (str, Path)) else config or {}
        config = _read(source, overrides, own_data=clients is not None)
    elif overrides:
        config = Config.read(config.tree(), overrides)
    _check_placement(config.placement)
    plan = make_plan(config, clients=clients, model=model, loss=loss, num_classes=num_classes)
    make_experiment_folder(config.results, config.experiment)
    if not quiet:
        print(introduce(plan), file=sys.stderr, flush=True)
    saved = _saved(plan, quiet)
    digest, state = _in_process(plan, saved, quiet) if not config.placement.hosts else _on_ray(plan, saved, quiet)
    tables = read(config.results, config.experiment)
    mine = [frame[frame.trial == plan.trial].reset_index(drop=True) for frame in tables]
    folder = Path(config.results) / config.experiment
    finals = {plan.population.clients[place].id: final for place, final in state["clients"].items()}
    return Result(plan.trial, folder, digest, mine[0], mine[1], mine[2], state["server"], dict(sorted(finals.items())))


def _read(*sources: Mapping[str, Any], own_data: bool) -> Config:
    """The configuration; with clients of the user's own it may not name data, be it the default."""
    config = Config.read(*sources)
    named = [key for key, value in merged(*sources).get("data", {}).items() if value is not None]
    if own_data and named:
        raise UsageError(f"data.{named[0]}: clients= are given in place of data and partition; leave out data.*")
    return config


def _check_placement(place: Placement) -> None:
    """Refuses what is not there before anything is said or started; a running cluster is asked when it is joined."""
    if not place.hosts:
        device_for(place.gpus)
    elif (nodes := known_nodes()) is not None:
        check_fits(place, nodes)


def _saved(plan: Plan, quiet: bool) -> bytes | None:
    if not plan.config.resume:
        return None
    saved = Recorder(plan.config.results, plan.config.experiment).saved(plan.trial)
    if not quiet:
        print(f"{'resume':>10}  {resumed(plan, saved)}", file=sys.stderr, flush=True)
    return saved


def _in_process(plan: Plan, saved: bytes | None, quiet: bool) -> tuple[str, dict[str, Any]]:
    device = device_for(plan.config.placement.gpus)
    recorder = Recorder(plan.config.results, plan.config.experiment)
    with StatusLine() as status:

        def report(record: Any) -> None:
            if not quiet:
                status.show(one_trial(recorder.progress()[0]))

        return run_trial(
            plan,
            recorder,
            lambda: LocalFleet(plan.blueprint, plan.population, device, gpus=plan.config.placement.gpus),
            device,
            saved=saved,
            report=report,
        )


def _on_ray(plan: Plan, saved: bytes | None, quiet: bool) -> tuple[str, dict[str, Any]]:
    from rayfed.distributed import cluster  # hosts=0 works without Ray

    cluster.connect(plan.config.placement, dashboard=False)

    def watch(progress: Any, wait: Any) -> None:
        if quiet:
            wait(None)
        else:
            watch_trials(progress, wait, lambda trials: one_trial(trials[0]))

    return cluster.run_on_ray(plan, saved, watch)
