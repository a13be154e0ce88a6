"""CCT-7/3x1, the compact convolutional transformer (Hassani et al. 2021) that FedDebias uses for CIFAR-100."""

import dataclasses

import torch
from torch import Tensor, nn

from rayfed.core.options import option
from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel


class Attention(nn.Module):
    """Multi-head self-attention on [batch, tokens, width], without bias in queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = map(self.by_head, parts)
        scale = q.shape[-1] ** 0.5
        scores = q @ k.transpose(-2, -1) / scale
        weights = self.dropout(scores.softmax(-1))
        mixed = (weights @ v).transpose(-3, -2)
        output: Tensor = self.out(mixed.flatten(-2))
        return output

    def by_head(self, x: Tensor) -> Tensor:
        """Return `x` [batch, tokens, width] as [batch, heads, tokens, width of a head]."""
        heads: Tensor = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(-3, -2)


class DropPath(nn.Module):
    """Stochastic depth: in training, drop the residual of an example with probability `rate`, else scale it up."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        ones = [1] * (x.dim() - 1)
        kept = torch.rand(len(x), *ones, device=x.device) >= self.rate
        return x * kept / (1 - self.rate)


class Layer(nn.Module):
    """A transformer layer as in CCT's code: the second norm lies on the main path, before both branches."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm1(x))
        x = self.norm2(x + self.drop_path(attended))
        output: Tensor = x + self.drop_path(self.mlp(x))
        return output


class Encoder(nn.Module):
    """Encoder from images to vectors [batch, width]: convolutional tokens, positions, layers and sequence pooling.

    Sequence pooling is a mean over tokens with learned attention weights.
    """

    def __init__(
        self, shape: tuple[int, int, int], width: int, depth: int, heads: int, dropout: float, drop_path: float
    ):
        super().__init__()
        channels, image_height, image_width = shape
        convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        pooling = nn.MaxPool2d(3, stride=2, padding=1)
        self.tokens = nn.Sequential(convolution, nn.ReLU(), pooling)
        rows = (image_height + 1) // 2
        columns = (image_width + 1) // 2
        count = rows * columns
        self.positions = nn.Parameter(torch.zeros(1, count, width))
        layers = []
        for i in range(depth):
            rate = drop_path * i / max(depth - 1, 1)  # deeper layers are dropped more often
            layers.append(Layer(width, heads, 2 * width, dropout, rate))
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.pool = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens(x).flatten(2).transpose(1, 2)
        x = self.layers(tokens + self.positions)
        x = self.norm(x)
        weights = self.pool(x).softmax(1)
        pooled: Tensor = (weights * x).sum(1)
        return pooled


def _initialise(module: nn.Module) -> None:
    """Draw the first weights of a layer as CCT's code does."""
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
    """One 3x3 convolution, 7 transformer layers (4 heads, width 256, MLP ratio 2), sequence pooling, FC C.

    3,760,139 parameters for 3x32x32 and 10 classes. The representation is the pooled vector.
    """

    name = "cct"
    depth: int = option(7, low=1, help="transformer layers")
    heads: int = option(4, low=1, help="attention heads")
    head_width: int = option(64, low=1, help="width of one attention head; 64 gives the paper's total width of 256")
    attention_dropout: float = option(0.1, low=0, below=1, help="dropout of attention weights")
    stochastic_depth: float = option(
        0.1, low=0, below=1, help="probability of dropping the branches of the last layer; smaller for earlier layers"
    )

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        size = self.image_shape(shape, minimum=2)
        width = self.heads * self.head_width
        encoder = Encoder(size, width, self.depth, self.heads, self.attention_dropout, self.stochastic_depth)
        head = nn.Linear(width, num_classes)
        return SplitModel(encoder, head, shape).apply(_initialise)
