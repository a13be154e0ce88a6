"""How many clients to train at once, where a measurement decides (`placement.vmap_clients=auto`)."""

from collections.abc import Callable
from functools import partial

from rayfed.engine.device import breaks_device

WIDTHS = (1, 4, 16, 64, 256)
"""The numbers of clients that are tried, as far as there are so many."""
_SECONDS = 0.5  # of the repetitions of a block
_LONGEST = 1.0  # seconds of a block, after which no larger one is tried
_TIE, _SLOWER = 1.05, 1.5  # times the shortest time per client


def fastest_width(most: int, block: Callable[[int], object], clock: Callable[[], float]) -> int:
    """Return how many clients to train at once: the least number whose time per client is within 5 % of the shortest.

    More clients are tried until a block takes more than a second or 50 % longer per client, or fails, as it does if the
    memory is out or `torch.vmap` refuses the step. A number may be a little slower than the one before: on a CPU, 4
    clients often are and 16 are not.

    Args:
        most: The largest number.
        block: Trains so many clients at once.
        clock: Returns the time in seconds.
    """
    each: dict[int, float] = {}
    for width in sorted({min(width, most) for width in WIDTHS if most > 1}):
        try:
            each[width] = _seconds(partial(block, width), clock) / width
        except Exception as error:
            if width == 1 or breaks_device(error):
                raise
            break
        if each[width] > _SLOWER * min(each.values()) or width * each[width] > _LONGEST:
            break
    return next((width for width, seconds in each.items() if seconds <= _TIE * min(each.values())), 1)


def _seconds(block: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the shortest time of a block, after a first one that loads kernels."""
    block()
    times, end = list[float](), clock() + _SECONDS
    while not times or clock() < end:
        began = clock()
        block()
        times.append(clock() - began)
    return min(times)
