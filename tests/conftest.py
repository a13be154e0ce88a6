"""One thread per process, and which tests share a process when pytest-xdist runs several (`make test`)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch are imported; subprocesses inherit it

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group tests for `--dist loadgroup`: all that start Ray first, then the others by file, then those with a group.

    Tests that start Ray use all CPUs that a session has, so they run one after the other; they take longest, so they
    begin. Tests with a group of their own are those of the contract, which caches one run per algorithm; their small
    groups even out the end.
    """
    if not config.getoption("loadgroup", False):
        return
    order = {}
    for item in items:
        if item.get_closest_marker("ray"):
            order[item], group = 0, "ray"
        elif item.get_closest_marker("xdist_group"):
            order[item], group = 2, None
        else:
            order[item], group = 1, item.path.stem
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: order[item])
