"""torchvision beside a CPU-only torch: what rayfed uses of it works, in a fresh process."""

import subprocess
import sys

import torch

from rayfed.core import torchvision_cpu

PROGRAM = """
import warnings
warnings.simplefilter("error")
from rayfed.core import torchvision_cpu
torchvision_cpu.prepare()
torchvision_cpu.prepare()
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
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torchvision_cpu, "_declared", None)
    torchvision_cpu.prepare()
    assert torchvision_cpu._declared is None
