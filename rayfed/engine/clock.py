"""The simulated clock and its clients: how fast they train and send, when they are there, and which drop out."""

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rayfed.algorithm import Phase
from rayfed.core.errors import UsageError, one_line, shown
from rayfed.core.ids import Moment
from rayfed.core.paths import absolute, read_file
from rayfed.core.rng import generator

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("client", "steps_per_second", "up_mbps", "down_mbps", "available")
_LEAST = 1e-9
"""The smallest speed and bandwidth of a profile, so that times are finite."""
_MOST_CYCLES = 10_000


class Device(NamedTuple):
    """The device of a client.

    Attributes:
        step_seconds: The seconds of a local step.
        up_mbps, down_mbps: Its bandwidths in 10⁶ bits per second; infinite where sending takes no time.
        available: The seconds from which and until which it is there, in ascending order; None: always.
    """

    step_seconds: float
    up_mbps: float = math.inf
    down_mbps: float = math.inf
    available: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The clock of a simulation.

    Attributes:
        step_seconds: The seconds of a local step of the median client; 0 without a clock.
        speed_spread: The standard deviation over clients of the logarithm of what they draw: seconds per step, and both
            bandwidths.
        up_mbps, down_mbps: The bandwidths of the median client; None: sending takes no time.
        server_seconds: The seconds that the server takes for an update.
        profile: The devices of all clients, in place of drawn ones.
    """

    step_seconds: float = 0.0
    speed_spread: float = 0.0
    up_mbps: float | None = None
    down_mbps: float | None = None
    server_seconds: float = 0.0
    profile: tuple[Device, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether clients take any time."""
        return bool(self.step_seconds or self.profile or self.sends)

    @cached_property
    def sends(self) -> bool:
        """Whether sending takes time."""
        drawn = self.up_mbps is not None or self.down_mbps is not None
        return drawn or any(math.isfinite(min(device.up_mbps, device.down_mbps)) for device in self.profile)

    @cached_property
    def _period(self) -> float:
        return max(device.available[-1][1] for device in self.profile if device.available)

    def device(self, seed: int, client: int) -> Device:
        """Return the device of a client, which it keeps."""
        if self.profile:
            return self.profile[client]

        def factor(purpose: str) -> float:
            return math.exp(self.speed_spread * generator(seed, purpose, client=client).normal())

        up, down = (
            math.inf if mbps is None else mbps * factor(purpose)
            for purpose, mbps in (("up_mbps", self.up_mbps), ("down_mbps", self.down_mbps))
        )
        return Device(self.step_seconds * factor("speed"), up, down)

    def end(self, device: Device, start: float, steps: int, down: int, up: int) -> float:
        """Return when a client that starts at `start` has received `down` bytes, trained and sent `up` bytes.

        It pauses while it is away. The availability of all clients repeats after the last time of the profile. After
        `_MOST_CYCLES` of these cycles, the end is not exact: the client is taken to be there evenly in a cycle.
        """
        seconds = steps * device.step_seconds + 8e-6 * (down / device.down_mbps + up / device.up_mbps)
        if device.available is None:
            return start + seconds
        first = math.floor(start / self._period)
        for cycle in range(first, first + _MOST_CYCLES):
            for begins, ends in device.available:
                begins, ends = max(begins + cycle * self._period, start), ends + cycle * self._period
                if begins + seconds <= ends:
                    return begins + seconds
                seconds -= max(ends - begins, 0.0)
        of_a_cycle = sum(ends - begins for begins, ends in device.available)
        cycles = first + _MOST_CYCLES + seconds / of_a_cycle
        return cycles * self._period


@dataclass(frozen=True, kw_only=True)
class Availability:
    """How much of the local work clients do in a round, and whether they reply.

    Attributes:
        least_work: For each round, each client draws the epochs (or steps) that it trains, uniformly between this share
            of the configured number, rounded up, and the configured number.
        dropout: The probability that a sampled client drops out of a round.
        deadline: The simulated seconds after which the server ignores replies; None if it waits for all.
    """

    least_work: float = 1.0
    dropout: float = 0.0
    deadline: float | None = None

    @property
    def loses_clients(self) -> bool:
        """Whether sampled clients may be missing from a round."""
        return bool(self.dropout) or self.deadline is not None

    def local_work(self, local: Phase, seed: int, moment: Moment, client: int) -> Phase:
        """Return the local training of a client in a round."""
        if self.least_work == 1 or moment.stage != "round":
            return local
        whole = local.steps if local.steps is not None else local.epochs or 1
        rng = generator(seed, "local work", round=moment.round, client=client)
        drawn = int(rng.integers(max(1, math.ceil(self.least_work * whole - 1e-9)), whole + 1))
        return local._replace(steps=drawn) if local.steps is not None else local._replace(epochs=drawn)

    def drops_out(self, seed: int, round: int, client: int) -> bool:
        """Return whether a sampled client drops out of a round."""
        return bool(self.dropout) and generator(seed, "dropout", round=round, client=client).random() < self.dropout


def read_profile(path: str, ids: Sequence[int]) -> tuple[Device, ...]:
    """Return the devices of the clients with these `ids`, in their order, from a CSV or Parquet file.

    A row is that of the client in the column `client`, or else rows are in the order of the clients. Bandwidths may be
    missing. `available` is text, such as "0-3600 7200-9000", in seconds.

    Raises:
        UsageError: The file cannot be read, lacks a client, or has an impossible value.
    """
    where = f"clock.profile={path}"
    table = _rows_by_client(_profile_table(path, where), ids, where)
    speeds = _positive(table, "steps_per_second", where)
    if missing := table.index[table["steps_per_second"].isna()].tolist():
        raise UsageError(f"{where}: steps_per_second of client {missing[0]} is nan; must be more than 0")
    up, down = _positive(table, "up_mbps", where), _positive(table, "down_mbps", where)
    times = [_intervals(text, f"{where}: available of client {i}") for i, text in table["available"].items()]
    return tuple(map(Device, [1 / speed for speed in speeds], up, down, times))


def _profile_table(path: str, where: str) -> "pd.DataFrame":
    """Return the columns of a profile; cells are numbers, text or missing."""
    import pandas as pd  # takes most of a second, in which hosts would not start
    from pyarrow import parquet

    try:
        content = io.BytesIO(read_file(absolute(path)))
        if Path(path).suffix == ".csv":
            table = pd.read_csv(content)
        else:
            stored = parquet.read_table(content)
            stored.validate(full=True)
            table = stored.replace_schema_metadata(None).to_pandas()
    except Exception as error:  # pandas and pyarrow raise many kinds for damaged files
        raise UsageError(f"{where}: cannot be read as CSV or Parquet ({one_line(error)[:200]})") from error
    for name, column in table.items():
        if name not in _COLUMNS:
            raise UsageError(f"{where}: unknown column {name}; known: {', '.join(_COLUMNS)}")
        if not all(map(_is_plain, column)):
            raise UsageError(f"{where}: column {name} is {column.dtype}; expected numbers or text")
    if "steps_per_second" not in table:
        raise UsageError(f"{where}: has no column steps_per_second")
    return table


def _is_plain(cell: object) -> bool:
    return cell is None or isinstance(cell, (str, int, float))


def _rows_by_client(table: "pd.DataFrame", ids: Sequence[int], where: str) -> "pd.DataFrame":
    """Return all of `_COLUMNS` for the clients with these `ids`, by their ids."""
    if "client" not in table:
        if len(table) > len(ids):
            count = f"{len(table)} rows for {len(ids)} clients"
            raise UsageError(f"{where}: has {count}; name them in a column client")
        table = table.assign(client=list(ids)[: len(table)])
    named = table.set_index("client", drop=False)
    twice = named.index[named.index.duplicated()].tolist()
    if twice:
        raise UsageError(f"{where}: has several rows for client {twice[0]}")
    known = set(named.index)
    missing = [client for client in ids if client not in known]
    if missing:
        lacking = f"{missing[0]}, as for {len(missing)} of {len(ids)} clients"
        raise UsageError(f"{where}: has no row for client {lacking}")
    return named.reindex(columns=_COLUMNS).loc[list(ids)]


def _positive(table: "pd.DataFrame", name: str, where: str) -> list[float]:
    """Return a column of numbers above 0; infinity where they are missing."""
    import pandas as pd

    numbers = pd.to_numeric(table[name], errors="coerce")
    wrong = table[name].notna() & ~(numbers > 0)
    if wrong.any():
        client = wrong.idxmax()
        raise UsageError(f"{where}: {name} of client {client} is {table[name][client]}; must be more than 0")
    tiny = numbers < _LEAST
    if tiny.any():
        client = tiny.idxmax()
        raise UsageError(f"{where}: {name} of client {client} is {numbers[client]}; must be at least {_LEAST:g}")
    return [float(number) for number in numbers.fillna(math.inf)]


def _intervals(text: object, where: str) -> tuple[tuple[float, float], ...] | None:
    """Return the intervals of a text such as "0-3600 7200-9000"; None without a text."""
    if text is None or text != text:  # pandas reads an empty cell as NaN
        return None
    try:
        pairs = [(float(begin), float(end)) for begin, end in (part.split("-") for part in str(text).split())]
    except ValueError:
        pairs = []
    times = [time for pair in pairs for time in pair]
    ascends = all(first < second for first, second in itertools.pairwise(times))
    if not times or times[0] < 0 or not ascends or not math.isfinite(times[-1]):
        raise UsageError(f"{where} is {shown(text)}; give ascending seconds, such as 0-3600 7200-9000")
    return tuple(pairs)


NO_CLOCK = Clock()
ALWAYS = Availability()
