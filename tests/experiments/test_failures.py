"""When a sweep is doomed, and what is said of trials that fail."""

import pytest
import torch

from rayfed.algorithms.fedprox import pulled
from rayfed.core.errors import Diverged, UsageError, error_line
from rayfed.experiments.sweep import Failures
from rayfed.experiments.trial import failure
from rayfed.records.recorder import Progress

ERROR = "ValueError: expected 3, got 4 (mine.py, line 7, in measure)"


def looked(ended, arms, *, stop_early=True):
    """Return (doom, lines) after trials of `arms` have ended, given as (arm, status, error)."""
    lines: list[str] = []
    failures = Failures("results", "run", arms, stop_early=stop_early, say=lines.append)
    trials = []
    for number, (arm, status, error) in enumerate(ended):
        failures.begin({"trial": f"t{number}", "config": None, "identity": {}, "arm": arm})
        trials.append(Progress(f"t{number}", 10, status=status, error=error, has_traceback=error == ERROR))
        failures.update(trials)
    return failures.doom, lines


def failing(*arms, error=ERROR):
    return [(arm, "failed", error) for arm in arms]


class TestDoomed:
    @pytest.mark.parametrize(
        ("ended", "arms"),
        [
            (failing(0, 1, 2), [0, 1, 2]),
            (failing(0, 0, 1, 0), [0, 1]),  # the second arm is slower
            (failing(0, 0, 0), [0]),  # one arm with a grid
            (failing(0, 0) + failing(0, error=ERROR.replace("got 4", "got 5")), [0]),
            ([(0, "failed", f"UsageError: host {n}: no such file") for n in range(3)], [0]),
            ([*failing(0), (0, "running", None), *failing(0, 0)], [0]),
        ],
    )
    def test_it_is(self, ended, arms):
        doom, lines = looked(ended, arms)
        assert doom.startswith("stopped, since the first ")
        assert "resume=true" in doom
        assert len(lines) == 1

    @pytest.mark.parametrize(
        ("ended", "arms"),
        [
            (failing(0, 1), [0, 1]),  # too few
            (failing(0, 0, 0, 0), [0, 1]),  # nothing is known of the other arm
            ([*failing(0, 1, 2), (3, "done", None)][::-1], [0, 1, 2, 3]),
            ([(0, "diverged", "round 1"), *failing(0, 0, 0)], [0]),
            (failing(0, 0) + failing(0, error=ERROR.replace("line 7", "line 8")), [0]),
            (failing(0, 0) + failing(0, error=ERROR.replace("Value", "Type")), [0]),
            ([(0, "diverged", "round 1")] * 3, [0]),
        ],
    )
    def test_it_is_not(self, ended, arms):
        assert looked(ended, arms)[0] == ""

    def test_it_may_go_on(self):
        assert looked(failing(0, 0, 0, 0), [0], stop_early=False)[0] == ""


def test_equal_errors_are_said_once_with_the_place_of_the_traceback():
    _, lines = looked(failing(0, 1, 0) + failing(0, error="OSError: full"), [0, 1])
    assert lines == [
        f"t0 failed: {ERROR}; the full traceback is in results/run/tracebacks/t0.txt",
        "t3 failed: OSError: full",
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


def test_an_error_without_such_a_place_names_the_method_and_not_the_helper_that_it_called():
    weight = {"weight": torch.zeros(1)}
    with pytest.raises(KeyError) as raised:
        pulled(weight, {}, weight, mu=1.0)
    without_this_file = raised.value.with_traceback(raised.tb.tb_next)
    assert "rayfed/algorithms/fedprox.py" in error_line(without_this_file)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (Diverged("round 2, client 1: loss is nan\nmore"), "diverged", "round 2, client 1: loss is nan"),
        (UsageError("data.file=x: no such file"), "failed", "UsageError: data.file=x: no such file"),
    ],
)
def test_errors_of_rayfeds_own_say_themselves_where(error, status, text):
    assert (failure(error)["status"], failure(error)["error"]) == (status, text)
