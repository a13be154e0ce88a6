"""An MLP whose first layer is frozen and has an adapter of low rank (LoRA), for privacy_lora.yaml."""

from collections.abc import Sequence

from torch import Tensor, nn


class Adapted(nn.Module):
    """W x + B A x (Hu et al. 2022), where W keeps its random numbers, A [rank, inputs] is random and B starts at 0."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.lora_B(self.lora_A(x))
        whole: Tensor = self.base_layer(x) + added
        return whole


def lora_mlp(shape: Sequence[int], classes: int, rank: int = 8) -> nn.Module:
    """Return the network for images [channels, height, width]."""
    channels, height, width = shape
    hidden = 256
    adapted = Adapted(channels * height * width, hidden, rank)
    return nn.Sequential(nn.Flatten(), adapted, nn.ReLU(), nn.Linear(hidden, classes))
