"""Ditto: Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", Alg. 1 and 2.

    client:  v_i ← v_i − η (∇f_i(v_i) + μ (v_i − w_t)) for some epochs, where w_t are the weights received;
             w_i ← w_t, then local training as in FedAvg
    server:  FedAvg of the w_i; the personal models v_i are never sent

All points except `global` score the personal model v_i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfed.algorithm import ClientData, Context, Exchange, Finished, Phase, Retrained, State, Stepped
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedprox import pulled
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, only

PERSONAL = "personal"
"""The name of the phase that trains the personal model."""


def personal_training(ctx: Context) -> Sequence[Phase]:
    """Return the configured training as that of the personal model alone."""
    return (ctx.local._replace(name=PERSONAL),)


@dataclass(frozen=True, kw_only=True)
class PersonalModel(FedAvg):
    """FedAvg in which clients keep a model of their own. That model is scored.

    It starts from the initial weights, and for an unseen client from the weights received.
    """

    traits = replace(FedAvg.traits, default_eval_point="downloaded")

    def join(self, ctx: Context) -> State:
        client = super().join(ctx)
        client["model"] = ctx.task.initial_weights()
        return client

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        model = self.personal_model(ctx, client, down)
        fresh = ctx.optimizer.init(only(model, ctx.task.trainable))
        work["model"] = model
        work["model_optimizer"] = client.get("model_optimizer", fresh)
        return work

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        kept["model"] = work["model"]
        if ctx.keep_optimizer:
            kept["model_optimizer"] = work["model_optimizer"]
        return kept, up

    def personal_model(self, ctx: Context, client: State, down: State) -> Weights:
        """Return the personal model with which the client begins a round."""
        if ctx.unseen:
            received: Weights = super().downloaded_model(ctx, client, down)
            return received
        model: Weights = client["model"]
        return model

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return self.personal_model(ctx, client, down)

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return work["model"]


@dataclass(frozen=True, kw_only=True)
class Ditto(PersonalModel):
    name = "ditto"
    reference = "Li et al. 2021 (Ditto), Alg. 1 and 2"

    mu: float = option(
        1.0,
        low=0,
        help="μ (λ in the paper), pull of the personal model towards w_t",
        elsewhere={"authors": "1 in their scripts (0 without)", "PFLlib": "0"},
    )
    personal_epochs: int = option(
        1,
        low=1,
        help="epochs of the personal model per round",
        elsewhere={"authors": "as many steps as of the common model", "PFLlib": "1"},
    )

    @property
    def adaptation(self) -> Exchange:
        return Retrained(self, personal_training)

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return Phase(PERSONAL, epochs=self.personal_epochs), ctx.local

    def correct(self, ctx: Context, grads: Weights, work: State, down: State) -> Weights:
        if ctx.phase != PERSONAL:
            return grads
        return pulled(grads, work["weights"], down["weights"], self.mu)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        if ctx.phase != PERSONAL:
            return super().step(ctx, work, down, batch)
        personal = work | {"weights": work["model"], "optimizer": work["model_optimizer"]}
        personal, metrics = super().step(ctx, personal, down, batch)
        return work | {"model": personal["weights"], "model_optimizer": personal["optimizer"]}, metrics
