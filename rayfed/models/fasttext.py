"""fastText (Joulin et al., EACL 2017) as used by DBE for AG News (Zhang et al., NeurIPS 2023)."""

import dataclasses

import torch
from torch import Tensor, nn

from rayfed.core.options import option
from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel, dry_run


class MeanEmbedding(nn.Module):
    """Mean of the embeddings [batch, width] of token numbers [batch, length]; padding is included in the mean."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)

    def forward(self, tokens: Tensor) -> Tensor:
        mean: Tensor = self.embedding(tokens.long()).mean(1)
        return mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastText(ModelOptions):
    """Embedding, mean over tokens, FC without activation, FC C.

    Inputs are integers below `vocabulary`, with 0 for padding. The representation is the input of the last layer.
    3,157,508 parameters for 98,635 words and 4 classes. Outputs are logits, without the log-softmax in PFLlib.
    """

    name = "fasttext"
    vocabulary: int = option(98_635, low=2, help="number of words, including padding (0)")
    hidden: int = option(32, low=1, help="width of the word embeddings and of the hidden layer")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        self.require(len(shape) == 1, "sequences of token numbers (length)", shape)
        embedding = MeanEmbedding(self.vocabulary, self.hidden)
        body = nn.Sequential(embedding, nn.Linear(self.hidden, self.hidden))
        model = SplitModel(body, nn.Linear(self.hidden, num_classes))
        tokens = torch.zeros(1, *shape, dtype=torch.long)
        model.feature_shape = tuple(dry_run(body, tokens).shape[1:])
        return model
