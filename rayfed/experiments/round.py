"""A finished round, as a loop of the user's sees it."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from rayfed.algorithm import State
from rayfed.core.errors import UsageError
from rayfed.core.ids import ClientIndex
from rayfed.core.trees import tree_map
from rayfed.experiments.simulation import Simulation
from rayfed.experiments.trained_model import trained_model
from rayfed.records.tables import metrics_rows, rounds_rows

if TYPE_CHECKING:
    import pandas as pd

    from rayfed.experiments.given import Given


class Round:
    """A finished round, which is already recorded: look, log, or stop. Nothing that it returns changes the simulation.

    Attributes:
        number: 0 is the setup before the first round, 1 to R are the rounds, and R + 1 is the final stage.
        stage: "setup", "round" or "final".
    """

    def __init__(self, simulation: Simulation, given: "Given"):
        assert simulation.report is not None, "a round is done"
        self._report = simulation.report
        self.number = self._report.record.round
        self.stage = self._report.record.stage
        self._simulation = simulation
        self._given = given

    @property
    def scores(self) -> dict[str, float]:
        """The mean over clients of the metric that chooses rounds (`select.metric`), by split: "val", "test", ….

        It is empty in a round that is not scored, and has no "val" where the data have no validation examples.
        """
        selection = self._simulation.plan.evaluation.selection
        return self._report.means(selection.metric, selection.point)

    @property
    def values(self) -> Mapping[str, float]:
        """All means and costs by name, as trackers show them.

        A mean over clients is `POINT/SPLIT/METRIC`, such as `global/test/accuracy`; a cost is `round/NAME`, such as
        `round/bytes_up`.
        """
        return self._report.values

    @cached_property
    def metrics(self) -> "pd.DataFrame":
        """The rows of this round in the table `metrics`: one value per client, split, point and metric."""
        return metrics_rows([(self.number, self._report.packed)], self._of_trial).to_pandas()

    @cached_property
    def costs(self) -> "pd.Series":
        """The row of this round in the table `rounds`: seconds, bytes, privacy spent."""
        return rounds_rows([self._report.record], self._of_trial).to_pandas().iloc[0]

    def model(self, client: int | None = None) -> nn.Module:
        """Return a copy of the model after this round, in evaluation mode and on the CPU; see `Result.model`.

        Args:
            client: The id of a client, whose model is returned as it is after its last download; None: the server's
                model.

        Raises:
            UsageError: The round is over, there is no such model or client, or the model is more than one network.
        """
        return trained_model(self._simulation.plan, _Live(self._now()), self._given.model, client)

    @property
    def server(self) -> State:
        """A copy of the state of the server after this round: a nested dict of CPU tensors.

        Raises:
            UsageError: The round is over.
        """
        return _Live(self._now()).server()

    def _now(self) -> Simulation:
        if self._simulation.round != self.number:
            raise UsageError(
                f"round {self.number}: its states are gone, since round {self._simulation.round} is done; ask for them "
                "before the loop goes on"
            )
        return self._simulation

    @property
    def _of_trial(self) -> dict[str, Any]:
        config = self._simulation.plan.config
        return {
            "experiment": config.experiment,
            "trial": self._simulation.plan.trial,
            "algorithm": config.algorithm_name,
            "seed": config.seed,
        }

    def __repr__(self) -> str:
        scores = ", ".join(f"{split} {value:.4g}" for split, value in self.scores.items())
        return f"Round({self.number}: {scores or 'not scored'})"


class _Live:
    """The present state of a simulation, in the form of a `SavedState`."""

    def __init__(self, simulation: Simulation):
        self.round = simulation.round
        self._simulation = simulation
        ids = simulation.plan.population.clients.ids
        self.clients: Mapping[int, State] = _ById(simulation.client_states, ids)

    def server(self) -> State:
        return _copied(self._simulation.server_state)


class _ById(Mapping[int, State]):
    """Copies of the states of clients by their id."""

    def __init__(self, states: Mapping[ClientIndex, State], ids: Any):
        self._states = states
        self._places = {int(ids[index]): index for index in states}

    def __getitem__(self, client: int) -> State:
        return _copied(self._states[self._places[client]])

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _copied(state: State) -> State:
    copied: State = tree_map(lambda tensor: tensor.detach().cpu().clone(), state)
    return copied


OnRound = Callable[[Round], object]
"""Is called after each round. What it returns is not used; what it raises ends the run."""
