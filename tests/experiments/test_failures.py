"""What is said of trials that fail."""

import pytest

from rayfed.experiments.sweep import error_lines
from rayfed.experiments.trial import failure
from rayfed.records.recorder import Progress

ERROR = "ValueError: expected 3, got 4 (mine.py, line 7, in measure)"


def test_equal_errors_are_said_once_with_the_place_of_the_traceback():
    lines: list[str] = []
    update = error_lines("results", "run", lines.append)
    errors = [ERROR, ERROR.replace("got 4", "got 5"), "OSError: host 1 is full", "OSError: host 2 is full"]
    trials = [Progress(f"t{n}", 9, status="failed", error=e, has_traceback=n < 2) for n, e in enumerate(errors)]
    update(trials[:1])
    update([*trials, Progress("t4", 9), Progress("t5", 9, status="diverged", error="round 1")])
    assert lines == [
        f"t0 failed: {ERROR}; the full traceback is in results/run/tracebacks/t0.txt",
        "t2 failed: OSError: host 1 is full",
    ]


def test_an_error_has_the_innermost_place_of_the_users_code():
    def users():
        sorted([1, 2], key=lambda number: number / 0)

    with pytest.raises(ZeroDivisionError) as raised:
        users()
    row = failure(raised.value)
    assert (row["status"], "in users" in row["traceback"]) == ("failed", True)
    assert row["error"].startswith("ZeroDivisionError: division by zero (")
    assert row["error"].endswith(f"test_failures.py, line {users.__code__.co_firstlineno + 1}, in <lambda>)")
