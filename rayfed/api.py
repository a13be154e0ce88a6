"""The Python API: `rayfed.run(config) -> Result`, and `sweep(space)`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.ids import ClientIndex
from rayfed.data.population import Client
from rayfed.distributed.placement import check_run, check_sweep, launch
from rayfed.engine.checkpoint import Saved, SavedState, verified
from rayfed.experiments.config import Config
from rayfed.experiments.plan import Loss, ModelFactory, Plan, make_plan
from rayfed.experiments.run_summary import run_summary
from rayfed.experiments.sources import from_file, merged
from rayfed.experiments.space import Space
from rayfed.experiments.sweep import configurations, plan_sweep
from rayfed.experiments.trial import resume_message
from rayfed.results.folder import join, make_experiment_folder
from rayfed.results.read import read
from rayfed.results.recorder import Recorder
from rayfed.results.storage import is_url
from rayfed.results.trials import claimed


@dataclass(frozen=True)
class Result:
    """The outcome of one simulation.

    Attributes:
        trial: The name of the trial.
        folder: The folder of the Parquet tables; a string if it is a URL.
        weights_hash: A hash of the complete final state.
        metrics, rounds, trials: The rows of this trial in the three tables.
    """

    trial: str
    folder: Path | str
    weights_hash: str
    metrics: pd.DataFrame
    rounds: pd.DataFrame
    trials: pd.DataFrame
    _state: SavedState | None = field(default=None, repr=False)

    @cached_property
    def server(self) -> dict[str, Any]:
        """The final state of the server, a nested dict of CPU tensors, read from the last checkpoint at first use.

        Raises:
            UsageError: The state was not kept, or its checkpoint is gone.
        """
        return self._kept("server").server()

    @property
    def clients(self) -> Mapping[int, dict[str, Any]]:
        """The final state of each client that took part, by its id, as a mapping of nested dicts of CPU tensors.

        The mapping holds nothing: each access reads one client's state from the last checkpoint.

        Raises:
            UsageError: The state was not kept. An access raises it if the checkpoint is gone.
        """
        return self._kept("clients").clients

    def _kept(self, name: str) -> SavedState:
        if self._state is None:
            how = "run with keep_state=True or checkpoint.every=1"
            raise UsageError(f"Result.{name}: the final state was not kept; {how}")
        return self._state

    def __repr__(self) -> str:  # the generated one would print every tensor
        shapes = ", ".join(f"{name} {getattr(self, name).shape}" for name in ("metrics", "rounds", "trials"))
        return f"Result({self.trial}, {self.folder}, weights {self.weights_hash}{self._accuracy()}; {shapes})"

    def _accuracy(self) -> str:
        """Return the mean test accuracy over clients in the last round that was scored, in words."""
        points = set(self.trials["default_eval_point"])
        rows = self.metrics.query("metric == 'accuracy' and split == 'test' and client >= 0 and not unseen")
        rows = rows[rows["point"].isin(points) & (rows["round"] == rows["round"].max())]
        return "" if rows.empty else f"; test accuracy {rows['value'].mean():.4f} after round {rows['round'].max()}"


def run(
    config: Mapping[str, Any] | Config | str | Path | None = None,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | None = None,
    model: ModelFactory | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
    quiet: bool = True,
    keep_state: bool = True,
    **overrides: Any,
) -> Result:
    """Run one simulation to its end and return its tables and final state.

    Args:
        config: A mapping with nested or dotted keys, a `Config`, or the path of a YAML file.
        clients: Your own clients, in place of data.* and partition.*; see `rayfed.data.user_clients`.
        model: A function that makes a `torch.nn.Module` (or a module), in place of model.*.
        loss: (logits, y) -> scalar mean over the batch, in place of cross-entropy.
        num_classes: The number of classes of `clients`; by default one more than the largest label.
        quiet: Print neither a summary nor a progress line.
        keep_state: Write the final state to a checkpoint, from which `Result.server` and `Result.clients` read. With
            checkpoint.every above 0 it is written in any case.
        overrides: Top-level keys of the configuration, such as rounds=5.

    Raises:
        UsageError: The configuration cannot work, or another process runs the same trial; nothing was started.
        Diverged: A value became infinite or NaN. The tables hold what was measured before.
        HostLost: A Ray actor died.
        StorageError: The results could not be written. What was written before is kept.
    """
    if not isinstance(config, Config):
        source = from_file(config) if isinstance(config, (str, Path)) else config or {}
        config = _read_config(source, overrides, has_clients=clients is not None)
    elif overrides:
        config = Config.read(config.tree(), overrides)
    check_run(config.placement)
    plan = make_plan(config, clients=clients, model=model, loss=loss, num_classes=num_classes)
    make_experiment_folder(config.results, config.experiment)
    if not quiet:
        print(run_summary(plan), file=sys.stderr, flush=True)
    plan = replace(plan, keep_state=keep_state)
    with claimed(config.results, config.experiment, [plan.trial]):
        digest = launch(plan, _saved_checkpoints(plan, quiet), quiet=quiet)
    home, tables = join(config.results, config.experiment), read(config.results, config.experiment)
    metrics, rounds, trials = (table[table.trial == plan.trial].reset_index(drop=True) for table in tables)
    return Result(
        trial=plan.trial,
        folder=home if is_url(home) else Path(home),
        weights_hash=digest,
        metrics=metrics,
        rounds=rounds,
        trials=trials,
        _state=_final_state(plan),
    )


def sweep(space: Space, *, quiet: bool = False) -> int:
    """Run every trial of `space` with Ray Tune and return the number of trials that failed or diverged.

    With resume=true, trials that are done are skipped.

    Raises:
        UsageError: A configuration cannot work, the resources do not exist, or another process runs one of the trials;
            nothing was started.
        KeyboardInterrupt: The sweep was interrupted. Its trials have ended; the message says how to continue.
    """
    configs = configurations(space)
    check_sweep(config.placement for config in configs)
    plan = plan_sweep(space, configs)
    make_experiment_folder(plan.results, plan.experiment)
    if not quiet:
        print(plan.summary(), file=sys.stderr, flush=True)
    if not plan.jobs:
        return 0
    from rayfed.distributed.tune_driver import run_trials  # imports Ray

    with claimed(plan.results, plan.experiment, [job["trial"] for job in plan.jobs]):
        return run_trials(plan, quiet=quiet)


def _read_config(*sources: Mapping[str, Any], has_clients: bool) -> Config:
    """Return the configuration; beside the user's own clients it may name no data, not even the default."""
    config = Config.read(*sources)
    given = [key for key, value in merged(*sources).get("data", {}).items() if value is not None]
    if has_clients and given:
        raise UsageError(f"data.{given[0]}: clients= are given in place of data and partition; leave out data.*")
    return config


def _saved_checkpoints(plan: Plan, quiet: bool) -> Saved:
    """Return what `resume=true` continues from: nothing, or the newest checkpoint that is whole."""
    if not plan.config.resume:
        return ()
    recorder = Recorder(plan.config.results, plan.config.experiment)
    saved: Saved = recorder.saved(plan.trial)
    if saved:
        check = plan.configuration_hash, plan.blueprint, plan.population
        saved, notes = verified(saved, recorder, plan.trial, *check)
        for note in notes:
            print(f"rayfed: {note}", file=sys.stderr, flush=True)
    if not quiet:
        print(f"{'resume':>10}  {resume_message(plan, saved)}", file=sys.stderr, flush=True)
    return saved


def _final_state(plan: Plan) -> SavedState | None:
    if not (plan.keep_state or plan.config.checkpoint.every):
        return None
    recorder = Recorder(plan.config.results, plan.config.experiment)
    content = next((saved["content"] for saved in recorder.saved(plan.trial) if "content" in saved), None)
    indices = {client.id: ClientIndex(index) for index, client in enumerate(plan.population.clients)}
    return None if content is None else SavedState(recorder, plan.trial, content, indices)
