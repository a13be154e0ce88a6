"""CCT-7/3x1, compact convolutional transformer (Hassani et al. 2021), which FedDebias uses for CIFAR-100."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.core.options import option
from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel


class Attention(nn.Module):
    """Multi-head self-attention on [batch, tokens, width]; queries, keys and values without bias."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        mixed = self.dropout(scores.softmax(-1)) @ v
        return self.out(mixed.transpose(-3, -2).flatten(-2))


class DropPath(nn.Module):
    """Stochastic depth: in training an example's residual is left out with probability `rate`, else scaled up."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        kept = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device) >= self.rate
        return x * kept / (1 - self.rate)


class Layer(nn.Module):
    """A transformer layer of CCT's code: the second norm is on the main path, in front of both branches."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, drop_path: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.drop_path(self.attention(self.norm1(x))))
        return x + self.drop_path(self.mlp(x))


class Encoder(nn.Module):
    """Images to one vector [batch, width]: convolutional tokens, positions, layers, attention-weighted mean."""

    def __init__(self, shape: tuple[int, int, int], width: int, depth: int, heads: int, dropout: float, path: float):
        super().__init__()
        channels, height, side = shape
        self.tokens = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
        )
        count = ((height + 1) // 2) * ((side + 1) // 2)
        self.positions = nn.Parameter(torch.zeros(1, count, width))
        rates = [path * i / max(depth - 1, 1) for i in range(depth)]  # deeper layers are left out more often
        self.layers = nn.Sequential(*(Layer(width, heads, 2 * width, dropout, rate) for rate in rates))
        self.norm = nn.LayerNorm(width)
        self.pool = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x).flatten(2).transpose(1, 2) + self.positions
        x = self.norm(self.layers(x))
        return (self.pool(x).softmax(1) * x).sum(1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    if isinstance(module, Encoder):
        nn.init.trunc_normal_(module.positions, std=0.2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CCT(ModelOptions):
    """One 3x3 convolution, 7 transformer layers of 4 heads, width 256 and MLP ratio 2, sequence pooling, FC C.

    3,760,139 parameters on 3x32x32 with 10 classes. The representation is the pooled vector.
    """

    name: ClassVar[str] = "cct"
    depth: int = option(7, low=1, help="transformer layers")
    heads: int = option(4, low=1, help="attention heads")
    width: int = option(64, low=1, help="width of a head; 64 gives the paper's 256 in all")
    attention_dropout: float = option(0.1, low=0, below=1, help="dropout of attention weights")
    stochastic_depth: float = option(0.1, low=0, below=1, help="rate at which the last layer's branches are left out")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        size, width = self.image_shape(shape, minimum=2), self.heads * self.width
        encoder = Encoder(size, width, self.depth, self.heads, self.attention_dropout, self.stochastic_depth)
        model = SplitModel(encoder, nn.Linear(width, num_classes), shape)
        return model.apply(_initialise)
