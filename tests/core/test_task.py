"""The layout of weights in memory."""

import torch
from torch.nn.functional import cross_entropy

from rayfed.core.exact_sum import ExactSum
from rayfed.core.task import Task
from rayfed.models.base import build_model


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


def test_tasks_share_the_weights_of_their_model_and_no_module():
    model = build_model("mlp", {"batch_norm": True}, (6,), 3)
    one, other = (Task(model, cross_entropy, num_clients=1, num_classes=3) for _ in range(2))
    addresses = {name: value.data_ptr() for name, value in model.state_dict().items()}
    for task in (one, other):
        assert {name: value.data_ptr() for name, value in task.initial_weights().items()} == addresses
        assert {name: value.data_ptr() for name, value in task.model.module.state_dict().items()} == addresses
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other.forward(other.initial_weights(), torch.randn(4, 6), train=False)
    one.forward(one.initial_weights(), torch.randn(4, 6), train=True)
    assert one.model.module.training
    assert not other.model.module.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_new_weights_are_the_same_in_any_memory_format():
    model = build_model("cnn", {}, (3, 28, 28), 10)
    task = Task(model, cross_entropy, num_clients=1, num_classes=10)
    assert any(not value.is_contiguous() for value in task.model.module.parameters())
    torch.manual_seed(1)
    drawn = task.model.draw_weights()
    torch.manual_seed(1)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    assert all(torch.equal(value, drawn[name]) for name, value in model.named_parameters())
