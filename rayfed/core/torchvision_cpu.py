"""Lets torchvision's PyPI wheel be imported beside a CPU-only torch.

The wheel that the package index serves is built for CUDA. Its compiled part links to CUDA libraries that a CPU-only
torch does not bring, so it does not load, and the import of torchvision then ends in "operator torchvision::nms does
not exist". Only two operators (detection's `nms` and `qnms`) are asked for at import time, so declaring them, without
an implementation, is enough: data sets, transforms and classification models are Python on top of torch.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: torch.library.Library | None = None  # the operators live as long as this object


def prepare() -> None:
    """Call before every `import torchvision`; cheap to call again.

    Does nothing with a torch built for CUDA or ROCm (a broken installation should say so there), where torchvision's
    own compiled part loads, and where torchvision is not installed.
    """
    global _declared
    if _declared is not None or torch.version.cuda is not None or torch.version.hip is not None:
        return
    if hasattr(torch.ops.torchvision, "nms") or _own_operators_load():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared = library


def _own_operators_load() -> bool:
    """Whether torchvision's compiled operators load; True also where there is no torchvision to help."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return True
    binaries = [path for path in Path(found.origin).parent.glob("_C*") if path.suffix in {".so", ".pyd", ".dylib"}]
    try:
        for path in binaries:
            torch.ops.load_library(str(path))
    except OSError:
        return False
    return bool(binaries)
