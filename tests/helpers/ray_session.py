"""The Ray session that the tests of a process share."""

import logging

import ray

from rayfed.distributed.cluster import start_here


def start_ray() -> None:
    """Start Ray with four CPUs and without a dashboard, unless it runs in this process already.

    It also has four GPUs, which it only counts: torch does not find them. Starting takes seconds, so tests do not stop
    it; `conftest.py` does before the first test that is not marked `ray`.
    """
    if ray.is_initialized() and "GPU" not in ray.cluster_resources():  # a run of a test before has started its own
        ray.shutdown()
    if not ray.is_initialized():
        start_here(num_cpus=4, num_gpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
