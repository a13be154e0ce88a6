"""Every command prints where standard output is not UTF-8, with substitutes for what cannot be shown."""

import io
import os
import subprocess
import sys

import pytest

from rayfed.cli.main import COMMANDS, main
from rayfed.core.substitutes import substitute

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


ALIKE = {
    "─": "-",
    "│": "|",
    "±": "+-",
    "…": "...",
    "†": "*",
    "×": "x",
    "→": "->",
    "≠": "!=",
    "‖": "||",
    "α": "alpha",
    "Δ": "Delta",
    "λ": "lambda",
    "é": "e",
    "₂": "2",
    "²": "^2",
    "\u2800": " ",
    "☃": "?",
    "\udcc3": "?",  # a byte of an argument that is no UTF-8
}


@pytest.mark.parametrize("sign", ALIKE)
def test_signs_have_substitutes(sign):
    assert substitute(sign) == ALIKE[sign]


@pytest.fixture
def printed(monkeypatch):
    """Run a command in this process with streams of an encoding, and return its exit code and what it printed."""

    def run(encoding, *arguments):
        raw = {name: io.BytesIO() for name in ("stdout", "stderr")}
        for name, out in raw.items():
            monkeypatch.setattr(sys, name, io.TextIOWrapper(out, encoding))
        code = main(arguments)
        for name in raw:
            getattr(sys, name).flush()
        return code, *(out.getvalue().decode(encoding) for out in raw.values())

    return run


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
class TestCommands:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_help(self, printed, encoding, command):
        code, out, err = printed(encoding, command, "--help")
        assert (code, err) == (0, "")
        assert out.startswith("usage: rayfed")

    @pytest.mark.parametrize(
        "arguments",
        [
            ("list",),
            ("list", "fedprox"),
            ("list", "algorithm"),
            ("docs",),
            ("docs", "reproducibility"),
            ("data",),
            ("partition", "data.domains=[font,plain]"),
        ],
        ids=" ".join,
    )
    def test_texts(self, printed, encoding, arguments):
        code, out, _ = printed(encoding, *arguments)
        assert code == 0
        assert len(out) > 100

    def test_errors(self, printed, encoding):
        code, _, err = printed(encoding, "run", "local.lr=größer±☃10⁻⁵")
        assert code == 2
        shown = {"ascii": "gro?er", "latin-1": "größer"}
        assert err.startswith(f"rayfed: local.lr='{shown[encoding]}")
        assert "?10^-5'" in err

    def test_a_run_and_its_report(self, printed, encoding, tmp_path):
        small = ["data.domains=[font,plain]", "data.per_domain=16", "local.epochs=1", "model.width=0.125", "rounds=1"]
        keys = [*small, f"results={tmp_path}", "experiment=prüfung-±"]
        code, out, err = printed(encoding, "run", *keys)
        assert code == 0, err
        assert "---" in out
        code, out, _ = printed(encoding, "report", str(tmp_path), "--experiment", "prüfung-±")
        assert code == 0
        assert f"{'prüfung-±' if encoding == 'latin-1' else 'prufung-+-'}: test accuracy, %" in out


@pytest.mark.parametrize("environment", [C_LOCALE, {"PYTHONIOENCODING": "ascii"}], ids=["C", "ascii"])
def test_in_a_process_of_its_own(environment):
    """The encoding of a locale is chosen when Python starts."""
    command = [sys.executable, "-m", "rayfed", "list", "fedprox"]
    done = subprocess.run(command, capture_output=True, env=os.environ | environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"mu, weight of the proximal term" in done.stdout


@pytest.mark.parametrize("keys", [["experiment=größe"], ["own.yaml"]])
def test_names_that_the_locale_cannot_encode_are_one_line(tmp_path, keys):
    (tmp_path / "own.yaml").write_text("experiment: größe\nrounds: 1\ndata: {domains: [font]}\n", encoding="utf-8")
    command = [sys.executable, "-m", "rayfed", "run", *keys]
    done = subprocess.run(command, capture_output=True, env=os.environ | C_LOCALE, cwd=tmp_path, check=False)
    assert done.returncode == 2
    *_, line = done.stderr.decode().splitlines()
    assert "e: this locale has another encoding, ascii; set PYTHONUTF8=1, or a locale of UTF-8, such as LC_ALL" in line
