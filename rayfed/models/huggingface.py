"""Models of the library transformers, fine-tuned as a whole or by LoRA (Hu et al. 2022) with the library peft."""

import dataclasses
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from rayfed.core.errors import UsageError
from rayfed.core.options import build, option, suggestion
from rayfed.core.paths import expanded

TASKS = {
    "sequence_classification": ("AutoModelForSequenceClassification", "SEQ_CLS"),
    "token_classification": ("AutoModelForTokenClassification", "TOKEN_CLS"),
    "causal_lm": ("AutoModelForCausalLM", "CAUSAL_LM"),
}
"""The class of transformers and peft's name of each task."""
_HEADS = ("classifier", "score")  # which peft trains beside the adapters by itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
    """model.lora.*: low-rank adapters, W + alpha/rank · B A with W frozen; B is zero at first."""

    rank: int = option(8, low=1, help="rank of the adapters")
    alpha: float = option(16.0, above=0, help="scale of the adapters, times their rank")
    dropout: float = option(0.0, low=0, below=1, help="dropout of the adapters' inputs")
    targets: list[str] | None = option(
        None, help="ends of the names of the layers that get adapters; null: peft's choice for the architecture"
    )
    train: str = option(
        "ab", choices=("ab", "b"), help="train A and B, or B alone with the common A of the seed (FFA-LoRA)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """Any text model of transformers. Inputs are token numbers [length], or `input_ids` beside other arrays.

    Without an `attention_mask`, positions with the configuration's `pad_token_id` are masked. Logits of positions are
    [classes, length], as torch's cross-entropy takes them. Layers that the checkpoint lacks, such as the classifier,
    are drawn by the seed, and trained also with `lora`.
    """

    name = "huggingface"
    source: str = option(help="folder written by `save_pretrained`, or a name on the hub, such as prajjwal1/bert-tiny")
    task: str = option("sequence_classification", choices=tuple(TASKS), help="what the outputs are")
    lora: dict[str, Any] | None = option(
        None, help="train adapters alone: a mapping with rank, alpha, dropout, targets and train; null: all weights"
    )
    freeze: list[str] = option([], help="globs of the names of weights that are not trained, such as *embeddings*")

    def __post_init__(self) -> None:
        if self.lora is not None:
            build(LoRA, self.lora, where="model.lora")

    def build(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Load the network with `num_classes` outputs; a causal language model has one for each of its tokens."""
        class_name, task = TASKS[self.task]
        kind = getattr(_library("transformers"), class_name)
        with _quiet():
            network, new = self._load(kind, num_classes)
            if self.lora is not None:
                network = _adapted(network, build(LoRA, self.lora, where="model.lora"), task, new)
        model = TextModel(network)
        for glob in self.freeze:
            _freeze(model, glob)
        return model

    def _load(self, kind: Any, num_classes: int) -> tuple[Any, set[str]]:
        """Return a network of this class in float32, and the names of its layers that the checkpoint lacks."""
        folder = expanded(self.source)
        if folder.is_dir():
            source = str(folder)
        else:
            source = self.source
        head: dict[str, Any] = {}
        if self.task != "causal_lm":
            head = {"num_labels": num_classes, "ignore_mismatched_sizes": True}
        try:
            network, loaded = kind.from_pretrained(source, output_loading_info=True, **head)
        except (OSError, ValueError) as error:
            what = "neither a folder nor found"
            if folder.is_dir():
                what = f"holds no model for model.task={self.task}"
            reason = " ".join(str(error).split())
            raise UsageError(f"model.source={self.source}: {what} ({reason[:200]})") from error
        new = {name.rpartition(".")[0] for name in loaded["missing_keys"]}
        return network.float(), new


class TextModel(nn.Module):
    """A model of transformers, its `network`, that takes token numbers and returns logits alone."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.padding: int | None = getattr(network.config, "pad_token_id", None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Return the logits [batch, classes], or [batch, classes, length] of positions.

        Args:
            input_ids: Token numbers [batch, length].
            attention_mask: 0 where a position is padding [batch, length].
            inputs: Further arrays that the network takes.
        """
        input_ids = input_ids.long()
        if attention_mask is None and self.padding is not None:
            attention_mask = input_ids != self.padding
            attention_mask = attention_mask | ~attention_mask.any(1, keepdim=True)  # a softmax needs a position
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask.long()
        logits: Tensor = self.network(input_ids=input_ids, **inputs).logits
        return logits.movedim(-1, 1)


def _freeze(model: nn.Module, glob: str) -> None:
    """Have the parameters with such names not trained.

    Raises:
        UsageError: There is none.
    """
    named = dict(model.named_parameters())
    found = [value for name, value in named.items() if fnmatchcase(name, glob)]
    if not found:
        raise UsageError(f"model.freeze={glob}: no weight has such a name; one is {next(iter(named))}")
    for value in found:
        value.requires_grad_(False)


def _adapted(network: Any, lora: LoRA, task: str, new: set[str]) -> Any:
    """Return `network` as a model of peft with adapters; its layers `new` are trained as a whole."""
    peft = _library("peft")
    layers = dict(network.named_modules())
    for target in lora.targets or ():
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            linear = {name.rpartition(".")[2] for name, layer in layers.items() if isinstance(layer, nn.Linear)}
            raise UsageError(f"model.lora.targets={target}: no layer has such a name; {suggestion(target, linear)}")
    trained = sorted(name for name in new if name.partition(".")[0] not in _HEADS)
    config = peft.LoraConfig(
        task_type=task,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        modules_to_save=trained or None,
    )
    adapted = peft.get_peft_model(network, config)
    if lora.train == "b":
        for name, value in adapted.named_parameters():
            if ".lora_A." in name or ".lora_embedding_A." in name:
                value.requires_grad_(False)
    return adapted


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the notes and progress bars of transformers, such as those on a classifier that is new."""
    notes = _library("transformers.utils.logging")
    before = notes.get_verbosity()
    bars = notes.is_progress_bar_enabled()
    notes.set_verbosity(logging.ERROR)
    notes.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        notes.set_verbosity(before)
        if bars:
            notes.enable_progress_bar()


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        remedy = "is not installed; pip install 'rayfed-sim[text]'"
        raise UsageError(f"model.name=huggingface: the package {name} {remedy}") from error
