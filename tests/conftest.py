"""One thread per process, which tests share a process when pytest-xdist runs several (`make test`), and Ray's end."""

import ast
import functools
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch are imported; subprocesses inherit it
os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise Ray's processes wait for tests in the other processes

import pytest
import torch

import rayfed  # noqa: F401  # after which tests may import torchvision, also beside a torch for CPUs

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send each group of `group_of` to one process; xdist's own groups (3.8) have no effect with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that start Ray, which take longest, and end with the small groups of the contract."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (group_of(item.nodeid) != "ray", "test_contract.py" in item.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU; stop Ray after the last of the tests that share it (`helpers.ray_session`)."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    ray = sys.modules.get("ray")
    if ray is not None and group_of(item.nodeid) != "ray" and ray.is_initialized():
        ray.shutdown()


@pytest.fixture(autouse=True)
def no_early_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands inside of the tests' process start Ray when they need it: a refusal would leave it running."""
    monkeypatch.setattr("rayfed.cli.run.start_ray_meanwhile", lambda sources: None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def group_of(nodeid: str) -> str:
    """Return which tests run in one process, in order: those that start Ray, a case of the contract, or a file.

    A Ray session uses all CPUs that it is given, so there is one at a time. The contract caches one run per case.
    """
    file, *names = nodeid.split("[")[0].split("::")
    marked = ray_tests(file)
    if "" in marked or marked & set(names):
        return "ray"
    if file.endswith("test_contract.py") and "[" in nodeid:
        return "contract: " + nodeid.rstrip("]").split("[")[-1].split("-")[-1]
    return file


@functools.cache
def ray_tests(file: str) -> frozenset[str]:
    """Return the functions and classes of a test file that are marked with `ray`; "" stands for all of them."""
    text = (ROOT / file).read_text()
    tree = ast.parse(text) if "mark.ray" in text else ast.Module([], [])
    marked = {"" for node in tree.body if isinstance(node, ast.Assign) and "mark.ray" in ast.unparse(node)}
    for node in ast.walk(tree):
        decorators = getattr(node, "decorator_list", [])
        if any(ast.unparse(decorator) == "pytest.mark.ray" for decorator in decorators):
            marked.add(node.name)
    return frozenset(marked)
