"""Import of torchvision's PyPI wheel beside a CPU-only torch.

The compiled part of that wheel links to CUDA, so it does not load, and `import torchvision` fails with "operator
torchvision::nms does not exist". The import only looks up two operators for detection, and their declaration is enough:
the rest of torchvision is plain Python. `import rayfed` installs a finder that declares them when torchvision is first
imported. The user's own code may do that, or a process of Ray that unpickles a model.
"""

import importlib.machinery  # not importlib.abc, which would take twice as long as all of `import rayfed`
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: Any = None  # the operators exist as long as this object


def install() -> None:
    """Let every later `import torchvision` of this process find the two operators."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds torchvision as Python does. Its loader imports torch when torchvision is executed."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None or spec.origin is None:
            return spec
        file = spec.origin
        execute = spec.loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            _prepare(file)
            execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _prepare(file: str) -> None:
    """Declare the operators of the torchvision whose `__init__` is `file`, unless its compiled operators load.

    Beside a torch for CUDA or ROCm nothing is declared: Python then reports the broken installation.
    """
    global _declared
    from pathlib import Path

    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    if hasattr(torch.ops.torchvision, "nms"):
        return
    candidates = Path(file).parent.glob("_C*")
    binaries = [path for path in candidates if path.suffix in {".so", ".pyd", ".dylib"}]
    try:
        for path in binaries:
            torch.ops.load_library(str(path))
        if binaries:
            return
    except OSError:
        pass
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared = library
