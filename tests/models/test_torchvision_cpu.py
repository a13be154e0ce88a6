"""torchvision beside a CPU-only torch: what rayfed and its users import of it works, in a fresh process."""

import importlib.util
import subprocess
import sys

import torch

from rayfed.core import torchvision_cpu

PROGRAM = """
import warnings
warnings.simplefilter("error")
import sys
import rayfed
assert "torch" not in sys.modules
import torch
from torchvision import datasets, models
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional
images = torch.rand(4, 3, 16, 16)
assert datasets.FakeData(size=2, transform=v2.PILToTensor())[0][0].shape == (3, 224, 224)
assert functional.rotate(images, 30.0).shape == images.shape
assert functional.gaussian_blur(images, [3, 3], [1.0, 1.0]).shape == images.shape
assert v2.Compose([v2.RandomCrop(16, padding=2), v2.RandomHorizontalFlip()])(images).shape == images.shape
assert models.resnet18(num_classes=5)(images).shape == (4, 5)
print("fine")
"""


def test_in_a_fresh_process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"


def test_leaves_a_torch_for_gpus_alone(monkeypatch):
    declared = []
    monkeypatch.setattr(torch.library, "Library", lambda *names: declared.append(names))
    monkeypatch.setattr(torchvision_cpu, "hasattr", lambda *names: False, raising=False)  # as in a fresh process
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    torchvision_cpu._prepare(importlib.util.find_spec("torchvision").origin)
    assert not declared
