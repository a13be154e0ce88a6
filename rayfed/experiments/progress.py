"""The progress of trials: rounds, time left, clients per second, and the best score so far."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rayfed.core.round_record import is_fraction
from rayfed.core.terminal import Bar, StatusLine
from rayfed.records.progress import Progress


def one_trial(progress: Progress) -> list[Bar]:
    """Return "round 12/50" with "3.1 s per round · 118 s left · 6.4 clients/s · val 91.2% (best 91.4%)"."""
    done = progress.round - progress.first_round
    parts = []
    if done > 0 and progress.seconds > 0:
        parts.append(f"{progress.seconds / done:.3g} s per round")
        if progress.left is not None and not progress.doing:
            parts.append(f"{span(progress.left)} left")
        parts.append(f"{progress.clients / progress.seconds:.3g} clients/s")
    if progress.clock is not None:
        parts.append(f"clock {span(progress.clock)}")
    if progress.doing:
        parts.append(progress.doing)
    if progress.val is not None and progress.best_val is not None:
        parts.append(f"{_score('val', progress, progress.val)} (best {_number(progress, progress.best_val)})")
    elif progress.test is not None:
        parts.append(_score("test", progress, progress.test))
    if progress.stop_reason is not None:
        parts.append("stopped early")
    if progress.lost:
        parts.append(f"restarted {_times(progress.lost)}")
    return [Bar("round", min(progress.round, progress.rounds), progress.rounds, " · ".join(parts))]


def restart_line(progress: Progress, cause: object) -> str:
    """Return what to say of a trial that has lost a process and starts again."""
    done = progress.rounds_done
    return f"{progress.trial} was lost after round {done} ({cause}); it starts again from its last checkpoint"


def many_trials(trials: Sequence[Progress], total: int, seconds: float, *, planned: int | None = None) -> list[Bar]:
    """Return "trials 5/18" with "2 running, 1 failed", and "rounds 130/450" with the time left and the best trial.

    Args:
        trials: The progress of the trials that have started.
        total: The number of trials of the sweep.
        seconds: Time since the first trial began.
        planned: The rounds of all trials; None where a search chooses the trials. One that has not begun then counts
            as the longest that has.
    """
    running = [progress for progress in trials if progress.status == "running"]
    ended = len(trials) - len(running)
    bars = [Bar("trials", ended, total, _counts(trials, len(running)))]
    rounds = planned
    if rounds is None:
        rounds = _rounds_like_the_longest(trials, total)
    if rounds:
        finished = sum(_finished_rounds(progress) for progress in trials)
        parts = _parts_of_sweep(trials, running, total, seconds, rounds - finished)
        bars.append(Bar("rounds", finished, rounds, " · ".join(parts)))
    return bars


def _counts(trials: Sequence[Progress], running: int) -> str:
    """Return "2 running, 1 failed, restarted once"."""
    counts = f"{running} running"
    failed = sum(progress.status in ("failed", "diverged") for progress in trials)
    if failed:
        counts += f", {failed} failed"
    lost = sum(progress.lost for progress in trials)
    if lost:
        counts += f", restarted {_times(lost)}"
    return counts


def _rounds_like_the_longest(trials: Sequence[Progress], total: int) -> int:
    """Return the rounds of `total` trials, where one that has not begun counts as the longest that has."""
    known = [progress.rounds for progress in trials]
    return sum(known) + max(known, default=0) * (total - len(trials))


def _finished_rounds(progress: Progress) -> int:
    """Return the rounds that are done; all rounds of a trial that has ended."""
    if progress.status != "running":
        return progress.rounds
    return min(progress.round, progress.rounds)


def _parts_of_sweep(
    trials: Sequence[Progress], running: Sequence[Progress], total: int, seconds: float, left: int
) -> list[str]:
    """Return what to say beside the bar of rounds when `left` rounds are left."""
    parts = []
    work = sum(max(0, progress.round - progress.first_round) for progress in trials)
    is_training = len(trials) < total or not all(progress.doing for progress in running)
    if work and seconds and is_training:
        of_a_round = sum(progress.seconds for progress in trials) / work  # without the start of the first trials
        clients = sum(progress.clients for progress in trials)
        parts.append(f"{span(of_a_round * left / max(1, len(running)))} left")
        parts.append(f"{clients / seconds:.3g} clients/s")
    parts += sorted({progress.doing for progress in trials if progress.doing})
    best = _best(trials)
    if best is not None:
        parts.append(f"best {_score('val', best, best.best_val)} {best.trial}")
    return parts


def _best(trials: Sequence[Progress]) -> Progress | None:
    """Return the first trial with the best validation score; None without scores."""
    scored = [progress for progress in trials if progress.best_val is not None]
    return max(scored, key=_gain, default=None)


def _gain(progress: Progress) -> float:
    assert progress.best_val is not None, "a trial with scores"
    return progress.selection.gain(progress.best_val)


def bars_of_sweep(total: int, planned: int | None) -> Callable[[list[Progress]], list[Bar]]:
    """Return a function that returns `many_trials`. Its clock starts with the first trial, after Ray has started."""
    began: list[float] = []

    def bars(trials: list[Progress]) -> list[Bar]:
        if not trials:
            return many_trials(trials, total, 0.0, planned=planned)
        if not began:
            began.append(time.monotonic())
        return many_trials(trials, total, time.monotonic() - began[0], planned=planned)

    return bars


def _score(split: str, progress: Progress, value: float | None) -> str:
    """Return a score as text: "val 91.2%", or "val loss 0.31"."""
    metric = progress.selection.metric
    number = _number(progress, value)
    if metric == "accuracy":
        return f"{split} {number}"
    return f"{split} {metric} {number}"


def _number(progress: Progress, value: float | None) -> str:
    if value is None:
        return "-"
    if is_fraction(progress.selection.metric):
        return f"{value:.1%}"
    return f"{value:.4g}"


def note(line: str) -> None:
    """Print what happened to a process, above the progress line."""
    print(f"note: {line}", file=sys.stderr, flush=True)


def span(seconds: float) -> str:
    """Return a duration in readable units: "42 s", "3 min 10 s", "2 h 5 min"."""
    rounded = round(seconds)
    if rounded < 100:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def _times(count: int) -> str:
    if count == 1:
        return "once"
    return f"{count} times"


Bars = Callable[[list[Progress]], Sequence[Bar]]
"""Returns what to show of the progress of trials."""


@contextmanager
def watched(progress: Callable[[], list[Progress]], bars: Bars, *, quiet: bool) -> Iterator[None]:
    """Within, show `bars(progress())` twice a second from another thread, unless `quiet`, while `progress` answers."""
    ended = threading.Event()

    def show() -> None:
        with suppress(Exception), StatusLine() as status:  # an error of the recorder ends the command, which reports it
            while not ended.wait(0.5):
                trials = progress()
                if trials:
                    status.show(bars(trials))

    watcher = threading.Thread(target=show, daemon=True)
    if not quiet:
        watcher.start()
    try:
        yield
    finally:
        ended.set()
        if not quiet:
            watcher.join()
