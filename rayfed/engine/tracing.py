"""Traces of what this process computes, by torch's profiler, in the format of Chrome and Perfetto."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

_active = False


def span(name: str) -> "contextlib.AbstractContextManager[Any]":
    """Return a context that appears in the trace under `name`; it costs nothing while nothing is traced."""
    return torch.profiler.record_function(name) if _active else contextlib.nullcontext()


class Tracer:
    """Traces this process on its processors, and on its GPU if `device` is one."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._profiler: Any = None

    def start(self) -> None:
        """Begin a trace, unless one is under way."""
        global _active
        if self._profiler is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's tracer prints lines of its own otherwise
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":  # without a GPU of its own, it must not start CUDA on another's
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            _active = True

    def stop(self) -> bytes:
        """End the trace and return it as compressed JSON, b"" if there is none."""
        global _active
        if self._profiler is None:
            return b""
        profiler, self._profiler, _active = self._profiler, None, False
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            profiler.export_chrome_trace(str(path))
            return path.read_bytes()
