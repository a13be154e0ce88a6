"""When something happens in a run."""

from typing import Literal, NamedTuple

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
