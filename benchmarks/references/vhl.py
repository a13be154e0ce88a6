"""VHL's authors (Tang et al. 2022): their local training of one epoch and their alignment loss.

Their virtual data come from a generator of their own, so rayfed's take their place, in rayfed's batches. The rest of
their trainer (data sets, logging, the server) is replaced; models are averaged here, by training examples.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from rayfed.algorithms import vhl
from references.checkout import Checkout, anything
from references.harness import PARTIAL, Case, Feed, Models, Setting, Trace, mean, plain, server_weights

SOURCE = "vhl"
TRIED = "c5aa7a1"

STAND_INS = anything(
    "wandb",
    "fedml_core.trainer.model_trainer",
    "data_preprocessing.utils.stats",
    "data_preprocessing.build",
    "utils.data_utils",
    "utils.model_utils",
    "utils.matrix_utils",
    "utils.distribution_utils",
    "utils.context",
    "utils.checkpoint",
    "model.build",
    "trainers.averager",
    "trainers.build",
    "trainers.tSNE",
    "loss_fn.build",
    "loss_fn.cov_loss",
)


@contextmanager
def watch(extra: dict[str, Any]) -> Iterator[None]:
    """Note the virtual data, and the order in which each client reads them in each round."""
    extra["orders"] = {}
    start = vhl.VHL.start

    def noting(self: Any, ctx: Any, client: Any, down: Any) -> Any:
        work = start(self, ctx, client, down)
        extra["orders"][ctx.round, ctx.client] = work["order"].clone()
        extra["virtual"] = client["virtual"]
        return work

    with mock.patch.object(vhl.VHL, "start", noting):
        yield


def theirs(checkout: Checkout, trace: Trace) -> Models:
    """Return the average after training with `VHL_train_one_epoch`, virtual classes being those of the clients."""
    with checkout.importing(".", STAND_INS) as load:
        trainer, align = load("trainers.normal_trainer", "NormalTrainer"), load("loss_fn.losses", "proxy_align_loss")
        weights, feed = plain(trace.initial), Feed(trace)
        for round in range(1, trace.setting.rounds + 1):
            feed.start(round)
            trained = {}
            for i in trace.cohort(round):
                model = Returning(copy.deepcopy(trace.initial))
                model.net.load_state_dict(weights)
                state = _state(model, trace, feed, i, round, align)
                for epoch in range(trace.setting.epochs):
                    train = trainer.VHL_train_one_epoch
                    train(state, feed.loader(i), torch.device("cpu"), None, epoch, state, state, make_summary=False)
                trained[i] = plain(model.net)
            weights = mean(trained, trace)
        feed.finish()
        return {"server": weights}


def _state(model: nn.Module, trace: Trace, feed: Feed, client: int, round: int, align: Callable[..., Any]) -> Any:
    """Return what stands for their trainer object, with the attributes that the epoch reads."""
    options, extra = trace.setting.algorithm, trace.extra
    size = options["virtual_batch_size"]
    order, virtual = extra["orders"][round, client], extra["virtual"]
    read = iter(range(0, 10**9, size))

    def virtual_batch(noise_label_style: str, y_train: Tensor) -> tuple[Tensor, Tensor]:
        rows = order[(torch.arange(size) + next(read)) % len(order)]
        return virtual["x"][rows], virtual["y"][rows]

    args = SimpleNamespace(
        fedprox=False,
        scaffold=False,
        dataset="",
        VHL_label_style="extra",
        model_out_feature=True,
        VHL_alpha=options["alpha"],
        VHL_feat_align=True,
        VHL_align_local_epoch=5,
        record_dataframe=False,
    )
    return SimpleNamespace(
        model=model,
        args=args,
        optimizer=torch.optim.SGD(model.parameters(), lr=trace.setting.lr),
        lr_scheduler=None,
        server_index=0,
        client_index=client,
        get_train_batch_data=lambda data: feed.next(client),
        generate_noise_data=virtual_batch,
        proxy_align_loss=align(
            inter_domain_mapping=False,
            inter_domain_class_match=True,
            noise_feat_detach=True,
            noise_contrastive=True,
            noise_label_shift=0,
            device=torch.device("cpu"),
        ),
        evaluate=lambda *_: {"Loss": 0.0, "Acc1": 0.0},
        update_local_record=lambda *_, **__: None,
    )


class Returning(nn.Module):
    """A network that returns its features, too."""

    def __init__(self, net: Any):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.net.features(x)
        return self.net.head(features), features


def cases() -> list[Case]:
    """Return all comparisons with the authors' VHL."""
    own = {"name": "vhl", "alpha": 0.7, "virtual_examples": 60, "virtual_batch_size": 8}
    variant = "virtual classes share the outputs of the local ones"
    settings = (Setting(own, lr=0.05, **partial) for partial in ({}, PARTIAL))
    return [Case("vhl", SOURCE, setting, theirs, server_weights, watch, variant) for setting in settings]
