"""The Python API: `run`, `rounds`, `sweep`, `report`, `load` and `check`. The command line uses it, too."""

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from rayfed import launch
from rayfed.core.errors import StorageError, UsageError
from rayfed.core.options import suggestion
from rayfed.core.rng import one_at_a_time
from rayfed.core.terminal import is_watched
from rayfed.core.words import first_few
from rayfed.data.population import Client
from rayfed.data.user_clients import Clients
from rayfed.engine.checkpoint import verified
from rayfed.experiments.capacity import check_run, check_sweep
from rayfed.experiments.config import Config
from rayfed.experiments.contract import Finding, findings
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan, make_plan
from rayfed.experiments.plan_model import ModelFactory
from rayfed.experiments.round import OnRound, Round
from rayfed.experiments.run_summary import run_summary
from rayfed.experiments.simulation import check_rounds, resume_message, usable
from rayfed.experiments.sources import from_file
from rayfed.experiments.space import Space, configurations, read_space
from rayfed.experiments.sweep import plan_sweep
from rayfed.experiments.tuning import Tuning
from rayfed.losses.base import Loss
from rayfed.records.checkpoint_store import Saved
from rayfed.records.published import write_published
from rayfed.records.recorder import Recorder
from rayfed.records.storage import make_experiment_folder, open_storage, storage_errors
from rayfed.records.tracking import check_tracking
from rayfed.records.trials import claimed, readable_trials, recorded_configuration, recorded_value
from rayfed.reports.summary import View
from rayfed.result import Report, Result, Rounds, SweepResult


@one_at_a_time
def run(
    config: Mapping[str, Any] | Config | str | Path | None = None,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | Clients | None = None,
    model: ModelFactory | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
    quiet: bool | None = None,
    keep_state: bool = True,
    on_round: OnRound | None = None,
    **overrides: Any,
) -> Result:
    """Run one simulation to its end and return its tables and final state.

    Args:
        config: A mapping with nested or dotted keys, a `Config`, or the path of a YAML file.
        clients: Your own clients, in place of data.* and partition.*; see `rayfed.data.user_clients`.
        model: A function that makes a `torch.nn.Module` (or a module), in place of model.*.
        loss: (logits, y) -> scalar mean over the batch, in place of loss.*.
        num_classes: The number of classes of `clients`; by default one more than the largest label.
        quiet: Print neither a summary nor the progress. By default they are shown where somebody watches: on a
            terminal and in a notebook.
        keep_state: Write the final state to a checkpoint, from which `Result.server`, `Result.clients` and
            `Result.model` read, and where there are validation data, that of the round with the best score so far (see
            checkpoint.best). With checkpoint.every above 0 the final state is written in any case.
        on_round: Is called with each `Round` once it is recorded, in this process. What it raises ends the run, which
            goes on with resume=true. With it, the server runs in this process, too; see `rounds`.
        overrides: Top-level keys of the configuration, such as rounds=5.

    Raises:
        UsageError: The configuration cannot work, or another process runs the same trial; nothing was started.
        Diverged: A value became infinite or NaN. The tables hold what was measured before.
        HostLost: A Ray actor died.
        StorageError: The results could not be written. What was written before is kept.
    """
    asked = _Asked.of(config, overrides, clients, model, loss, num_classes)
    return asked.run(on_round, quiet=_is_quiet(quiet), keep_state=keep_state)


@one_at_a_time
def rounds(
    config: Mapping[str, Any] | Config | str | Path | None = None,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | Clients | None = None,
    model: ModelFactory | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
    quiet: bool | None = None,
    keep_state: bool = True,
    **overrides: Any,
) -> Rounds:
    """Return an iterator over the rounds of one simulation, which runs while the loop asks for the next round.

        rounds = rayfed.rounds("study.yaml", clients=clients)
        for round in rounds:
            wandb.log(round.scores)
            if round.scores["val"] > 0.9:
                break
        result = rounds.result()

    Each `Round` is recorded before the loop sees it. A loop that is left early leaves a trial that goes on with
    resume=true, from the last round. The random generators and settings of torch, NumPy and Python that the body of the
    loop sees are its own, and do not change the simulation. Bits are those of `rayfed.run`.

    The server runs in this process, its clients on `placement.hosts` processes of Ray or here. Lost hosts are replaced
    as in `rayfed.run`; if this process ends, resume=true goes on.

    Args:
        config, clients, model, loss, num_classes, quiet, keep_state, overrides: As for `rayfed.run`.

    Raises:
        UsageError: The configuration cannot work; nothing was started. What `rayfed.run` raises during the simulation
            is raised when the next round is asked for.
    """
    asked = _Asked.of(config, overrides, clients, model, loss, num_classes)
    return asked.rounds(quiet=_is_quiet(quiet), keep_state=keep_state)


@dataclass(frozen=True)
class _Asked:
    """One simulation, as `run`, `rounds`, `trainable` and `check` are asked for it."""

    config: Config
    given: Given

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any] | Config | str | Path | None,
        overrides: Mapping[str, Any],
        clients: Sequence[Client | Mapping[str, Any]] | Clients | None,
        model: ModelFactory | nn.Module | None,
        loss: Loss | None,
        num_classes: int | None,
    ) -> "_Asked":
        given = Given(clients=clients, model=model, loss=loss, num_classes=num_classes)
        return cls(_config_of(config, overrides), given)

    def run(self, on_round: OnRound | None, *, quiet: bool, keep_state: bool) -> Result:
        """Run it to its end; with `on_round`, in this process."""
        if on_round is not None:
            return _called_in_each(self.rounds(quiet=quiet, keep_state=keep_state), on_round)
        plan = self.planned_run(quiet=quiet, keep_state=keep_state)
        with claimed(plan.config.results, plan.config.experiment, [plan.trial]):
            digest = launch.run_trial(plan, _saved_checkpoints(plan, quiet), quiet=quiet)
        _say_outcome(plan, quiet=quiet)
        return Result.of(plan, self.given, digest)

    def rounds(self, *, quiet: bool, keep_state: bool) -> Rounds:
        """Return its rounds, which run while somebody asks for the next one."""
        plan = self.planned_run(quiet=quiet, keep_state=keep_state)
        return Rounds(plan, self.given, _claimed_rounds(plan, self.given, quiet=quiet))

    def planned_run(self, *, quiet: bool, keep_state: bool) -> Plan:
        """Return the plan of a single run, after all checks that need nothing started."""
        config = self.config
        check_run(config.placement)
        check_tracking(config.tracking, config.results)
        plan = replace(make_plan(config, self.given), keep_state=keep_state)
        make_experiment_folder(config.results, config.experiment)
        check_rounds({plan.trial: config})
        if not quiet:
            print(run_summary(plan), file=sys.stderr, flush=True)
        return plan

    def trainable(self, *, keep_state: bool) -> Any:
        """Return it as a trainable of Ray Tune."""
        from rayfed.distributed.trainable import trainable_of  # needs Ray

        check_sweep([self.config.placement])
        check_tracking(self.config.tracking, self.config.results)
        return trainable_of(make_plan(self.config, self.given), self.given, keep_state=keep_state)


def _called_in_each(rounds_left: Rounds, on_round: OnRound) -> Result:
    """Call `on_round` after each of the rounds. What it raises ends the run."""
    for round in rounds_left:
        try:
            on_round(round)
        except BaseException as error:
            rounds_left.throw(error)
    return rounds_left.result()


def _claimed_rounds(plan: Plan, given: Given, *, quiet: bool) -> Generator[Round, None, str]:
    config = plan.config
    with claimed(config.results, config.experiment, [plan.trial]):
        digest = yield from launch.rounds(plan, given, _saved_checkpoints(plan, quiet), quiet=quiet)
    _say_outcome(plan, quiet=quiet)
    return digest


def _is_quiet(given: bool | None) -> bool:
    if given is None:
        return not is_watched()
    return given


def _say_outcome(plan: Plan, *, quiet: bool) -> None:
    """Print what a run has measured, unless `quiet`."""
    config = plan.config
    if not quiet and plan.blueprint.vmap_clients is None:
        number = recorded_value(config.results, config.experiment, plan.trial, "vmap_clients")
        print(f"placement.vmap_clients=auto: measured {number}", file=sys.stderr, flush=True)
    if not quiet and plan.evaluation.stop_rule is not None:
        reason = recorded_value(config.results, config.experiment, plan.trial, "stop_reason")
        line = "early stopping: all rounds ran"
        if reason:
            line = f"stopped early: {reason}"
        print(line, file=sys.stderr, flush=True)


@one_at_a_time
def sweep(
    space: Mapping[str, Any] | str | Path,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | Clients | None = None,
    model: ModelFactory | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
    callbacks: Sequence[Any] = (),
    scheduler: Any = None,
    search_alg: Any = None,
    quiet: bool | None = None,
    keep_state: bool = False,
    **overrides: Any,
) -> SweepResult:
    """Run every configuration of a search space with every seed and return the tables of all trials.

    Args:
        space: A mapping or the path of a YAML file, with the keys `seeds`, `arms` and `search`; see
            `rayfed.experiments.space`. Wherever a value may stand, {"grid": [...]} may stand as well.
        clients, model, loss, num_classes: As for `rayfed.run`, for all trials.
        callbacks: Callbacks of Ray Tune, such as `WandbLoggerCallback`. One that fails is left out from then on.
        scheduler: A scheduler of Ray Tune, in place of search.scheduler. Unless it names another metric, it maximises
            `last_gain`: the last validation score, negative where lower is better.
        search_alg: A search algorithm of Ray Tune, such as `HyperOptSearch`, which chooses search.samples
            configurations of a space with one arm, by the mean over the seeds of the best validation score.
        quiet: As for `rayfed.run`.
        keep_state: Keep the final state of every trial, from which `rayfed.load` reads.
        overrides: Top-level keys, such as rounds=5 or seeds=[0, 1]; they count for all arms.

    Raises:
        UsageError: A configuration cannot work, the resources do not exist, or another process runs one of the trials;
            nothing was started.
        HostLost: Ray did not start, or its processes died too often.
        KeyboardInterrupt: The sweep was interrupted. Its trials have ended; the message says how to continue.
    """
    quiet = _is_quiet(quiet)
    if search_alg is not None:
        overrides = {"search.kind": "tune", **overrides}
    drawn = read_space(_values_of(space), overrides)
    given = Given(clients=clients, model=model, loss=loss, num_classes=num_classes)
    configs = configurations(drawn)
    tuning = Tuning(tuple(callbacks), scheduler, search_alg)
    swept = run_sweep(drawn, configs, given, quiet=quiet, keep_state=keep_state, tuning=tuning)
    return SweepResult.of(configs[0].results, configs[0].experiment, swept.failed, swept.tune)


def trainable(
    config: Mapping[str, Any] | Config | str | Path | None = None,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | Clients | None = None,
    model: ModelFactory | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
    keep_state: bool = False,
    **overrides: Any,
) -> Any:
    """Return a trainable for a `ray.tune.Tuner` of your own, with any searcher, scheduler and callback of Ray Tune.

    Tune's configuration overrides keys of `config`: {"algorithm.mu": tune.loguniform(0.01, 10)}. A trial reserves what
    `placement` says, and reports every round: `round` and `training_iteration`; `gain`, the validation score, negative
    where lower is better; `last_gain`, which rounds without an evaluation have, too; `best`, the best so far; `val` and
    `test`; all scores as POINT/SPLIT/METRIC; and the costs as round/NAME. Tune's checkpoints point at those in the
    folder of the results, where the tables of all trials are as well. A scheduler may change `algorithm.*` and
    `local.lr` of a trial; the table `events` then says from which round the new value counts.

    Args:
        config, clients, model, loss, num_classes, overrides: As for `run`.
        keep_state: Keep the final state of every trial, from which `rayfed.load` reads.

    Raises:
        UsageError: The configuration cannot work, or the resources do not exist.
        HostLost: Ray did not start.
    """
    return _Asked.of(config, overrides, clients, model, loss, num_classes).trainable(keep_state=keep_state)


def run_sweep(
    space: Space,
    configs: Sequence[Config],
    given: Given | None = None,
    *,
    quiet: bool = False,
    keep_state: bool = False,
    tuning: Tuning | None = None,
) -> launch.Swept:
    """Run every trial of `space`.

    With resume=true, trials that are done are skipped. `configs` are `configurations(space)`; the other arguments and
    errors are those of `sweep`.
    """
    check_sweep(config.placement for config in configs)
    plan = plan_sweep(space, configs, given, keep_state=keep_state, tuning=tuning)
    make_experiment_folder(plan.results, plan.experiment)
    if not quiet:
        print(plan.summary(), file=sys.stderr, flush=True)
    published = plan.published()
    if published is not None:
        with storage_errors(plan.results):
            write_published(open_storage(plan.results).child(plan.experiment), published)
    if not plan.jobs and not plan.space.adaptive:
        return launch.Swept(0, None)
    with claimed(plan.results, plan.experiment, plan.names):
        return launch.run_sweep(plan, quiet=quiet)


def report(
    folder: str | Path = "results",
    experiment: str | None = None,
    *,
    metric: str | None = None,
    point: str | None = None,
    split: str | None = None,
    rule: str | None = None,
    select: str | None = None,
    format: str = "text",
    plot: str | Path | None = None,
    html: str | Path | None = None,
) -> Report:
    """Return the report that `rayfed report` prints, as a text that a notebook shows as it is.

    Args:
        folder: The folder of the results, a path or a URL.
        experiment: One experiment; None: every one in `folder`.
        metric: The metric to show; None: the one that chooses.
        point: The model to show; None: the one at which each algorithm's paper evaluates.
        split: The data to show; None: the first of test, ood, val and train with values.
        rule: How the round is chosen: final, selected, oracle or best5; None: selected if there are validation values.
        select: The metric that chooses rounds and hyperparameters; None: `select.metric` of the runs.
        format: The format of the tables: text, markdown, latex or csv.
        plot: A file for a plot of the metric over rounds, as PNG, PDF or SVG; None: no plot.
        html: A file for the self-contained page; None: no page.

    Raises:
        UsageError: There are no results, or none of that metric, point, split or rule, or a file cannot be written.
    """
    view = View(metric=metric, point=point, split=split, rule=rule, select=select)
    return Report.of(folder, experiment, view, format=format, plot=plot, html=html)


@one_at_a_time
def load(
    folder: str | Path = "results",
    experiment: str | None = None,
    trial: str | None = None,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | Clients | None = None,
    model: ModelFactory | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
) -> Result:
    """Return the result of an earlier simulation from its files, as `rayfed.run` returned it.

    The final state is there if it was kept: after `rayfed.run`, and otherwise with checkpoint.every above 0.

    Args:
        folder: The folder of the results, a path or a URL.
        experiment: The experiment; None: the only one.
        trial: The name of the trial; None: the only one.
        clients, model, loss, num_classes: What was given to `rayfed.run`, again, since it is not saved.

    Raises:
        UsageError: There is no such trial, or it cannot be made again from what is given.
    """
    from rayfed.reports.read import list_experiments

    names = list_experiments(folder)
    experiment = _only(names, experiment, "experiment", str(folder))
    with storage_errors(str(folder)):
        readable, faults = readable_trials(open_storage(folder).child(experiment, "trials"))
    rows = {row["trial"]: row for row in readable}
    trial = _only(sorted(rows.keys() | faults), trial, "trial", f"experiment {experiment}")
    if trial in faults:
        raise StorageError(faults[trial])
    given = Given(clients=clients, model=model, loss=loss, num_classes=num_classes)
    values = _recorded_configuration(rows[trial], given) | {"results": str(folder), "experiment": experiment}
    plan = replace(make_plan(Config.read(values), given), keep_state=True)
    if plan.trial != trial:
        raise UsageError(
            f"trial={trial}: data, model, loss or code are not those of the trial, but those of {plan.trial}; give "
            "load what was given to run"
        )
    return Result.of(plan, given, rows[trial]["weights_hash"] or "")


@one_at_a_time
def check(
    config: Mapping[str, Any] | Config | str | Path | None = None,
    *,
    clients: Sequence[Client | Mapping[str, Any]] | Clients | None = None,
    model: ModelFactory | nn.Module | None = None,
    loss: Loss | None = None,
    num_classes: int | None = None,
    **overrides: Any,
) -> tuple[Finding, ...]:
    """Check that the configured algorithm keeps the contract with the engine, as `rayfed check` does.

    In a test of your own: `assert all(finding.kept for finding in rayfed.check({"algorithm.name": "mine:Mine"}))`.

    Args:
        config: As for `rayfed.run`; a few examples of a few clients are used.
        clients, model, loss, num_classes: As for `rayfed.run`.
        overrides: Top-level keys of the configuration.

    Raises:
        UsageError: The configuration cannot work.
    """
    asked = _Asked.of(config, overrides, clients, model, loss, num_classes)
    return tuple(iter_findings(asked.config, asked.given))


def iter_findings(config: Config, given: Given | None = None) -> Iterator[Finding]:
    """Yield what `check` returns, one finding after the other."""
    check_run(config.placement)
    plan = make_plan(config, given)
    return findings(plan, lambda small: launch.run_trial(small, (), quiet=True))


def _config_of(config: Mapping[str, Any] | Config | str | Path | None, overrides: Mapping[str, Any]) -> Config:
    """Return the configuration that `run` and `check` are called with."""
    if not isinstance(config, Config):
        return Config.read(_values_of(config or {}), overrides)
    if overrides:
        return Config.read(config.tree(), overrides)
    return config


def _values_of(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return the values in a mapping or a YAML file."""
    if isinstance(source, (str, Path)):
        return from_file(source)
    return source


def _only(names: Sequence[str], name: str | None, key: str, where: str) -> str:
    """Return `name`, or the only one of `names`."""
    if name is None and len(names) == 1:
        return names[0]
    if name is None:
        raise UsageError(f"{key}: {where} has {len(names)} ({first_few(names)}); give one of them")
    if name not in names:
        raise UsageError(f"{key}={name}: no such {key} in {where}; {suggestion(name, names)}")
    return name


def _recorded_configuration(row: Mapping[str, Any], given: Given) -> dict[str, Any]:
    """Return the configuration in a row of the table `trials`, with dotted keys."""
    replaced = set[str]()
    for name, mark, groups in _GIVEN:
        if getattr(given, name) is not None:
            replaced.update(groups)
        elif str(row.get(f"{groups[0]}.name")).startswith(mark):
            raise UsageError(f"trial={row['trial']}: was run with {name}=, which is not saved; give it again")
    kept = {}
    for key, value in recorded_configuration(row).items():
        if key.partition(".")[0] not in replaced or key == "data.without":
            kept[key] = value
    return kept


_GIVEN = (
    ("clients", "clients:", ("data", "partition")),
    ("model", "own:", ("model",)),
    ("loss", "own:", ("loss",)),
)
"""What may be given in Python: its name, how the name of its group then begins, and the groups that it replaces."""


def _saved_checkpoints(plan: Plan, quiet: bool) -> Saved:
    """Return what `resume=true` continues from: nothing, or the newest checkpoint that is whole."""
    if not plan.config.resume:
        return ()
    recorder = Recorder(plan.config.results, plan.config.experiment)
    saved = usable(plan.config, recorder.saved(plan.trial))
    if saved:
        saved, notes = verified(saved, recorder, plan.trial, plan.configuration_hash, plan.blueprint)
        for line in notes:
            print(f"rayfed: {line}", file=sys.stderr, flush=True)
    if not quiet:
        print(f"{'resume':>10}  {resume_message(plan.config, saved)}", file=sys.stderr, flush=True)
    return saved
