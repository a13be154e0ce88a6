"""The program `rayfed`: its commands, what it refuses, and what it imports."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rayfed.cli.main import COMMANDS, main
from rayfed.launch import Swept

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments, cwd=None):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def refused(here, capsys):
    """Runs the program in an empty folder and returns the one line with which it refuses."""

    def run(*arguments):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        return line.removeprefix("rayfed: ")

    return run


class TestHelp:
    def test_lists_every_command_in_one_line(self, capsys):
        assert main(["--help"]) == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        for name, summary in COMMANDS.items():
            assert any(line.startswith(name) and line.endswith(summary) for line in lines), name

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_its_own(self, capsys, name):
        assert main([name, "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: rayfed {name} ")
        assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rnu"], "rnu: no such command; did you mean run?"),
        (["--hepl"], "--hepl: no such option of rayfed; did you mean --help?"),
        (["run", "--rounds=3"], "--rounds=3: a key is written without dashes: rounds=3"),
        (["run", "local.lrr=3"], "local.lrr: no such key; did you mean local.lr?"),
        (["partition", "--sav", "p", "--plt", "x"], "--plt: no such option of rayfed partition; did you mean --plot?"),
        (["report"], "the following arguments are required: RESULTS; see rayfed report --help"),
        (["report", "a", "b"], "b: unexpected argument; see rayfed report --help"),
        (["list", "algoritms"], "algoritms: no such kind or name; did you mean algorithms?"),
        (["docs", "algoritms"], "algoritms: no such page; did you mean algorithms?"),
        (["sweep", "demo", "adcol"], "expected one search space, such as demo or my_space.yaml, got 2"),
        (["sweep", "adcool"], "adcool: no such file or packaged space; did you mean adcol?"),
    ],
)
def test_what_is_wrong_is_refused_with_the_nearest_right_one(refused, arguments, line):
    assert refused(*arguments) == line


class TestModules:
    def test_help_and_refusals_import_neither_torch_nor_ray_nor_tables(self):
        """They answer at once. Seconds depend on the machine, so what is imported is checked, by all in one process."""
        refused = ("run round=3", "run algorithm.name=fedporx", "sweep demo round=1", "sweep adcol local.lrr=1")
        codes = dict.fromkeys(("--help", "docs", "run --help"), 0) | dict.fromkeys(refused, 2)
        heavy = {"torch", "ray", "matplotlib", "pandas", "pyarrow", "sklearn", "scipy"}
        program = (
            "import sys; from rayfed.cli.main import main; "
            f"print([(main(each.split()), *({heavy} & set(sys.modules))) for each in {list(codes)}])"
        )
        assert python("-c", program).stdout.splitlines()[-1] == str([(code,) for code in codes.values()])

    @pytest.mark.parametrize(
        ("module", "without"),
        [
            ("rayfed", {"torch", "numpy", "yaml", "pandas"}),
            ("rayfed.records.recorder", {"torch", "sklearn", "pandas", "matplotlib"}),
            ("rayfed.distributed.recorder_actor", {"torch", "sklearn", "pandas", "matplotlib"}),
            ("rayfed.cli.report", {"torch", "ray", "altair", "sklearn", "matplotlib"}),
            ("rayfed.distributed.tune_server", {"torch", "sklearn", "matplotlib"}),
            ("rayfed.distributed.host_pool", {"torch", "ray.tune", "pandas"}),
            ("rayfed.distributed.host_actor", {"pandas", "pyarrow", "sklearn", "matplotlib"}),
            ("rayfed.api", {"ray", "sklearn", "matplotlib", "sympy"}),
            ("rayfed.distributed.tune", {"optuna"}),
        ],
    )
    def test_a_process_imports_only_what_it_needs(self, module, without):
        program = f"import sys, {module}; print(sorted({without} & set(sys.modules)))"
        assert python("-c", program).stdout == "[]\n"

    def test_a_run_does_not_import_torchs_compiler(self, tmp_path):
        program = (
            "import sys, rayfed\n"
            "rayfed.run({'data.per_domain': 20, 'model.name': 'mlp', 'local.batch_size': 4}, rounds=1)\n"
            "print(sorted({'torch._dynamo', 'sympy', 'ray'} & set(sys.modules)))"
        )
        done = python("-c", program, cwd=tmp_path)
        assert done.stdout == "[]\n", done.stderr

    @pytest.mark.parametrize(("module", "given"), [("rayfed", "rnu"), ("rayfed.sweep", "adcool")])
    def test_doors_are_the_program(self, tmp_path, module, given):
        words = {
            "rnu": "no such command; did you mean run?",
            "adcool": "no such file or packaged space; did you mean adcol?",
        }
        done = python("-m", module, given, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == f"rayfed: {given}: {words[given]}\n"


class TestDocs:
    def test_lists_the_pages(self, capsys):
        assert main(["docs"]) == 0
        first, *pages = capsys.readouterr().out.splitlines()
        assert str(ROOT / "docs") in first
        assert {page.split()[0] for page in pages} == {path.stem for path in (ROOT / "docs").glob("*.md")}


class TestSpaces:
    def test_are_listed_with_their_comments(self, capsys):
        assert main(["list", "spaces"]) == 0
        out = capsys.readouterr().out
        for path in (ROOT / "tune_spaces").glob("*.yaml"):
            assert f"\n  {path.stem}\n      {path.read_text().splitlines()[0].removeprefix('# ')}\n" in f"\n{out}"

    def test_one_thing_is_explained(self, capsys):
        assert main(["list", "fedprox"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("algorithm.name=fedprox\n\n  FedProx: Li et al. 2020, ")
        assert "client:  min over w of  f_i(w)" in out
        assert "\n  algorithm.mu = 0.01 " in out
        assert "\nrayfed sweep fedprox\n" in out
        assert "scaffold" not in out

    @pytest.mark.parametrize("name", ["demo", "demo.yaml"])
    def test_are_found_by_name_from_any_folder(self, tmp_path, monkeypatch, capsys, name):
        monkeypatch.chdir(tmp_path)
        spaces = []
        monkeypatch.setattr("rayfed.api.run_sweep", lambda space, configs: spaces.append(space) or Swept(1, None))
        monkeypatch.setattr("rayfed.cli.sweep._results", lambda config: "")
        assert main(["sweep", name]) == 1
        assert len(spaces[0].arms) == len(yaml.safe_load((ROOT / "tune_spaces" / "demo.yaml").read_text())["arms"])
        assert capsys.readouterr().err == f"space: {ROOT / 'tune_spaces' / 'demo.yaml'}\n"
