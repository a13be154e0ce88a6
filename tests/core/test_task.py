"""The layout of weights in memory."""

import torch
from torch.nn.functional import cross_entropy

from rayfed.core.task import Task
from rayfed.engine.exact_sum import ExactSum
from rayfed.models.build import build_model


def test_images_of_one_channel_take_the_fast_convolutions():
    """Torch picks its kernels by strides, which are ambiguous with one channel; the slow ones cost a quarter more."""
    task = Task(build_model("cnn", {}, (1, 28, 28), 10), cross_entropy, num_clients=1, num_classes=10)
    first = next(value for value in task.initial_weights().values() if value.dim() == 4)
    assert first.shape[1] == 1
    assert first.stride() == (25, 1, 5, 1)
    copied = ExactSum()
    copied.add({"w": first.clone()}, 1.0)
    assert task.to_memory_format(copied.result())["w"].stride() == (25, 1, 5, 1)
    plain = first.contiguous(memory_format=torch.contiguous_format).reshape(-1).reshape(first.shape)  # as unpacked
    assert task.to_memory_format({"w": plain})["w"].stride() == (25, 1, 5, 1)
