"""The user's own code: what it is, when its hashes change, and which sources other machines need."""

import importlib
import os
import subprocess
import sys
import textwrap

import pytest
from torch import nn

import rayfed
from rayfed.core.errors import is_user_file, is_user_module
from rayfed.distributed.user_modules import to_send
from rayfed.experiments import user_code
from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_arguments

PIECES = """
from dataclasses import dataclass

import uc_helper
from rayfed.algorithms.fedavg import FedAvg
from rayfed.augment.base import Augment
from rayfed.metrics.base import OfPredictions, Value

@dataclass(frozen=True, kw_only=True)
class Plain(FedAvg):
    pass

@dataclass(frozen=True, kw_only=True)
class Most(OfPredictions):
    def measure(self, logits, y):
        yield Value("most", float(logits.max()), len(y))

@dataclass(frozen=True, kw_only=True)
class Twice(Augment):
    def __call__(self, x, y):
        import uc_lazy
        return uc_helper.scaled(x), y

def net(shape, num_classes):
    return None
"""

SCRIPT = """
import uc_helper
from rayfed.experiments import user_code

SCALE = 3
rounds = 1

class Net:
    def __init__(self, width):
        super().__init__()
        self.width = width

def difference(x, y):
    return SCALE * (x - y)

def loss(x, y, net=Net(4)):
    return uc_helper.scaled(sum([difference(a, b) for a, b in zip(x, y)]))

print(user_code.own_code([], None, loss, None).digest)
"""

FILES = {
    "uc_pieces.py": PIECES,
    "uc_helper.py": "import numpy\nfrom uc_package.factors import TWO\n\ndef scaled(x):\n    return TWO * x\n",
    "uc_lazy.py": "ONE = 1\n",
    "uc_package/__init__.py": "",
    "uc_package/factors.py": "from . import deeper\nTWO = 2\n",
    "uc_package/deeper.py": "import uc_folder.inner\nTHREE = 3\n",
    "uc_folder/inner.py": "",
    "uc_unused.py": "FOUR = 4\n",
}
MODULES = ["uc_folder", "uc_folder.inner", "uc_helper", "uc_lazy"]
MODULES += ["uc_package", "uc_package.deeper", "uc_package.factors", "uc_pieces"]
USES = {
    "algorithm": ("algorithm.name=uc_pieces:Plain",),
    "wrapped base": ("algorithm.name=dbe", "algorithm.base=uc_pieces:Plain"),
    "metric": ("metrics.uc_pieces:Most=true",),
    "augmentation": ("augment.name=uc_pieces:Twice",),
    "model": ("model={name: 'uc_pieces:net'}",),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the user's modules, which are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    forget()
    yield tmp_path
    forget()


def forget():
    """What a new process would be."""
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.startswith("uc_")]:
        del sys.modules[name]


def digest(*pairs):
    return user_code.own_code(user_code.own_names(Config.read(from_arguments(pairs))), None, None, None).digest


def changed(here, file, old, new, *pairs):
    """The hash in a new process after an edit."""
    text = (here / file).read_text()
    assert old in text
    (here / file).write_text(text.replace(old, new))
    forget()
    return digest(*pairs)


class TestCodeHash:
    @pytest.mark.parametrize("pairs", USES.values(), ids=USES)
    def test_changes_with_the_module_of_each_thing_that_is_named(self, here, pairs):
        before = digest(*pairs)
        assert changed(here, "uc_pieces.py", "logits.max()", "logits.min()", *pairs) != before
        assert changed(here, "uc_pieces.py", "logits.min()", "logits.max()", *pairs) == before
        assert changed(here, "uc_unused.py", "4", "5", *pairs) == before

    @pytest.mark.parametrize(
        ("file", "old", "new"),
        [
            ("uc_pieces.py", "import uc_helper", "import uc_helper  # a comment"),
            ("uc_helper.py", "TWO * x", "TWO + x"),
            ("uc_package/factors.py", "TWO = 2", "TWO = 3"),
            ("uc_package/deeper.py", "THREE = 3", "THREE = 2"),
            ("uc_lazy.py", "ONE = 1", "ONE = 2"),
        ],
    )
    def test_changes_with_those_that_it_imports_and_with_comments(self, here, file, old, new):
        before = digest(*USES["algorithm"])
        assert changed(here, file, old, new, *USES["algorithm"]) != before

    def test_of_a_script_takes_in_what_an_object_uses(self, here):
        """Not the line that calls `rayfed.run`, which may have other rounds."""

        def printed(text, helper=FILES["uc_helper.py"]):
            (here / "uc_helper.py").write_text(helper)
            (here / "script.py").write_text(text)
            environment = {**os.environ, "PYTHONPATH": os.path.dirname(rayfed.__path__[0])}
            command = [sys.executable, "script.py"]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

        before = printed(SCRIPT)
        assert printed(SCRIPT.replace("rounds = 1", "rounds = 2  # more")) == before
        assert printed(SCRIPT, FILES["uc_helper.py"].replace("TWO * x", "TWO + x")) != before
        for old, new in (
            ("- y", "+ y"),
            ("SCALE = 3", "SCALE = 4"),
            ("Net(4)", "Net(5)"),
            ("super().__init__()", "pass"),
        ):
            assert old in SCRIPT
            assert printed(SCRIPT.replace(old, new)) != before

    def test_counts_a_file_edited_after_its_import_as_it_was(self, here):
        before = digest(*USES["metric"])
        (here / "uc_pieces.py").write_text(PIECES.replace("logits.max()", "logits.min()"))
        assert digest(*USES["metric"]) == before
        importlib.reload(sys.modules["uc_pieces"])
        assert digest(*USES["metric"]) != before

    def test_there_is_none_without_code_of_the_users(self):
        assert digest("algorithm.name=dbe", "metrics.ece=true") is None
        assert user_code.own_code([], None, nn.CrossEntropyLoss(), None) == (None, (), ())

    def test_what_is_given_in_python_counts(self, here):
        import uc_pieces

        makes = rayfed.Clients({"train": [1], "test": [1]}, uc_pieces.net)
        for given in ((uc_pieces.net, None, None), (None, uc_pieces.Most.measure, None), (None, None, makes)):
            code, sources, _ = user_code.own_code([], *given)
            assert code is not None
            assert [source.name for source in sources] == MODULES
        assert user_code.own_code([], None, None, [{"train": 1}]).digest is None  # whose contents are the data


class TestObjectHash:
    def test_two_lambdas_in_one_line_differ(self):
        both = [lambda x, y: x + y, lambda x, y: x * y]  # fmt: skip
        again = lambda x, y: x + y  # noqa: E731
        assert len({user_code.object_hash(loss) for loss in both}) == 2
        assert user_code.object_hash(again) == user_code.object_hash(both[0])

    def test_values_in_closures_defaults_and_attributes_count(self):
        def scaled(factor):
            return lambda x: factor * x

        def with_default(factor):
            def inner(x, factor=factor):
                return factor * x

            return inner

        for make in (scaled, with_default, lambda much: nn.CrossEntropyLoss(label_smoothing=much)):
            assert user_code.object_hash(make(0.2)) == user_code.object_hash(make(0.2))
            assert user_code.object_hash(make(0.2)) != user_code.object_hash(make(0.3))

    def test_weights_count_unless_a_factory_makes_them(self):
        def factory():
            return nn.Linear(2, 2)

        first, second = factory(), factory()
        assert user_code.display_name(first, first) != user_code.display_name(second, second)
        assert user_code.display_name(factory, first) == user_code.display_name(factory, second)


class TestUserModules:
    def test_are_neither_pythons_nor_installed_nor_rayfeds(self, here):
        assert all(map(is_user_module, ("__main__", __name__, "uc_package", "uc_package.factors", "uc_folder.inner")))
        others = ("json", "os", "sys", "builtins", "torch.nn", "numpy", "rayfed", "rayfed.core.trees", "", "uc_nothing")
        assert not any(map(is_user_module, others))

    def test_a_process_without_the_files_imports_them_from_their_sources(self, here, tmp_path_factory):
        """Also those that are imported inside a function, and the parents of submodules."""
        expected, sources, _ = user_code.own_code(["uc_pieces:Twice"], None, None, None)
        assert [source.name for source in sources] == MODULES
        code = f"""
            from pathlib import Path
            from rayfed.distributed.user_modules import SentFiles, install
            from rayfed.core.registry import ModuleSource
            from rayfed.experiments import user_code
            install(SentFiles(Path(), Path(), {to_send(sources).modules!r}))
            import uc_pieces
            print(user_code.own_code(["uc_pieces:Twice"], None, None, None).digest)
            assert uc_pieces.Twice()(21, 0) == (42, 0)
            assert user_code.is_user_module("uc_package.factors")
        """
        for file in FILES:
            (here / file).unlink()
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            cwd=tmp_path_factory.mktemp("elsewhere"),
            env={**os.environ, "PYTHONPATH": os.path.dirname(rayfed.__path__[0])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == expected


def test_packages_that_pip_put_into_a_folder_are_not_the_users(tmp_path):
    (tmp_path / "libs" / "tool-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "libs" / "tool-1.0.dist-info" / "INSTALLER").write_text("pip")
    (tmp_path / "project" / "build-1.0.dist-info").mkdir(parents=True)
    assert not is_user_file(str(tmp_path / "libs" / "tool" / "deep.py"))
    assert is_user_file(str(tmp_path / "project" / "own.py"))
    assert is_user_file(str(tmp_path / "own.py"))
