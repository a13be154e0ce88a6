"""How a run refers to its clients and to its exchanges."""

from typing import Literal, NamedTuple, NewType

ClientIndex = NewType("ClientIndex", int)
"""The position of a client in the population, by which the engine and algorithms refer to it."""

ClientId = NewType("ClientId", int)
"""The number that the partition gave to a client, by which tables, messages and users refer to it."""

Stage = Literal["setup", "round", "final"]


class Moment(NamedTuple):
    """An exchange within a run.

    Attributes:
        stage: "setup" before the first round, "round", or "final" after the last round.
        round: The round, from 1; 0 in the setup and one more than the last round in the final stage.
        exchange: The position of the exchange in its stage or round, from 0.
    """

    stage: Stage
    round: int
    exchange: int = 0
