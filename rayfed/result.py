"""The results of the Python API: the outcome of a run or a sweep, and a report."""

import html
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.engine.checkpoint import SavedState
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan
from rayfed.experiments.round import Round
from rayfed.experiments.trained_model import save_module, trained_model
from rayfed.records.recorder import Recorder
from rayfed.records.storage import is_url, join
from rayfed.reports.charts import plot as draw_plot
from rayfed.reports.read import read, read_by_data, selection_metrics
from rayfed.reports.render import render
from rayfed.reports.summary import View


class Report(str):
    """A report as text, which a notebook shows as it is printed."""

    @classmethod
    def of(
        cls,
        folder: str | Path,
        experiment: str | None,
        view: View,
        *,
        format: str = "text",
        width: int | None = None,
        plot: str | Path | None = None,
        html: str | Path | None = None,
    ) -> "Report":
        """Return the report; write the curves to `plot` and the HTML page to `html` if they are given."""
        tables = read_by_data(folder, experiment, select=view.select)
        text = cls(render(folder, experiment, view, format=format, width=width, tables=tables))
        if plot is not None:
            draw_plot(tables, plot, view=view)
        if html is not None:
            from rayfed.reports.page import write_page  # imports Altair, which takes half a second

            write_page(folder, experiment, html, view)
        return text

    def _repr_html_(self) -> str:
        # notebooks wrap the lines of plain <pre>, and may give it a proportional font
        style = "white-space: pre; overflow-x: auto; font-family: monospace; line-height: 1.3"
        return f'<pre style="{style}">{html.escape(self)}</pre>'

    def __repr__(self) -> str:
        return str(self)


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
    _best: SavedState | None = field(default=None, repr=False)
    _plan: Plan | None = field(default=None, repr=False)
    _given: Given = field(default=Given(), repr=False)

    @classmethod
    def of(cls, plan: Plan, given: Given, weights_hash: str) -> "Result":
        """Read the outcome of `plan`, which has ended, from the folder of its results."""
        results = plan.config.results
        experiment = plan.config.experiment
        tables = read(results, experiment)
        metrics, rounds, trials = (table[table["trial"] == plan.trial].reset_index(drop=True) for table in tables)
        final = None
        if plan.keep_state or plan.config.checkpoint.every:
            final = _saved_state(plan)
        best = None
        if plan.keep_best:
            best = _saved_state(plan, selected=True)
        return cls(
            plan.trial, _folder(results, experiment), weights_hash, metrics, rounds, trials, final, best, plan, given
        )

    @cached_property
    def server(self) -> dict[str, Any]:
        """The final state of the server, a nested dict of CPU tensors, read from the last checkpoint at first use.

        Raises:
            UsageError: The state was not kept, or its checkpoint is gone.
        """
        return self._kept("server").server()

    @property
    def clients(self) -> Mapping[int, dict[str, Any]]:
        """The final state of each client that took part, by its id: a nested dict of CPU tensors.

        Each access to the mapping reads the state of one client from the last checkpoint.

        Raises:
            UsageError: The state was not kept. An access raises it if the checkpoint is gone.
        """
        return self._kept("clients").clients

    def model(self, client: int | None = None, *, round: str = "final") -> nn.Module:
        """Return a trained model, in evaluation mode and on the CPU.

        A model that was given in Python as `model=` keeps its class and its names of layers; otherwise the module is
        that of `model.name`. If the algorithm adds layers to the network (as DBE does), the module is a wrapper with
        `features` and `head`, which has these layers, too. With `data.standardize`, the module is a `Sequential` of a
        layer `standardise`, by the training rows, and the trained `model`, so that it takes inputs as they are in the
        table.

        Args:
            client: The id of a client, whose model is returned as it is after its last download and before further
                local training; None: the server's model.
            round: "final", or "selected" for the round with the best validation score, which reports show.

        Raises:
            UsageError: There is no such model or client, the state was not kept or is gone, or the model is more than
                one network.
        """
        if round not in ("final", "selected"):
            raise UsageError(f"Result.model(round={round!r}): {suggestion(round, ['final', 'selected'])}")
        if round == "selected":
            state = self._kept_best()
        else:
            state = self._kept("model()")
        assert self._plan is not None, "a state is kept with its plan"
        return trained_model(self._plan, state, self._given.model, client)

    def save(self, folder: str | Path, client: int | None = None, *, round: str = "final") -> Path:
        """Write the model that `model` returns to `folder`, and return the folder.

        All weights go to `model.safetensors`, under the names of its `state_dict()`. For a model of PEFT, or for each
        that is a part of it, the adapter is written in PEFT's own format, to `folder` or to the folder of the part's
        name in it.

        Raises:
            UsageError: As `model` does.
        """
        module = self.model(client, round=round)
        save_module(module, Path(folder))
        return Path(folder)

    def report(self, **options: Any) -> Report:
        """Return the report on this trial's experiment; see `rayfed.report` for the options."""
        assert self._plan is not None, "results are made from a plan"
        return Report.of(self._plan.config.results, self._plan.config.experiment, **_with_view(options))

    def _kept(self, name: str) -> SavedState:
        if self._state is None:
            how = "run with keep_state=True or checkpoint.every=1"
            raise UsageError(f"Result.{name}: the final state was not kept; {how}")
        return self._state

    def _kept_best(self) -> SavedState:
        if self._best is None:
            how = "run with validation data, and keep_state=True or checkpoint.best=true"
            raise UsageError(f"Result.model(round='selected'): the state of that round was not kept; {how}")
        return self._best

    def __repr__(self) -> str:  # the generated one would print every tensor
        shapes = ", ".join(f"{name} {getattr(self, name).shape}" for name in ("metrics", "rounds", "trials"))
        return f"Result({self.trial}, {self.folder}, weights {self.weights_hash}{self._score()}; {shapes})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the last scores of each client, and the folder of the tables."""
        scores = self._last_scores()
        title = f"<b>{html.escape(self.trial)}</b>{html.escape(self._score().replace(';', ':', 1))}"
        where = f"<small>{html.escape(str(self.folder))}, weights {html.escape(self.weights_hash)}</small>"
        if scores.empty:
            return f"{title}<br>{where}"
        table = scores.pivot_table(index=["client", "domain"], columns=["metric", "split"], values="value")
        shown = table.to_html(float_format=lambda value: f"{value:.4f}", max_rows=20, border=0)
        return f"{title}{shown}{where}"

    def _last_scores(self) -> pd.DataFrame:
        """Return the scores of the participants at the default point in the last round that was scored."""
        points = set(self.trials["default_eval_point"])
        rows = self.metrics.query("client >= 0 and not unseen")
        rows = rows[rows["metric"].isin([self._metric(), "accuracy", "loss"])]
        rows = rows[rows["point"].isin(points) & rows["split"].isin(["val", "test"])]
        return rows[rows["round"] == rows["round"].max()]

    def _metric(self) -> str:
        """Return the metric that selects rounds."""
        return next(iter(selection_metrics(self.trials, self.metrics).values()))

    def _score(self) -> str:
        """Return the mean over clients of the metric that selects rounds, in the last round that was scored."""
        metric = self._metric()
        rows = self._last_scores()
        rows = rows[(rows["metric"] == metric) & (rows["split"] == "test")]
        if rows.empty:
            return ""
        return f"; test {metric} {rows['value'].mean():.4f} after round {rows['round'].max()}"


class Rounds(Iterator[Round]):
    """The rounds of one simulation; see `rayfed.rounds`. In a `with` statement, its end closes the loop."""

    def __init__(self, plan: Plan, given: Given, rounds: Generator[Round, None, str]):
        self._plan = plan
        self._given = given
        self._rounds = rounds
        self._hash = ""

    @property
    def trial(self) -> str:
        """The name of the trial in the tables."""
        return self._plan.trial

    def __next__(self) -> Round:
        try:
            return next(self._rounds)
        except StopIteration as end:
            if end.value is not None:  # else it had ended before
                self._hash = end.value
            raise

    def throw(self, error: BaseException) -> None:
        """End the simulation with an error, which is recorded as that of the trial, and raise it."""
        self._rounds.throw(error)

    def close(self) -> None:
        """Leave the loop: the state of the last round is saved, and the trial goes on with resume=true."""
        self._rounds.close()

    def result(self) -> Result:
        """Leave the loop unless it has ended, and return what `rayfed.run` returns.

        The `weights_hash` is empty if rounds are left.
        """
        self.close()
        return Result.of(self._plan, self._given, self._hash)

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class SweepResult:
    """The outcome of a sweep.

    Attributes:
        experiment: The name of the experiment.
        folder: The folder of the Parquet tables; a string if it is a URL.
        failed: The number of trials that failed or diverged in this call.
        metrics, rounds, trials: The three tables, of all trials of the experiment.
        tune: Ray Tune's `ResultGrid` of the trials of this call; None if they ran without Ray.
    """

    experiment: str
    folder: Path | str
    failed: int
    metrics: pd.DataFrame
    rounds: pd.DataFrame
    trials: pd.DataFrame
    tune: Any = field(default=None, repr=False)
    _results: str = field(default="", repr=False)

    @classmethod
    def of(cls, results: str, experiment: str, failed: int, tune: Any = None) -> "SweepResult":
        """Read the outcome of an experiment that has ended from the folder of its results."""
        metrics, rounds, trials = read(results, experiment)
        return cls(experiment, _folder(results, experiment), failed, metrics, rounds, trials, tune, _results=results)

    def report(self, **options: Any) -> Report:
        """Return the report on the sweep; see `rayfed.report` for the options."""
        return Report.of(self._results, self.experiment, **_with_view(options))

    def __repr__(self) -> str:
        counts = self.trials["status"].value_counts()
        states = ", ".join(f"{count} {status}" for status, count in counts.items())
        return f"SweepResult({self.experiment}, {self.folder}: {len(self.trials)} trials, {states})"

    def _repr_html_(self) -> str:
        return self.report(width=120)._repr_html_()


def _saved_state(plan: Plan, *, selected: bool = False) -> SavedState | None:
    """Return the state in the newest checkpoint of a plan, or in that of the selected round; None if there is none."""
    recorder = Recorder(plan.config.results, plan.config.experiment)
    if selected:
        content = recorder.saved_best(plan.trial)
    else:
        content = next((saved["content"] for saved in recorder.saved(plan.trial) if "content" in saved), None)
    if content is None:
        return None
    return SavedState(recorder, plan.trial, content, plan.population.clients.ids)


def _folder(results: str, experiment: str) -> Path | str:
    home = join(results, experiment)
    if is_url(home):
        return home
    return Path(home)


def _with_view(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `rayfed.report` as those of `Report.of`."""
    rest = dict(options)
    of_view = {}
    for declared in fields(View):
        if declared.name in rest:
            of_view[declared.name] = rest.pop(declared.name)
    return {"view": View(**of_view), **rest}
