"""Import of torchvision's PyPI wheel beside a CPU-only torch.

The wheel on the package index is built for CUDA. Its compiled part links to CUDA libraries that a CPU-only torch does
not include, so it does not load, and `import torchvision` fails with "operator torchvision::nms does not exist". The
import only looks up two operators (`nms` and `qnms`, for detection), so declaring them without an implementation is
enough: data sets, transforms and classification models are plain Python on top of torch.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: torch.library.Library | None = None  # the operators exist as long as this object


def prepare() -> None:
    """Declare torchvision's operators if needed. Call this before every `import torchvision`; repeated calls are cheap.

    Do nothing if torch is built for CUDA or ROCm (a broken installation should be reported there), if torchvision's
    compiled operators load, or if torchvision is not installed.
    """
    global _declared
    if _declared is not None or torch.version.cuda is not None or torch.version.hip is not None:
        return
    if hasattr(torch.ops.torchvision, "nms") or _compiled_operators_load():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared = library


def _compiled_operators_load() -> bool:
    """Return whether torchvision's compiled operators load; True also if torchvision is not installed."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    binaries = [path for path in Path(spec.origin).parent.glob("_C*") if path.suffix in {".so", ".pyd", ".dylib"}]
    try:
        for path in binaries:
            torch.ops.load_library(str(path))
    except OSError:
        return False
    return bool(binaries)
