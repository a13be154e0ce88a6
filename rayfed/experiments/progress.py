"""The progress line: rounds, time left, clients per second, and the best score so far."""

import sys
from collections.abc import Callable, Sequence

from rayfed.core.status_line import StatusLine
from rayfed.results.recorder import Progress


def one_trial(progress: Progress) -> str:
    """Return "round 12/50 · 3.1 s per round · 118 s left · 6.4 clients/s · val 91.2% (best 91.4%)"."""
    done = progress.round - progress.first_round
    parts = [f"round {progress.round}/{progress.rounds}"]
    if done > 0:
        pace = progress.seconds / done
        left = max(0, progress.rounds - progress.round) * pace
        parts += [
            f"{pace:.3g} s per round",
            f"{span(left)} left",
            f"{progress.clients / progress.seconds:.3g} clients/s",
        ]
    if progress.val is not None and progress.best_val is not None:
        parts.append(f"val {progress.val:.1%} (best {progress.best_val:.1%})")
    elif progress.test is not None:
        parts.append(f"test {progress.test:.1%}")
    if progress.lost:
        parts.append(f"restarted {_times(progress.lost)}")
    return " · ".join(parts)


def many_trials(trials: Sequence[Progress], total: int, seconds: float) -> str:
    """Return "trials 5/18 (2 running, 1 failed) · rounds 130/450 · 84 s left · 52 clients/s · best val 91.4% adcol-…".

    Args:
        trials: The progress of the trials that have started.
        total: The number of trials in the sweep.
        seconds: Time since the sweep began.
    """
    ended = [p for p in trials if p.status != "running"]
    failed = sum(p.status in ("failed", "diverged") for p in ended)
    running = len(trials) - len(ended)
    lost = sum(p.lost for p in trials)
    counts = f"{running} running" + (f", {failed} failed" if failed else "")
    counts += f", restarted {_times(lost)}" if lost else ""
    parts = [f"trials {len(ended)}/{total} ({counts})"]
    work = sum(max(0, p.round - p.first_round) for p in trials)
    rounds = max((p.rounds for p in trials), default=0) * total
    finished = sum(p.rounds if p.status != "running" else p.round for p in trials)
    if work and seconds:
        left = max(0, rounds - finished) * seconds / work
        pace = sum(p.clients for p in trials) / seconds
        parts += [f"rounds {finished}/{rounds}", f"{span(left)} left", f"{pace:.3g} clients/s"]
    best = max((p for p in trials if p.best_val is not None), key=lambda p: p.best_val or 0.0, default=None)
    if best is not None:
        parts.append(f"best val {best.best_val:.1%} {best.trial}")
    return " · ".join(parts)


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
    return "once" if count == 1 else f"{count} times"


def watch_trials(
    progress: Callable[[], list[Progress]],
    wait: Callable[[float], bool],
    line: Callable[[list[Progress]], str],
    *,
    seconds: float = 0.5,
) -> None:
    """Show `line(progress())` every `seconds` until `wait(seconds)` returns True: all trials have ended."""
    with StatusLine() as status:
        while not wait(seconds):
            trials = progress()
            if trials:
                status.show(line(trials))
