"""CUDA's streams and captures in form alone, on the CPU: they count what runs on them and what waits for what."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import torch


class Stream:
    """A stream: the number of kernels launched on it, and how many of each other stream's it has waited for."""

    device = torch.device("cpu")

    def __init__(self, *_: Any) -> None:
        self.launched = 0
        self.waited: dict[Stream, int] = {}

    def wait_stream(self, other: "Stream") -> None:
        self.waited[other] = other.launched


class Streams:
    """A stand-in for `torch.cuda`, with what captures use of it.

    Attributes:
        outer: The stream that is current at first.
        current: The stream that takes kernels.
        mode: What is done about waits for the device.
    """

    CUDAGraph = MagicMock
    Stream = Stream

    def __init__(self) -> None:
        self.outer = self.current = Stream()
        self.mode = 0

    def launch(self) -> None:
        """Launch a kernel."""
        self.current.launched += 1

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 0

    def current_stream(self, device: Any) -> Stream:
        return self.current

    def get_sync_debug_mode(self) -> Any:
        return self.mode

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.mode = mode

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any, stream: Stream) -> Iterator[None]:
        yield
