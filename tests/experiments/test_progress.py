"""Progress: the time left from the rounds so far, bars within the width of the terminal, and plain lines elsewhere."""

import io
import sys
import threading
import types

import pytest
from rich.console import Console

from rayfed.core import terminal
from rayfed.core.terminal import Bar, StatusLine
from rayfed.experiments.progress import many_trials, one_trial, watched
from rayfed.records.progress import Progress


def trial(name, seed=0, **values):
    return Progress(f"{name}-seed{seed}-x", **{"rounds": 10, "round": 5, "seconds": 20.0, "clients": 50, **values})


class TestSweep:
    def test_the_setup_of_the_first_trials_is_no_part_of_all_others_rounds(self):
        """After 30 s of setup, each of two has done a round of 1 s: 38 s of rounds are left, two at a time."""
        trials = [trial("a", seed, round=1, seconds=1.0, left=9.0) for seed in (0, 1)]
        assert "19 s left" in many_trials(trials, 4, 31.0)[1].words

    def test_trials_that_have_not_begun_have_their_own_rounds(self):
        """A trial of 10 rounds has done 5 in 20 s, and one of 30 rounds waits: 35 of 40 rounds are left, 4 s each."""
        bars = many_trials([trial("a")], 2, 20.0, planned=40)
        assert bars[1].count == "rounds 5/40"
        assert "2 min 20 s left" in bars[1].words

    def test_what_is_shown(self):
        trials = [trial("a", status="failed"), trial("b", left=20.0, best_val=0.5), trial("c", left=20.0, best_val=0.7)]
        bars = many_trials(trials, 4, 20.0)
        assert [bar.count for bar in bars] == ["trials 1/4", "rounds 20/40"]
        assert bars[0].words == "2 running, 1 failed"
        assert bars[1].words == "40 s left · 7.5 clients/s · best val 70.0% c-seed0-x"


def test_a_run_shows_its_pace_and_its_best():
    (bar,) = one_trial(trial("a", left=20.0, val=0.5, best_val=0.625, lost=2))
    words = "4 s per round · 20 s left · 2.5 clients/s · val 50.0% (best 62.5%) · restarted 2 times"
    assert bar.text == f"round 5/10 · {words}"
    assert one_trial(trial("a", round=0))[0].text == "round 0/10"


class TestShown:
    bars = (Bar("trials", 1, 4, "2 running"), Bar("rounds", 20, 40, "x" * 300))

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_stays_within_the_width_of_the_terminal(self, width):
        out = io.StringIO()
        Console(file=out, width=width, force_terminal=True, color_system=None).print(
            terminal._rendered(self.bars, width)
        )
        lines = out.getvalue().splitlines()
        assert len(lines) == 2
        assert max(map(len, lines)) <= width
        assert "trials 1/4" in lines[0]
        assert "━" in lines[0]
        assert lines[1].rstrip().endswith("…")

    def test_is_plain_lines_in_a_log_file(self, capsys, monkeypatch):
        monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
        with StatusLine() as status:
            status.show(self.bars[:1])
            status.show(self.bars[:1])
            status.show("decoding")
        assert capsys.readouterr().err == "trials 1/4 · 2 running\ndecoding\n"

    def test_is_replaced_in_place_in_a_notebook(self, capsys, monkeypatch):
        shown = []
        handle = types.SimpleNamespace(update=shown.append)
        display = types.ModuleType("IPython.display")
        display.HTML, display.display = str, lambda content, display_id: shown.append(content) or handle
        shell = types.SimpleNamespace(config={"IPKernelApp": {}})
        ipython = types.ModuleType("IPython")
        ipython.get_ipython, ipython.display = lambda: shell, display
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        assert terminal.is_watched()
        with StatusLine() as status:
            status.show([Bar("round", 1, 4, "<b>")])
        assert shown == ["", "round 1/4 · &lt;b&gt;", ""]
        assert capsys.readouterr().err == ""
        shell.config.clear()
        assert not terminal.is_watched()


def test_what_ends_the_recorder_is_no_traceback_of_the_progress(monkeypatch):
    def progress():
        asked.set()
        raise ConnectionError("Ray has ended")

    asked, raised = threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with watched(progress, lambda trials: [], quiet=False):
        assert asked.wait(10)
    assert raised == []
