"""fastText (Joulin et al., EACL 2017) as DBE uses it for AG News (Zhang et al., NeurIPS 2023)."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel, dry_run


class MeanEmbedding(nn.Module):
    """Token numbers [batch, length] to the mean of their vectors [batch, width]; padding counts in the mean."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens.long()).mean(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastText(ModelOptions):
    """Embedding, mean over the text, FC without activation, FC C; the representation is the input of the last layer.

    Inputs are whole numbers below `vocabulary`, 0 being padding. 3,157,508 parameters with 98,635 words and 4 classes.
    Raw logits, without the log-softmax of PFLlib's.
    """

    name: ClassVar[str] = "fasttext"
    vocabulary: int = option(98_635, low=2, help="number of words, padding (0) included")
    hidden: int = option(32, low=1, help="width of the word vectors and of the hidden layer")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        if len(shape) != 1:
            text = "x".join(str(size) for size in shape)
            raise UsageError(f"model.name=fasttext: takes texts of token numbers (length), got samples of {text}")
        body = nn.Sequential(MeanEmbedding(self.vocabulary, self.hidden), nn.Linear(self.hidden, self.hidden))
        model = SplitModel(body, nn.Linear(self.hidden, num_classes))
        model.feature_shape = tuple(dry_run(body, torch.zeros(1, *shape, dtype=torch.long)).shape[1:])
        return model
